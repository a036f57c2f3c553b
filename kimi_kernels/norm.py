"""RMSNorm: plain, per group with a sigmoid gate, and fused with FP8 quantisation."""

from __future__ import annotations

import torch

from kimi_kernels import _check as check
from kimi_kernels import _ops
from kimi_kernels._dispatch import use_reference
from kimi_kernels.reference import norm as reference
from kimi_kernels.reference.quant import fp8_per_token_group

_ops.define("norm_rms(Tensor x, Tensor weight, Tensor(a!)? out, Tensor(b!)? q, Tensor(c!)? scale, float eps) -> ()")
_ops.define("norm_rms_gated(Tensor x, Tensor gate, Tensor weight, Tensor(a!) out, float eps) -> ()")


def rms(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, out: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight`` (K3 spec section 3).

    x [T, H] row-strided, bf16 (CPU: also float32); weight [H] bf16 or f32. On CUDA H is a multiple of 8 up to 16384,
    rows and weight start at multiples of 16 bytes. Statistics and scaling in fp32, one rounding.
    ``out`` [T, H] of x's dtype is written and returned; it may be ``x`` itself. T = 0 is allowed.
    Returns [T, H] of x's dtype. Raises ValueError naming the argument at fault.
    """
    if not use_reference("norm.rms", x):
        out = _ops.empty(tuple(x.shape), torch.bfloat16, x) if out is None else out
        _ops.call("norm_rms", x, weight, out, None, None, eps)
        return out
    check.tensor("x", x, (None, None), check.ACTIVATION, row=True)
    check.tensor("weight", weight, (x.shape[1],), check.ACTIVATION, like=x)
    return _deliver(reference.rms(x, weight, eps), x, out)


def rms_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, out: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm over each group of D columns, then times ``sigmoid(gate)`` (K3 spec section 5 step 7).

    x, gate [T, groups*D] row-strided, bf16 (CPU: also float32); weight [D] f32 or bf16, shared by the groups. On
    CUDA D is 128, rows and weight start at multiples of 16 bytes. fp32 inside, one rounding.
    ``out`` [T, groups*D] is written and returned; it may be ``x``.
    Returns [T, groups*D] of x's dtype. Raises ValueError naming the argument at fault.
    """
    if not use_reference("norm.rms_gated", x):
        out = _ops.empty(tuple(x.shape), torch.bfloat16, x) if out is None else out
        _ops.call("norm_rms_gated", x, gate, weight, out, eps)
        return out
    check.tensor("x", x, (None, None), check.ACTIVATION, row=True)
    check.tensor("gate", gate, x.shape, check.ACTIVATION, like=x, row=True)
    check.tensor("weight", weight, (None,), check.ACTIVATION, like=x)
    width = weight.shape[0]
    check.require(width > 0 and x.shape[1] % width == 0, "x", f"a multiple of {width} columns", x.shape[1])
    return _deliver(reference.rms_gated(x, gate, weight, eps), x, out)


def rms_fp8(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm, then E4M3 with one f32 scale per token and 128 columns, from the fp32 value in one pass.

    x, weight, eps, limits as ``rms``; scale and rounding as ``quant.fp8_per_token_group``.
    ``out`` [T, H] of x's dtype receives the norm's own result too.
    Returns (values float8_e4m3fn [T, H], scales f32 [T, ceil(H/128)]). Raises ValueError naming the argument at fault.
    """
    if not use_reference("norm.rms_fp8", x):
        check.rank("x", x, 2)
        values = _ops.empty(tuple(x.shape), torch.float8_e4m3fn, x)
        scale = _ops.empty((x.shape[0], -(-x.shape[1] // 128)), torch.float32, x)
        _ops.call("norm_rms", x, weight, out, values, scale, eps)
        return values, scale
    check.tensor("x", x, (None, None), check.ACTIVATION, row=True)
    check.tensor("weight", weight, (x.shape[1],), check.ACTIVATION, like=x)
    result = reference.rms(x, weight, eps)
    if out is not None:
        _deliver(result, x, out)
    return fp8_per_token_group(result, 128)


def _deliver(result: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return result.to(x.dtype)
    check.tensor("out", out, x.shape, (x.dtype,), like=x, row=True)
    return out.copy_(result)
