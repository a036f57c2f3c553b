"""The ``serve`` command alone: ``python -m tests.server.cli MODEL [options]``."""

from __future__ import annotations

import argparse
import sys

from engine.server.api import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="kimi-engine serve")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
