"""The HTTP process's side of the engine: starts its process, hands requests over, spreads its news.

Nothing here waits for the engine on the event loop: a thread reads the pipe, a thread writes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.engine_config import EngineConfig
from engine.server.generation import Generation
from engine.server.worker import CORE_FACTORY, EngineInfo, StepNews, worker_main
from engine.types import EngineStats, FinishReason, Request, RequestUpdate

logger = logging.getLogger(__name__)


class EngineStartError(RuntimeError):
    """The engine did not come up; the message says why."""


class EngineClient:
    """One engine process. All methods but ``start`` belong to the event loop's thread."""

    def __init__(self, *, max_queued: int | None = None) -> None:
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.dead: str | None = None
        self._max_queued = max_queued
        self.on_news: Callable[[StepNews], None] | None = None
        self._generations: dict[str, Generation] = {}  # by request id
        self._outbox: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def start(
        self, model_dir: Path, config: EngineConfig, *, timeout: float, level: str, factory: str = CORE_FACTORY
    ) -> EngineInfo:
        """Start the process and wait until the model is loaded. Raises EngineStartError."""
        # Threads of the reference operations spin while they wait; on every core they would starve this process.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=worker_main, args=(theirs, model_dir, config, factory, level), name="kimi-engine-core", daemon=True
        )
        self._process.start()
        theirs.close()
        deadline = time.monotonic() + timeout
        try:
            while not self._connection.poll(0.2):
                if time.monotonic() > deadline:
                    raise EngineStartError(f"the engine was not ready within {timeout:g} s")
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise EngineStartError(f"the engine process died (exit code {self._process.exitcode})") from None
        except BaseException:
            self.kill()
            raise
        if kind != "ready":
            self._process.join(5)
            raise EngineStartError(str(value))
        self.info = value
        self.stats = EngineStats(blocks_total=value.num_blocks, slots_total=value.num_slots)
        return self.info

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to exchange messages; news is delivered on ``loop``."""
        assert self._connection is not None
        threading.Thread(target=self._read, args=(self._connection, loop), daemon=True).start()
        threading.Thread(target=self._write, args=(self._connection,), daemon=True).start()

    @property
    def num_unfinished(self) -> int:
        return len(self._generations)

    @property
    def is_alive(self) -> bool:
        return self.dead is None and self._process is not None and self._process.is_alive()

    @property
    def capacity(self) -> int | None:
        """Most requests that can be unfinished at once; None: no limit."""
        if self._max_queued is None or self.info is None:
            return None
        return self.info.max_num_seqs + self._max_queued

    def has_room(self, num_requests: int) -> bool:
        """Whether the waiting queue takes this many more. Counted here, so that a refusal can still be a status."""
        if self.capacity is None or self._max_queued is None:
            return True
        free = self.capacity - len(self._generations)
        return num_requests <= free and self.stats.num_waiting < max(1, self._max_queued)

    def submit(self, requests: list[Request], generation: Generation) -> None:
        for request in requests:
            self._generations[request.request_id] = generation
        self._outbox.put(("add", requests))

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; they get no further update."""
        known = [request_id for request_id in request_ids if self._generations.pop(request_id, None) is not None]
        if known:
            self._outbox.put(("abort", known))

    def abort_all(self, reason: str) -> None:
        """End every request with an error that its client sees."""
        ids = list(self._generations)
        for request_id in ids:
            self._generations[request_id].deliver(_error(request_id, reason))
        self.abort(ids)

    def stop(self) -> None:
        """Ask the process to end; kill it if it does not."""
        self._outbox.put(("stop", None))
        if self._process is not None:
            self._process.join(5)
        self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    # ---- threads

    def _read(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                kind, value = connection.recv()
            except (EOFError, OSError):
                kind, value = "dead", "its process ended"
            try:
                if kind == "dead":
                    loop.call_soon_threadsafe(self._on_death, value)
                    return
                loop.call_soon_threadsafe(self._on_step, value)
            except RuntimeError:
                return  # the loop is closed: the server is gone

    def _write(self, connection: Connection) -> None:
        while True:
            try:
                connection.send(self._outbox.get())
            except (BrokenPipeError, OSError):
                return  # the reader sees the end too and tells

    # ---- on the event loop

    def _on_step(self, news: StepNews) -> None:
        self.stats = news.stats
        for update in news.updates:
            generation = self._generations.get(update.request_id)
            if generation is None:
                continue  # aborted meanwhile
            if update.finish_reason is not None:
                del self._generations[update.request_id]
            generation.deliver(update)
        for request_id, param, message in news.rejected:
            generation = self._generations.pop(request_id, None)
            if generation is not None:
                generation.reject(request_id, param, message)
        if self.on_news is not None:
            self.on_news(news)

    def _on_death(self, reason: str) -> None:
        if self.dead is None:
            self.dead = reason
            logger.critical("the engine died: %s", reason)
        # what it held is gone with it: the gauges must not stay at their last values
        self.stats = dataclasses.replace(self.stats, num_running=0, num_waiting=0, blocks_used=0, slots_used=0)
        generations, self._generations = self._generations, {}
        for request_id, generation in generations.items():
            generation.deliver(_error(request_id, f"the engine died: {reason}"))


def _error(request_id: str, message: str) -> RequestUpdate:
    return RequestUpdate(request_id, finish_reason=FinishReason.ERROR, error=message)
