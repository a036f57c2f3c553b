"""Argument checks of the reference path: every message names the argument, what was expected and what came.

The compiled kernels check the same in C++; of these the CUDA path only uses what it needs to size its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ACTIVATION = (torch.float32, torch.bfloat16)
BF16 = (torch.bfloat16,)
F32 = (torch.float32,)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
BOOL = (torch.bool,)
UINT8 = (torch.uint8,)


def tensor(
    name: str,
    x: Any,
    shape: Sequence[int | None] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    like: torch.Tensor | None = None,
    row: bool = False,
) -> None:
    """Check type, number of dims, sizes (None: any), dtype, device (that of ``like``), contiguous rows (``row``)."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    # Tuples compare in C; the loop runs only where a size is free.
    if shape is not None and x.shape != shape and not _fits(x.shape, shape):
        raise ValueError(f"{name}: expected shape {_show(shape)}, got {_show(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: expected dtype {names}, got {str(x.dtype).removeprefix('torch.')}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {x.device}")
    if row and x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")


def require(ok: bool, name: str, expected: str, got: object) -> None:
    """ValueError "name: expected ..., got ..." unless ``ok``."""
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def rank(name: str, x: Any, dims: int) -> None:
    """That ``x`` has ``dims`` dims: what the CUDA path needs before it can size its outputs (cupy arrays too)."""
    if len(x.shape) != dims:
        raise ValueError(f"{name}: expected {dims} dims, got shape {_show(x.shape)}")


def num_tokens(x: Any, like: torch.Tensor) -> None:
    """``num_tokens`` is a device scalar: int32 [1]."""
    if x is not None:
        tensor("num_tokens", x, (1,), INT32, like=like)


def _fits(got: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(got) != len(shape):
        return False
    return list(got) == [have if want is None else want for have, want in zip(got, shape, strict=True)]


def _show(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
