"""Number formats: FP8 and MXFP8 activations, MXFP4 weights back to numbers."""

from __future__ import annotations

import torch

from kimi_kernels import _check as check
from kimi_kernels import _ops
from kimi_kernels._dispatch import no_kernel, use_reference
from kimi_kernels.reference import quant as reference

_ops.define("quant_fp8_per_token_group(Tensor x, Tensor(a!) values, Tensor(b!) scale, int group) -> ()")
_ops.define("quant_mxfp8(Tensor x, Tensor(a!) values, Tensor(b!) scale) -> ()")


def fp8_per_token_group(x: torch.Tensor, *, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to E4M3 with one f32 scale per token and ``group`` columns.

    ``scale = max(amax, 1e-10) / 448``, value = E4M3(x * (1 / scale)) to nearest even, saturating; a group of zeros
    gives zeros, NaN stays NaN. x [T, K] row-strided, bf16 or f32; the last group may be partial; ``group`` is a
    multiple of 32. Inputs are not changed.
    Returns (values float8_e4m3fn [T, K], scales f32 [T, ceil(K/group)]): x ~ value * scale.
    Raises ValueError naming the argument at fault.
    """
    check.require(group > 0 and group % 32 == 0, "group", "a multiple of 32", group)
    if not use_reference("quant.fp8_per_token_group", x):
        check.rank("x", x, 2)
        values = _ops.empty(tuple(x.shape), torch.float8_e4m3fn, x)
        scale = _ops.empty((x.shape[0], -(-x.shape[1] // group)), torch.float32, x)
        _ops.call("quant_fp8_per_token_group", x, values, scale, group)
        return values, scale
    check.tensor("x", x, (None, None), check.ACTIVATION, row=True)
    return reference.fp8_per_token_group(x, group)


def mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP8: E4M3 with one E8M0 scale per token and 32 columns (OCP microscaling formats 1.0).

    The scale is the smallest power of two (2^-127 at least) with amax / scale <= 448, so nothing saturates; a group of
    zeros gives zeros; a group with a NaN or an infinity has scale byte 255 (not a number). x [T, K] row-strided, bf16
    or f32, K a multiple of 32. Inputs are not changed.
    Returns (values float8_e4m3fn [T, K], scales uint8 [T, K/32]): x ~ value * 2^(byte - 127).
    Raises ValueError naming the argument at fault.
    """
    if not use_reference("quant.mxfp8", x):
        check.rank("x", x, 2)
        values = _ops.empty(tuple(x.shape), torch.float8_e4m3fn, x)
        scale = _ops.empty((x.shape[0], x.shape[1] // 32), torch.uint8, x)
        _ops.call("quant_mxfp8", x, values, scale)
        return values, scale
    check.tensor("x", x, (None, None), check.ACTIVATION, row=True)
    check.require(x.shape[1] % 32 == 0, "x", "a multiple of 32 columns", x.shape[1])
    return reference.mxfp8(x)


def mxfp4_dequant(
    packed: torch.Tensor, scale: torch.Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """MXFP4 to numbers, exact in bf16 and f32 (K3 spec section 9): low nibble first, ``E2M1 * 2^(byte - 127)``.

    packed uint8 [..., N, K/2], scale uint8 [..., N, K/32], K a multiple of 32; byte 255 of a scale gives NaN.
    Inputs are not changed. Returns [..., N, K] of ``out_dtype`` (bfloat16 or float32).
    Raises ValueError naming the argument at fault.
    """
    if not use_reference("quant.mxfp4_dequant", packed):
        raise no_kernel("quant.mxfp4_dequant", packed)
    check.tensor("packed", packed, None, check.UINT8)
    check.require(packed.ndim >= 2, "packed", "at least 2 dims", packed.ndim)
    half = packed.shape[-1]
    check.require(half % 16 == 0, "packed", "a multiple of 16 bytes a row", half)
    check.tensor("scale", scale, (*packed.shape[:-1], half // 16), check.UINT8, like=packed)
    check.require(out_dtype in check.ACTIVATION, "out_dtype", "bfloat16 or float32", out_dtype)
    flat = reference.mxfp4(packed.flatten(0, -2), scale.flatten(0, -2))
    return flat.view(*packed.shape[:-1], 2 * half).to(out_dtype)
