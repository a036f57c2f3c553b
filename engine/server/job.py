"""One HTTP request on the engine: n sequences for each prompt, from admission to the last update."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import AsyncIterator, Callable

from engine.server.errors import ApiError, draining, engine_dead, queue_full
from engine.server.generation import Generation, RejectedError
from engine.server.metrics import RequestTimes
from engine.server.protocol import GenerateOptions, check_prompt_ids, check_room
from engine.server.state import ServerState
from engine.text.chat_messages import shown
from engine.types import FinishReason, ParameterError, Request, RequestUpdate

logger = logging.getLogger(__name__)

LONG_TEXT = 20_000  # characters; longer texts are encoded off the event loop, so that running streams go on


class Job:
    """Submits on construction; ``updates`` yields news by choice index; ``close`` ends whatever still runs.

    Choice ``prompt * n + k`` is the k-th answer to a prompt; with a seed it samples with seed + k.
    """

    def __init__(
        self,
        state: ServerState,
        prompts: list[list[int]],
        options: GenerateOptions,
        *,
        kind: str,
        param: str,
        client_id: str | None = None,
    ) -> None:
        state.check_serving()
        sampling = options.sampling
        for ids in prompts:
            check_prompt_ids(ids, state.limits, param)
            check_room(len(ids), 0 if sampling.max_tokens == 0 else 1, state.limits, param)
        wanted, capacity = len(prompts) * sampling.n, state.engine.capacity
        if capacity is not None and wanted > capacity:
            raise ParameterError("n", f"n times the number of prompts is {wanted}, and only {capacity} can be queued")
        if not state.engine.has_room(wanted):
            raise queue_full()
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self._state = state
        requests = []
        for prompt, ids in enumerate(prompts):
            for k in range(sampling.n):
                seed = None if sampling.seed is None else (sampling.seed + k) % (1 << 63)
                one = dataclasses.replace(sampling, n=1, seed=seed if k else sampling.seed)
                request_id = f"{self.id}-{prompt * sampling.n + k}"
                requests.append(Request(request_id, ids, one, priority=options.priority))
        self.num_choices = len(requests)
        self._ids = [request.request_id for request in requests]
        self._times = {request.request_id: RequestTimes(len(request.prompt_token_ids)) for request in requests}
        self._generation = Generation(requests, interval=state.stream_interval)
        self._generation.on_update = self._on_update
        if state.log_requests:
            logger.info("Received request %s (%s): %s", self.id, client_id or "-", str(sampling)[: state.max_log_len])
        state.engine.submit(requests, self._generation)

    async def updates(self) -> AsyncIterator[list[tuple[int, RequestUpdate]]]:
        """News until all sequences ended. Raises ApiError when the engine refuses or fails one."""
        seen = False
        while self._generation.unfinished or not seen:
            try:
                news = await self._generation.next()
            except RejectedError as error:
                self.close()
                raise (queue_full() if error.param is None else ApiError(400, str(error), param=error.param)) from None
            for _, update in news:
                if update.finish_reason is FinishReason.ERROR:
                    self.close()
                    raise self._failure(update)
            seen = True
            yield news

    def _failure(self, update: RequestUpdate) -> ApiError:
        """What the client is told; the engine's own words (classes, devices, paths) are for the log."""
        logger.error("request %s failed: %s", self.id, update.error)
        if self._state.draining:
            return draining()
        if not self._state.engine.is_alive:
            return engine_dead()
        return ApiError(500, f"internal error: the engine failed on this request; the server's log tells of {self.id}")

    def end_choice(self, index: int) -> None:
        """The front end found the end itself (a stop string): free what the sequence holds."""
        request_id = self._ids[index]
        self._generation.forget(request_id)
        self._state.engine.abort([request_id])
        self._state.metrics.on_end(self._times[request_id], "stop")

    def close(self) -> None:
        """Abort what still runs; nothing happens when all is done."""
        unfinished = sorted(self._generation.unfinished)
        self._generation.unfinished.clear()
        if unfinished:
            self._state.engine.abort(unfinished)
            for request_id in unfinished:
                self._state.metrics.on_end(self._times[request_id], "abort")
            if self._state.log_requests:
                logger.info("Request %s aborted", self.id)

    def _on_update(self, update: RequestUpdate) -> None:
        self._state.metrics.on_update(self._times[update.request_id], update)


async def encode(work: Callable[[], list[int]], size: int, param: str) -> list[int]:
    """Run an encoding of ``size`` characters, in a thread when it is long. Text that is no text is a 400."""
    try:
        return await asyncio.to_thread(work) if size > LONG_TEXT else work()
    except UnicodeEncodeError as error:
        bad = shown(error.object[error.start : error.end])
        raise ParameterError(param, f"{param} holds {bad}, which is half of a surrogate pair and no text") from None


def truncate(ids: list[int], limit: int | None) -> list[int]:
    """``truncate_prompt_tokens`` keeps the end of a prompt."""
    return ids if limit is None else ids[-limit:]
