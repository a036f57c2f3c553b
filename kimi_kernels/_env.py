"""The package's environment switches: name, type, meaning; a bad value is an error.

Standard library only and importable by file path, because setup.py reads switches too. ``engine/env.py`` adds the
engine's own, so that one table lists and checks them all. Values are read on each call, none is frozen at import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

if __package__:
    from kimi_kernels._sources import ALL_ARCHS
else:  # setup.py loads this file by path, with _sources.py put into sys.modules before
    from _sources import ALL_ARCHS  # type: ignore[no-redef]

Value = bool | int | float | str


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

    def read(self, environ: Mapping[str, str] | None = None) -> Value | None:
        """The typed value in ``environ`` (default: the process's), the default when unset or empty."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        return self.parse(text) if text else self.default


_NOUN = {int: "an integer", float: "a number"}

SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch("KIMI_KERNELS_NO_CUDA", bool, False, "1 skips the CUDA build on installation"),
        Switch(
            "KIMI_KERNELS_ARCHS",
            str,
            None,
            "architectures to build, a comma list; default: all on installation, the device's at first use",
            members=ALL_ARCHS,
        ),
        Switch("KIMI_KERNELS_CACHE", str, None, "folder for kernels built at first use"),
        Switch("KIMI_KERNELS_NVCC_FLAGS", str, "", "flags added to every CUDA compilation; skips a prebuilt module"),
        Switch("KIMI_KERNELS_PDL", bool, True, "0 turns programmatic dependent launch off"),
        Switch(
            "KIMI_KERNELS_REFERENCE", str, "", "1, or a comma list of operations that run the plain-torch reference"
        ),
    )
}


def get(name: str) -> Value | None:
    """The typed value of a declared switch, its default when unset or empty. KeyError for an undeclared name."""
    return SWITCHES[name].read()
