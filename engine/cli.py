"""``kimi-engine``: one command a tool. Only the chosen command's module is imported."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from engine import env
from engine.types import ParameterError
from engine.version import VERSION

# command -> (module with add_arguments(parser) and run(args) -> exit status, one line of help)
COMMANDS = {
    "serve": ("engine.server.api", "serve a model over HTTP (OpenAI's API)"),
    "generate": ("engine.tools.generate", "generate from prompts in this process"),
    "logits": ("engine.tools.logits", "write the logits of every position of a prompt"),
    "plan": ("engine.tools.plan", "memory of a model on a GPU, and whether it fits"),
    "make-tiny": ("engine.tools.make_tiny", "write a small random checkpoint in the published format"),
    "doctor": ("engine.tools.doctor", "versions, device, kernels, and what is missing"),
}
SERVER_PACKAGES = {"fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic", "anyio"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 done, 1 it failed (said on stderr), 2 wrong options, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    try:
        env.check()
        level = env.get("KIMI_ENGINE_LOGGING_LEVEL")
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)  # type: ignore[arg-type]
        args = _parser(command).parse_args(arguments)
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except ModuleNotFoundError as error:
        if command == "serve" and (error.name or "").partition(".")[0] in SERVER_PACKAGES:
            return _fail(f"serve needs the package {error.name}: pip install 'kimi-kernels[server]'")
        raise
    except ParameterError as error:
        return _fail(str(error), 2)
    except Exception as error:
        # Our own errors and the system's are for the user; anything else is a bug and keeps its traceback.
        own = type(error).__module__.partition(".")[0] in ("engine", "kimi_kernels")
        if not (own or isinstance(error, OSError)) or logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        return _fail(str(error))


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kimi-engine", description="Run Kimi K3.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kimi-engine {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module_name, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == command:
            module = importlib.import_module(module_name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def _fail(message: str, status: int = 1) -> int:
    print(f"kimi-engine: error: {message}", file=sys.stderr)
    return status
