"""What stands before every route: API keys, and the request id that goes back with the answer."""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import error_bytes

MAX_REQUEST_ID = 128


class Guard:
    """ASGI middleware. Routes under /v1 need one of ``api_keys``, if there are any; OPTIONS passes."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = re.sub(r"[^\x21-\x7e]", "", headers.get("x-request-id", ""))[:MAX_REQUEST_ID]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        answer = send_with_id if request_id else send
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._keys and path.startswith("/v1") and scope["method"] != "OPTIONS" and not self._allowed(headers):
            await self._refuse(scope, receive, answer)
            return
        await self._app(scope, receive, answer)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("utf-8", "surrogateescape")
        # every key is compared, each in constant time: the answer's time tells nothing about them
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    @staticmethod
    async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
        body = error_bytes(401, "a valid API key is needed: Authorization: Bearer KEY", "Authorization")
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await Response(body, 401, media_type="application/json", headers=headers)(scope, receive, send)
