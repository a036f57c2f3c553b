"""Every environment switch of the project, with its type and meaning. A bad value is an error.

``kimi_kernels`` cannot import this package, so it declares its ``KIMI_KERNELS_*`` switches in ``kimi_kernels/_env.py``;
they join the table here, so that one place documents and checks them all. Reading is done on each call: no value is
frozen at import.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping

from kimi_kernels._env import SWITCHES as KERNEL_SWITCHES
from kimi_kernels._env import EnvError as EnvError
from kimi_kernels._env import Switch, Value

logger = logging.getLogger(__name__)

PREFIXES = ("KIMI_ENGINE_", "KIMI_KERNELS_")

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch("KIMI_ENGINE_LOGGING_LEVEL", str, "INFO", "least severe log level that is printed", choices=_LEVELS),
        Switch("KIMI_ENGINE_LOG_STATS_INTERVAL", float, 10.0, "seconds between log lines with statistics", minimum=0),
        Switch("KIMI_ENGINE_API_KEY", str, None, "key that HTTP clients must send, as --api-key"),
        Switch("KIMI_ENGINE_READY_TIMEOUT_S", float, 600.0, "seconds the server waits for its engine", minimum=1),
        Switch("KIMI_ENGINE_HTTP_TIMEOUT_KEEP_ALIVE", float, 5.0, "seconds an idle connection is kept", minimum=0),
    )
} | KERNEL_SWITCHES


def get(name: str, environ: Mapping[str, str] | None = None) -> Value | None:
    """The typed value of a declared switch, its default when unset or empty. KeyError for an undeclared name."""
    return SWITCHES[name].read(environ)


def check(environ: Mapping[str, str] | None = None) -> list[str]:
    """Parse every declared switch and warn about variables with our prefixes that are not declared.

    Returns the warnings (also logged). Raises EnvError for the first bad value.
    """
    environ = os.environ if environ is None else environ
    warnings = []
    for name in sorted(environ):
        if name in SWITCHES:
            get(name, environ)
        elif name.startswith(PREFIXES):
            near = difflib.get_close_matches(name, SWITCHES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"unknown environment variable {name} has no effect{hint}")
    for text in warnings:
        logger.warning(text)
    return warnings


def describe() -> str:
    """One line a switch: name, type, default, meaning."""
    return "\n".join(f"{s.name:38} {s.type.__name__:6} {s.default!s:8} {s.help}" for s in SWITCHES.values())
