"""Dense projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from kimi_kernels import _check as check
from kimi_kernels._dispatch import use_reference
from kimi_kernels.reference import dense as reference


@overload
def linear(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor: ...


@overload
def linear(
    x: torch.Tensor, weight: torch.Tensor, *, out_dtype: Sequence[tuple[int, torch.dtype]]
) -> tuple[torch.Tensor, ...]: ...


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out_dtype: torch.dtype | Sequence[tuple[int, torch.dtype]] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``x weight^T``, accumulated in fp32 and rounded once to the output dtype.

    x [T, K] row-strided, bf16 (CPU: also float32); weight [N, K] row-strided, bf16 or f32. bf16 values enter the
    products as they are, so bf16 x and weight with a float32 output are a router's fp32 product.
    ``out_dtype`` None: x's dtype; a dtype: float32 or bfloat16; a sequence of (columns, dtype) whose columns add up to
    N: a tuple with a tensor [T, columns] for each range. T = 0 is allowed.

    On CUDA this is cuBLAS, called through torch: x and weight are bf16 torch tensors, and each range is a launch of its
    own. Whether cuBLAS may add partial sums in bf16 is torch's switch
    ``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``; the engine turns it off.

    Returns [T, N], or the tuple. Raises ValueError naming the argument at fault.
    """
    on_reference = use_reference("dense.linear", x)
    dtypes = check.ACTIVATION if on_reference else check.BF16
    check.tensor("x", x, (None, None), dtypes, row=True)
    check.tensor("weight", weight, (None, x.shape[1]), dtypes, like=x, row=True)
    if out_dtype is None or isinstance(out_dtype, torch.dtype):
        dtype = out_dtype or x.dtype
        check.require(dtype in check.ACTIVATION, "out_dtype", "float32 or bfloat16", dtype)
        return reference.linear(x, weight).to(dtype) if on_reference else _cublas(x, weight, dtype)
    widths = [columns for columns, _ in out_dtype]
    for _, dtype in out_dtype:
        check.require(dtype in check.ACTIVATION, "out_dtype", "float32 or bfloat16", dtype)
    check.require(
        sum(widths) == weight.shape[0] and min(widths, default=0) >= 0,
        "out_dtype",
        f"ranges that add up to {weight.shape[0]} columns",
        widths,
    )
    if on_reference:
        parts = reference.linear(x, weight).split(widths, dim=1)
        return tuple(part.to(dtype) for part, (_, dtype) in zip(parts, out_dtype, strict=True))
    rows = weight.split(widths)
    return tuple(_cublas(x, part, dtype) for part, (_, dtype) in zip(rows, out_dtype, strict=True))


def _cublas(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float32:  # bf16 products, fp32 sums, no rounding: what a router needs
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x, weight.t())
