"""The version users see."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Of the installed distribution; running from a source tree that is not installed is named so."""
    try:
        return metadata.version("kimi-kernels")
    except metadata.PackageNotFoundError:
        return "source"
