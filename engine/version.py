"""The version of the installed distribution, or of the source tree when nothing is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("kimi-kernels")
except PackageNotFoundError:
    VERSION = "0.0.0+source"
