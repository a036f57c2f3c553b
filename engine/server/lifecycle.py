"""Start, drain and stop of the HTTP server, and the line of numbers while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator

import uvicorn

from engine.server.state import ServerState
from engine.types import EngineStats

logger = logging.getLogger(__name__)

DRAIN_S = 45.0  # running requests may finish for this long; then they are ended with an error event and [DONE]
GRACE_S = 8  # for what is still being sent after that; together below the promised 60 s


class Server(uvicorn.Server):
    """uvicorn with our signals: the first SIGTERM or SIGINT drains, a second SIGINT ends the process at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        config.timeout_graceful_shutdown = int(DRAIN_S + GRACE_S)
        super().__init__(config)
        self._state = state
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own version raises the signal again at the end, which would make a clean stop look like a crash
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            scheme = "https" if self.config.is_ssl else "http"
            host, port = sockets[0].getsockname()[:2]
            logger.info("serving on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)

    def _on_signal(self, number: int) -> None:
        if self.should_exit:
            if number == signal.SIGINT:
                logger.warning("stopped at once")
                self._state.engine.kill()
                os._exit(130)
            return
        logger.info(
            "shutting down: %d running requests may finish within %.0f s", self._state.engine.num_unfinished, DRAIN_S
        )
        self._state.draining = True
        self.should_exit = True
        self._drain = asyncio.get_running_loop().create_task(self._end_late_requests())

    async def _end_late_requests(self) -> None:
        await asyncio.sleep(DRAIN_S)
        self._state.engine.abort_all("the server is shutting down")


async def log_stats(state: ServerState, interval: float) -> None:
    """A line of numbers every ``interval`` seconds while there is work; 0 turns it off."""
    before = EngineStats()
    while interval > 0:
        await asyncio.sleep(interval)
        now = state.engine.stats
        busy = now.num_steps > before.num_steps or now.num_running or now.num_waiting
        text = (
            f"Avg prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / interval:.1f} tokens/s, "
            f"Avg generation throughput: {(now.generation_tokens - before.generation_tokens) / interval:.1f} tokens/s, "
            f"Running: {now.num_running} reqs, Waiting: {now.num_waiting} reqs, "
            f"GPU KV cache usage: {100 * now.blocks_used / max(1, now.blocks_total):.1f}%, "
            f"State slots: {now.slots_used}/{now.slots_total}"
        )
        if now.num_preemptions > before.num_preemptions:
            text += f", Preemptions: {now.num_preemptions - before.num_preemptions}"
        logger.log(logging.INFO if busy else logging.DEBUG, text)
        before = now
