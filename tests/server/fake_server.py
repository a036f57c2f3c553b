"""``serve`` over the fake engine: ``python -m tests.server.fake_server DIR [options]``; a directory with a file named
``tokenizer`` gets the byte tokenizer, any other has none."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from engine.server import lifecycle, options, serve
from tests.server.byte_tokenizer import ByteTokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    args = parser.parse_args()
    options.check(args)
    lifecycle.DRAIN_S = float(os.environ.get("FAKE_DRAIN_S", lifecycle.DRAIN_S))
    serve.load_tokenizer = lambda path: ByteTokenizer() if (Path(path) / "tokenizer").exists() else None
    sys.exit(serve.serve(args, factory="tests.server.fake_engine:build"))
