"""The package's environment switches and how they are read; a bad value is an error.

Standard library only and importable by file path, because setup.py reads switches too. ``engine/env.py`` describes
and checks them all for users and may not be imported here, so each name and default stands in both (a test compares).
Values are read on each call, none is frozen at import.
"""

from __future__ import annotations

import os

DEFAULTS: dict[str, bool | str] = {
    "KIMI_KERNELS_NO_CUDA": False,
    "KIMI_KERNELS_ARCHS": "",
    "KIMI_KERNELS_CACHE": "",
    "KIMI_KERNELS_NVCC_FLAGS": "",
    "KIMI_KERNELS_PDL": True,  # read by csrc/common/launch.h
    "KIMI_KERNELS_REFERENCE": "",
}


class EnvError(ValueError):
    """An environment switch with a value that its type does not allow."""


def flag(name: str) -> bool:
    """A switch of 0 or 1, its default when unset or empty. EnvError for anything else."""
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise EnvError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1" if value else bool(DEFAULTS[name])


def text(name: str) -> str:
    """A switch of free text, its default when unset."""
    return os.environ.get(name) or str(DEFAULTS[name])


def max_jobs() -> int | None:
    """MAX_JOBS, as torch's extension builds know it: how many sources are compiled at once, at install and at first
    use; None (ninja decides from the cores) when unset or empty. EnvError unless a positive whole number."""
    value = os.environ.get("MAX_JOBS", "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise EnvError(f"MAX_JOBS must be a positive whole number, got {value!r}")
    return int(value)


def items(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """A comma list of members of ``known``, in the order of ``known``; empty when unset. EnvError for any other."""
    given = [item.strip() for item in text(name).split(",")] if text(name) else []
    if not set(given) <= set(known):
        raise EnvError(f"{name} must be a comma list of {', '.join(known)}, got {text(name)!r}")
    return tuple(item for item in known if item in given)
