"""``kimi-engine serve``: options in, exit code out. Needs no web framework until it runs."""

from __future__ import annotations

import argparse
import sys

from engine.server import options
from engine.server.options import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it. 0 after a clean stop, 1 when the engine failed, 2 for bad options."""
    try:
        options.check(args)
    except options.OptionError as error:
        print(f"kimi-engine serve: error: {error}", file=sys.stderr)
        return 2
    try:
        from engine.server.serve import serve
    except ModuleNotFoundError as error:
        print(f"kimi-engine serve: {error.name} is missing: pip install 'kimi-kernels[server]'", file=sys.stderr)
        return 1
    return serve(args)
