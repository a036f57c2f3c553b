"""One call of an operation with the arrays of any library that the kernels take; torch tensors in the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

FEW = (0, 1, 257)  # token counts that are enough for a second library: the kernel behind it is the same


def with_cupy(counts: Iterable[int], few: Iterable[int] = FEW) -> list[tuple[str, int]]:
    """Cases of ("library", "tokens"): every count as torch tensors, a few as cupy arrays."""
    return [("torch", n) for n in counts] + [("cupy", n) for n in few]


def call(library: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` with every tensor as an array of ``library``; its results come back as torch tensors.

    No copies either way, so an output that the caller gave is written. cupy has no bf16 and no FP8: the bits stand
    there as uint16 and uint8; uint16 comes back as bf16, uint8 as it is. Skips where cupy is not installed.
    """
    if library == "torch":
        return function(*args, **kwargs)
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    given = {name: _to_cupy(cupy, value) for name, value in kwargs.items()}
    return _to_torch(cupy, function(*(_to_cupy(cupy, value) for value in args), **given))


def _to_cupy(cupy: ModuleType, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        value = value.view(torch.int16)
    elif value.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        value = value.view(torch.uint8)
    name = str(value.dtype).removeprefix("torch.")
    # nothing to share in an empty tensor, whose data pointer is null
    array = cupy.from_dlpack(value) if value.numel() else cupy.empty(tuple(value.shape), dtype=name)
    return array.view(cupy.uint16) if value.dtype == torch.int16 else array


def _to_torch(cupy: ModuleType, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_to_torch(cupy, v) for v in value)
    if is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        arrays = {name: _to_torch(cupy, v) for name, v in parts.items() if isinstance(v, cupy.ndarray)}
        assert arrays, f"{type(value).__name__} holds no cupy array"
        return replace(value, **arrays)
    assert isinstance(value, cupy.ndarray), f"expected a cupy array for cupy arguments, got {type(value).__name__}"
    if value.dtype == cupy.uint16:
        return torch.from_dlpack(value.view(cupy.int16)).view(torch.bfloat16)
    return torch.from_dlpack(value)
