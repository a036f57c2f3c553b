"""The engine process: owns the core, takes requests from a pipe, sends news of each step back.

A thread reads the pipe and a thread writes it, so a step never waits for the HTTP process. The process ends when it is
told to, when the pipe closes (the parent is gone), or when the engine itself breaks.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.server.logs import setup_logging
from engine.types import EngineStats, ParameterError, QueueFullError, Request, RequestUpdate

logger = logging.getLogger(__name__)

CORE_FACTORY = "engine.core:EngineCore.from_dir"


@dataclass(slots=True)
class EngineInfo:
    """What the HTTP process must know of a loaded engine."""

    max_model_len: int
    max_num_tokens: int
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_size: int
    num_blocks: int
    num_slots: int
    device: str
    memory: list[tuple[str, int]] = field(default_factory=list)  # (what, bytes)


@dataclass(slots=True)
class StepNews:
    """One message to the HTTP process: what a step, or a batch of commands, changed."""

    updates: list[RequestUpdate]
    rejected: list[tuple[str, str | None, str]]  # request id, member at fault (None: queue full), message
    stats: EngineStats


def worker_main(connection: Connection, model_dir: Path, config: EngineConfig, factory: str, level: str) -> None:
    """Entry of the process. Sends ("ready", EngineInfo) or ("failed", message), then ("step", StepNews) for ever."""
    # Signals of the terminal reach the whole group; only the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(level, worker="engine")
    commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    # before the model is loaded: a parent that goes away meanwhile must not leave a loading process behind
    threading.Thread(target=_read, args=(connection, commands), daemon=True).start()
    try:
        core = resolve(factory)(model_dir, config)
        # What is there now stays: left in the collector's sight, torch's objects make a full collection take 0.1 s,
        # and one comes every few hundred steps when the number of requests goes up and down.
        gc.collect()
        gc.freeze()
        connection.send(("ready", describe(core)))
    except Exception as error:
        logger.debug("loading failed", exc_info=True)
        kind = "" if isinstance(error, (ParameterError, ValueError, OSError)) else f"{type(error).__name__}: "
        connection.send(("failed", f"{kind}{error}"))
        return
    writer = threading.Thread(target=_write, args=(connection, news), daemon=True)
    writer.start()
    try:
        serve_commands(core, commands, lambda step: news.put(("step", step)))
    except Exception:
        logger.exception("the engine stopped")
        news.put(("dead", traceback.format_exc(limit=-1).strip().splitlines()[-1]))
        writer.join(5)
        os._exit(1)


def resolve(path: str) -> Callable[..., EngineCore]:
    """``package.module:name.name`` to the object."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def describe(core: EngineCore) -> EngineInfo:
    config = core.config
    assert config.max_model_len is not None
    assert config.num_blocks is not None
    assert config.num_slots is not None
    memory_table = getattr(core.runner, "memory_table", None)
    return EngineInfo(
        max_model_len=config.max_model_len,
        max_num_tokens=core.max_num_tokens,
        max_num_seqs=config.max_num_seqs,
        vocab_size=core.vocab_size,
        eos_token_ids=core.eos_token_ids,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        num_slots=config.num_slots,
        device=str(getattr(core.runner, "device", config.device)),
        memory=memory_table() if memory_table else [],
    )


def serve_commands(
    core: EngineCore, commands: queue.SimpleQueue[tuple[str, Any]], send: Callable[[StepNews], None]
) -> None:
    """Run until a ("stop", None) command: apply what has come, then one step, then tell."""
    while True:
        rejected: list[tuple[str, str | None, str]] = []
        wait = not core.has_work
        while True:
            try:
                name, value = commands.get(block=wait)
            except queue.Empty:
                break
            wait = False
            if name == "stop":
                return
            if name == "abort":
                for request_id in value:
                    core.abort(request_id)
            else:
                for request in value:
                    _add(core, request, rejected)
        updates = core.step() if core.has_work else []
        send(StepNews(updates, rejected, core.stats()))


def _add(core: EngineCore, request: Request, rejected: list[tuple[str, str | None, str]]) -> None:
    try:
        core.add(request)
    except ParameterError as error:
        rejected.append((request.request_id, error.param, str(error)))
    except QueueFullError as error:
        rejected.append((request.request_id, None, str(error)))


def _read(connection: Connection, commands: queue.SimpleQueue[tuple[str, Any]]) -> None:
    while True:
        try:
            commands.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone; nobody waits for this process


def _write(connection: Connection, news: queue.SimpleQueue[tuple[str, Any]]) -> None:
    while True:
        message = news.get()
        try:
            connection.send(message)
        except OSError:
            os._exit(0)
        if message[0] == "dead":
            return
