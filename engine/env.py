"""Every environment switch of the project, with its type and meaning. A bad value is an error.

``kimi_kernels`` stands alone and reads its ``KIMI_KERNELS_*`` switches itself (``kimi_kernels/_env.py``); they are
declared here too, so that one place documents and checks them all. Reading is done on each call: no value is frozen at
import.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PREFIXES = ("KIMI_ENGINE_", "KIMI_KERNELS_")

Value = bool | int | float | str

_NOUN = {int: "an integer", float: "a number"}
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ARCHS = ("sm_90a", "sm_100f", "sm_103f")


class EnvError(ValueError):
    """An environment switch with a value that its type does not allow."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One environment variable. ``minimum`` bounds numbers; ``choices`` bounds strings (compared in upper case);
    ``members`` bounds the items of a comma list."""

    name: str
    type: type
    default: Value | None
    help: str
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    def parse(self, text: str) -> Value:
        """The typed value of ``text``; EnvError names variable, expected and got."""
        if self.type is bool:
            if text.strip() in ("1", "0"):
                return text.strip() == "1"
            raise EnvError(f"{self.name} must be 0 or 1, got {text!r}")
        if self.type in (int, float):
            try:
                number: int | float = self.type(text)
            except ValueError:
                raise EnvError(f"{self.name} must be {_NOUN[self.type]}, got {text!r}") from None
            if number != number or (self.minimum is not None and number < self.minimum):
                raise EnvError(f"{self.name} must be at least {self.minimum:g}, got {text!r}")
            return number
        if self.choices:
            if text.upper() not in self.choices:
                raise EnvError(f"{self.name} must be one of {', '.join(self.choices)}, got {text!r}")
            return text.upper()
        if self.members:
            items = [item.strip() for item in text.split(",")]
            if not set(items) <= set(self.members):
                raise EnvError(f"{self.name} must be a comma list of {', '.join(self.members)}, got {text!r}")
            return ",".join(items)
        return text


SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch("KIMI_ENGINE_LOGGING_LEVEL", str, "INFO", "least severe log level that is printed", choices=_LEVELS),
        Switch("KIMI_ENGINE_LOG_STATS_INTERVAL", float, 10.0, "seconds between log lines with statistics", minimum=0),
        Switch("KIMI_ENGINE_API_KEY", str, None, "key that HTTP clients must send, as --api-key"),
        Switch("KIMI_ENGINE_READY_TIMEOUT_S", float, 600.0, "seconds the server waits for its engine", minimum=1),
        Switch("KIMI_ENGINE_HTTP_TIMEOUT_KEEP_ALIVE", float, 5.0, "seconds an idle connection is kept", minimum=0),
        Switch("KIMI_KERNELS_NO_CUDA", bool, False, "1 skips the CUDA build on installation"),
        Switch(
            "KIMI_KERNELS_ARCHS",
            str,
            "",
            "architectures to build, a comma list; default: all on installation, the device's at first use",
            members=_ARCHS,
        ),
        Switch("KIMI_KERNELS_CACHE", str, "", "folder for kernels built at first use"),
        Switch("KIMI_KERNELS_NVCC_FLAGS", str, "", "flags added to every CUDA compilation; skips a prebuilt module"),
        Switch("KIMI_KERNELS_PDL", bool, True, "0 turns programmatic dependent launch off"),
        Switch(
            "KIMI_KERNELS_REFERENCE", str, "", "1, or a comma list of operations that run the plain-torch reference"
        ),
    )
}


def get(name: str, environ: Mapping[str, str] | None = None) -> Value | None:
    """The typed value of a declared switch, its default when unset or empty. KeyError for an undeclared name."""
    text = (os.environ if environ is None else environ).get(name, "")
    switch = SWITCHES[name]
    return switch.parse(text) if text else switch.default


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
