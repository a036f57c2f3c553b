"""Log lines of the server and its engine process."""

from __future__ import annotations

import logging
import os
import sys

COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}


class _Formatter(logging.Formatter):
    def __init__(self, worker: str | None, colour: bool) -> None:
        process = f" [{worker} rank 0 pid {os.getpid()}]" if worker else ""
        super().__init__(
            f"%(levelname)s %(asctime)s %(filename)s:%(lineno)d{process} %(message)s", datefmt="%m-%d %H:%M:%S"
        )
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        start = COLOURS.get(record.levelno) if self._colour else None
        return f"{start}{text}\033[0m" if start else text


def setup_logging(level: str, *, worker: str | None = None) -> None:
    """Send our log lines and uvicorn's to standard error, coloured only on a terminal without NO_COLOR."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(worker, sys.stderr.isatty() and "NO_COLOR" not in os.environ))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("engine", "kimi_kernels"):
        logging.getLogger(name).setLevel(level)


def bytes_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"
