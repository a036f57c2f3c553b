"""From options to a serving process, and down again."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

from engine import env
from engine.engine_config import EngineConfig
from engine.server import options
from engine.server.app import build_app
from engine.server.engine_client import EngineClient, EngineStartError
from engine.server.lifecycle import Server, log_stats
from engine.server.logs import bytes_text, setup_logging
from engine.server.metrics import Metrics
from engine.server.protocol import ServingLimits
from engine.server.state import ServerState
from engine.server.worker import CORE_FACTORY, EngineInfo
from engine.text.tokenizer import TokenizerError, load_tokenizer
from engine.text.wide_tokenizer import WideTokenizer
from engine.types import ParameterError
from engine.version import VERSION

logger = logging.getLogger(__name__)


def serve(args: argparse.Namespace, *, factory: str = CORE_FACTORY) -> int:
    """Load, listen, serve until a signal. Returns the exit code. ``factory`` builds the core in the engine process."""
    level = str(env.get("KIMI_ENGINE_LOGGING_LEVEL"))
    setup_logging(level)
    logging.getLogger("uvicorn").setLevel(args.uvicorn_log_level.upper())
    logging.getLogger("uvicorn.access").setLevel("WARNING" if args.disable_uvicorn_access_log else "INFO")
    try:
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        logger.info("kimi-engine %s, options: %s", VERSION, options.non_default(parser, args) or "defaults")
        config = EngineConfig.from_args(args)
        listener = _bind(args.host, args.port)
    except (ParameterError, env.EnvError, OSError) as error:
        print(f"kimi-engine serve: error: {error}", file=sys.stderr)
        return 2
    engine = EngineClient(max_queued=config.max_num_queued_reqs)
    try:
        state = _start(args, config, engine, level, factory)
    except (EngineStartError, TokenizerError, ParameterError, ValueError, OSError) as error:
        logger.error("cannot serve %s: %s", args.model, error)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if engine.info is None:
            engine.kill()
    try:
        return asyncio.run(_serve(args, state, listener))
    finally:
        engine.stop()


async def _serve(args: argparse.Namespace, state: ServerState, listener: socket.socket) -> int:
    state.engine.attach(asyncio.get_running_loop())
    app = build_app(state, root_path=args.root_path, allowed_origins=args.allowed_origins)
    routes = sorted({f"{'/'.join(sorted(r.methods))} {r.path}" for r in app.routes if getattr(r, "methods", None)})  # type: ignore[attr-defined]
    logger.info("routes: %s", ", ".join(routes))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=int(env.get("KIMI_ENGINE_HTTP_TIMEOUT_KEEP_ALIVE") or 0),
        lifespan="off",
        ws="none",
        server_header=False,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
    )
    stats = asyncio.create_task(log_stats(state, float(env.get("KIMI_ENGINE_LOG_STATS_INTERVAL") or 0)))
    server = Server(config, state)
    await server.serve(sockets=[listener])
    stats.cancel()
    return 0 if state.engine.dead is None else 1


def _start(
    args: argparse.Namespace, config: EngineConfig, engine: EngineClient, level: str, factory: str
) -> ServerState:
    model = Path(args.model)
    if args.load_format == "fastsafetensors":
        logger.warning("fastsafetensors is not used: shards are read by safetensors")
    tokenizer: Any = load_tokenizer(Path(args.tokenizer) if args.tokenizer else model)
    defaults = _sampling_defaults(args, model)
    start = time.monotonic()
    # The queue limit is kept on this side of the pipe, where a refusal can still become a status code.
    worker_config = dataclasses.replace(config, max_num_queued_reqs=None)
    timeout = float(env.get("KIMI_ENGINE_READY_TIMEOUT_S") or 600)
    info = engine.start(model, worker_config, timeout=timeout, level=level, factory=factory)
    logger.info("engine ready after %.1f s", time.monotonic() - start)
    _log_memory(info)
    if tokenizer is not None and tokenizer.vocab_size < info.vocab_size:
        tokenizer = WideTokenizer(tokenizer, info.vocab_size)
    names = args.served_model_name or [args.model]
    metrics = Metrics(names[0], lambda: engine.stats)
    metrics.set_cache_config(
        {"block_size": info.block_size, "num_gpu_blocks": info.num_blocks, "num_state_slots": info.num_slots}
    )
    engine.on_news = metrics.on_news
    keys = args.api_key or ([key] if (key := env.get("KIMI_ENGINE_API_KEY")) else [])
    return ServerState(
        engine=engine,
        tokenizer=tokenizer,
        limits=ServingLimits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_num_tokens=info.max_num_tokens,
            max_logprobs=args.max_logprobs,
            allow_priority=config.scheduling_policy == "priority",
            sampling_defaults=defaults,
        ),
        metrics=metrics,
        model_names=names,
        model_root=args.model,
        chat_defaults=args.default_chat_template_kwargs,
        api_keys=tuple(str(key) for key in keys),
        reasoning_field=args.reasoning_field,
        stream_interval=args.stream_interval,
        log_requests=args.enable_log_requests,
        max_log_len=args.max_log_len,
    )


def _sampling_defaults(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Defaults of the model's generation_config.json, then the operator's."""
    found: dict[str, Any] = {}
    if args.generation_config != "none":
        path = (model if args.generation_config == "auto" else Path(args.generation_config)) / "generation_config.json"
        if path.is_file():
            found = json.loads(path.read_text())
        elif args.generation_config != "auto":
            raise OSError(f"--generation-config: {path} does not exist")
    found.update(args.override_generation_config)
    return {name: found[name] for name in options.SAMPLING_DEFAULTS if found.get(name) is not None}


def _log_memory(info: EngineInfo) -> None:
    if info.memory:
        total = sum(size for _, size in info.memory)
        rows = [*info.memory, ("total", total)]
        logger.info("memory on %s:\n%s", info.device, "\n".join(f"  {what:<16}{bytes_text(n):>12}" for what, n in rows))
    tokens = info.num_blocks * info.block_size
    logger.info(
        "MLA cache: %d tokens in %d blocks of %d; %d state slots; %.1f requests of the full %d tokens fit",
        tokens, info.num_blocks, info.block_size, info.num_slots, min(tokens / info.max_model_len, info.num_slots),
        info.max_model_len,
    )  # fmt: skip


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is known before a long load; it listens only once requests are served."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
