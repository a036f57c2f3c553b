"""The sequences of one HTTP request, and what the engine has told of them since the reader last looked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.types import Request, RequestUpdate


class RejectedError(Exception):
    """The engine refused a request. ``param`` None: its queue is full."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class Generation:
    """Updates of several requests, merged per request until ``next`` takes them.

    A slow reader so holds one growing update per sequence, bounded by max_tokens, and never the engine.
    ``interval``: after its first token a sequence is only shown when this many tokens have come, or it ended.
    """

    def __init__(self, requests: list[Request], *, interval: int = 1) -> None:
        self._index = {request.request_id: i for i, request in enumerate(requests)}
        self._interval = interval
        self._pending: dict[str, RequestUpdate] = {}
        self._shown: set[str] = set()
        self._event = asyncio.Event()
        self._rejected: RejectedError | None = None
        self.unfinished = set(self._index)
        self.last_activity = time.monotonic()
        self.on_update: Callable[[RequestUpdate], None] | None = None

    def deliver(self, update: RequestUpdate) -> None:
        if self.on_update is not None:
            self.on_update(update)
        known = self._pending.get(update.request_id)
        if known is None:
            self._pending[update.request_id] = update
        else:
            merge(known, update)
            update = known
        if update.finish_reason is not None:
            self.unfinished.discard(update.request_id)
        elif len(update.token_ids) < self._interval and update.request_id in self._shown:
            return
        self._event.set()

    def reject(self, request_id: str, param: str | None, message: str) -> None:
        self._rejected = RejectedError(param, message)
        self.unfinished.discard(request_id)
        self._event.set()

    def forget(self, request_id: str) -> None:
        """A sequence that the front end ended itself (a stop string)."""
        self.unfinished.discard(request_id)
        self._pending.pop(request_id, None)

    async def next(self) -> list[tuple[int, RequestUpdate]]:
        """What came since the last call, by index of the sequence; waits for something. Raises RejectedError."""
        await self._event.wait()
        self._event.clear()
        if self._rejected is not None:
            raise self._rejected
        pending, self._pending = self._pending, {}
        self._shown.update(pending)
        return [(self._index[request_id], update) for request_id, update in pending.items()]


def merge(into: RequestUpdate, update: RequestUpdate) -> None:
    """Append a later update of the same request."""
    into.token_ids += update.token_ids
    into.logprobs += update.logprobs
    into.prompt_logprobs += update.prompt_logprobs
    if update.finish_reason is not None:
        into.finish_reason = update.finish_reason
        into.stop_reason = update.stop_reason
        into.error = update.error
    into.num_cached_tokens = max(into.num_cached_tokens, update.num_cached_tokens)
    into.first_scheduled_time = update.first_scheduled_time or into.first_scheduled_time
