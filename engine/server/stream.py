"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError, error_bytes

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client closes the connection (ClientGone)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends chunks as events until they end, then ``[DONE]``. ``close`` runs at the end, however it comes.

    Headers go out before the first chunk exists. A client that reads slowly stops this coroutine alone. A client that
    leaves stops it too, and ``close`` then aborts what it asked for.
    """

    def __init__(
        self,
        chunks: AsyncIterator[list[dict[str, Any]]],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._close = close
        self._raw_headers = [*HEADERS, *((k.lower().encode(), v.encode()) for k, v in (headers or {}).items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._raw_headers})
        try:
            async for chunks in self._chunks:
                await self._send(send, b"".join([b"data: %b\n\n" % to_json(chunk) for chunk in chunks]))
        except ApiError as error:
            await self._send(send, b"data: %b\n\n" % error_bytes(error.status, error.message, error.param))
        except Exception:
            logger.exception("a stream failed")
            await self._send(send, b"data: %b\n\n" % error_bytes(500, "internal error"))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    @staticmethod
    def _send(send: Send, data: bytes) -> Awaitable[None]:
        return send({"type": "http.response.body", "body": data, "more_body": True})
