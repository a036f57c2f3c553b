"""Routed experts: packing of the checkpoint's weights, the two grouped GEMMs with SiTU between, the weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from kimi_kernels import _check as check
from kimi_kernels import _ops
from kimi_kernels._dispatch import no_kernel, use_reference
from kimi_kernels.reference import expert_weights
from kimi_kernels.reference import moe as reference
from kimi_kernels.reference.expert_weights import ExpertWeights

_ops.define(
    "moe_finalize(Tensor rows, Tensor row_index, Tensor weights, Tensor? norm_weight, Tensor(a!) out, float eps) -> ()"
)

FORMATS = ("mxfp4", "fp8", "bf16")
ACTIVATIONS = ("fp8", "bf16")


def pack_mxfp4(
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w3: torch.Tensor,
    w3_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Stack MXFP4 experts as the checkpoint stores them (K3 spec section 9).

    w1 (gate), w3 (up) uint8 [E, I, D/2], their scales uint8 [E, I, D/32]; w2 (down) uint8 [E, D, I/2], scale
    [E, D, I/32]; D and I multiples of 32; 1 <= E <= 1024. Low nibble first; no scale byte may be 255 (not a number).
    Inputs are not changed. Returns (w13, w2). Raises ValueError naming the argument at fault.
    """
    check.tensor("w1", w1, (None, None, None), check.UINT8)
    experts, inner, half = w1.shape
    width = 2 * half
    _check_sizes(experts, inner, width)
    shapes = {
        "w1_scale": (w1_scale, (experts, inner, width // 32)),
        "w3": (w3, (experts, inner, half)),
        "w3_scale": (w3_scale, (experts, inner, width // 32)),
        "w2": (w2, (experts, width, inner // 2)),
        "w2_scale": (w2_scale, (experts, width, inner // 32)),
    }
    for name, (value, shape) in shapes.items():
        check.tensor(name, value, shape, check.UINT8, like=w1)
    for name, value in (("w1_scale", w1_scale), ("w3_scale", w3_scale), ("w2_scale", w2_scale)):
        bad = int((value == 255).sum())
        check.require(bad == 0, name, "E8M0 bytes 0 to 254", f"{bad} bytes of 255 (not a number)")
    if not use_reference("moe.experts", w1):
        raise no_kernel("moe.experts", w1)
    return expert_weights.plain("mxfp4", w1, w1_scale, w3, w3_scale, w2, w2_scale)


def pack_fp8(
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w3: torch.Tensor,
    w3_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Stack FP8 experts with one f32 scale per 128x128 block (the value is data * scale).

    w1 (gate), w3 (up) float8_e4m3fn [E, I, D], their scales f32 [E, ceil(I/128), ceil(D/128)]; w2 (down) [E, D, I],
    scale [E, ceil(D/128), ceil(I/128)]; D and I multiples of 32; 1 <= E <= 1024. Inputs are not changed.
    Returns (w13, w2). Raises ValueError naming the argument at fault.
    """
    fp8 = (torch.float8_e4m3fn,)
    check.tensor("w1", w1, (None, None, None), fp8)
    experts, inner, width = w1.shape
    _check_sizes(experts, inner, width)
    inner_blocks, width_blocks = -(-inner // 128), -(-width // 128)
    check.tensor("w3", w3, (experts, inner, width), fp8, like=w1)
    check.tensor("w2", w2, (experts, width, inner), fp8, like=w1)
    check.tensor("w1_scale", w1_scale, (experts, inner_blocks, width_blocks), check.F32, like=w1)
    check.tensor("w3_scale", w3_scale, (experts, inner_blocks, width_blocks), check.F32, like=w1)
    check.tensor("w2_scale", w2_scale, (experts, width_blocks, inner_blocks), check.F32, like=w1)
    if not use_reference("moe.experts", w1):
        raise no_kernel("moe.experts", w1)
    return expert_weights.plain("fp8", w1, w1_scale, w3, w3_scale, w2, w2_scale)


def pack_bf16(w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> tuple[ExpertWeights, ExpertWeights]:
    """Stack experts of a checkpoint without quantisation: w1 (gate), w3 (up) bf16 [E, I, D], w2 (down) bf16 [E, D, I].

    CPU reference only: on CUDA such weights are converted to FP8 or MXFP4 when asked for. Inputs are not changed.
    Returns (w13, w2). Raises ValueError naming the argument at fault.
    """
    bf16 = (torch.bfloat16,)
    check.tensor("w1", w1, (None, None, None), bf16)
    experts, inner, width = w1.shape
    _check_sizes(experts, inner, width)
    check.tensor("w3", w3, (experts, inner, width), bf16, like=w1)
    check.tensor("w2", w2, (experts, width, inner), bf16, like=w1)
    return expert_weights.plain("bf16", w1, None, w3, None, w2, None)


def unpack(w13: ExpertWeights, w2: ExpertWeights) -> tuple[torch.Tensor, ...]:
    """The inverse of the pack functions, bit for bit.

    Returns (w1, w1_scale, w3, w3_scale, w2, w2_scale) as pack_mxfp4 and pack_fp8 took them, (w1, w3, w2) for bf16.
    The tensors may share memory with the packed ones. Raises ValueError for a layout that is not known.
    """
    for name, w in (("w13", w13), ("w2", w2)):
        check.require(w.layout == "plain", name, 'layout "plain"', repr(w.layout))
    return expert_weights.split(w13, w2)


def workspace_size(
    num_tokens: int, top_k: int, w13: ExpertWeights, w2: ExpertWeights, *, activation: str = "fp8"
) -> int:
    """Bytes of workspace that ``experts`` needs for up to ``num_tokens`` tokens; 0 on the reference path."""
    check.require(activation in ACTIVATIONS, "activation", '"fp8" or "bf16"', repr(activation))
    if use_reference("moe.experts", w13.data):
        return 0
    raise no_kernel("moe.experts", w13.data)


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    activation: str = "fp8",
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    dispatch: Any = None,
    expert_range: tuple[int, int] | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the chosen experts on every token and sum: ``sum_j weights[j] * (SiTU(x w1^T, x w3^T) w2^T)`` (K3 spec
    sections 7, 8), before the latent norm unless ``norm_weight`` is given.

    x [T, D] row-strided bf16 (CPU: also float32); topk_ids [T, k] int32 over all experts, -1 is skipped (its weight is
    not looked at); topk_weights [T, k] f32; w13 [2I, D] and w2 [D, I] an expert, from a pack function. ``linear_beta``
    None leaves the up branch as it is. norm_weight [D]: RMSNorm of the complete sum with ``eps``.
    ``expert_range`` (first, last+1): ids outside are skipped; the weights may hold just that range or all experts.
    ``dispatch``: the work list of ``routing.dispatch`` for these ids; None makes it inside. ``out`` [T, D] of x's
    dtype is written and returned. ``workspace``: uint8 of ``workspace_size`` bytes; None allocates.

    ``activation`` says how bf16 x and the intermediate h enter the products: "fp8" quantises both to E4M3 (x with a
    scale per token and 128 columns, h from fp32 with one per token and 64), "bf16" rounds h to bf16. A bf16 x means the
    same on the CPU as on CUDA. float32 x (CPU only) is exact: nothing is quantised or rounded, whatever ``activation``
    says.
    Sums are fp32, in an order that does not depend on the other tokens.

    Returns [T, D] of x's dtype. Raises ValueError naming the argument at fault.
    """
    if not use_reference("moe.experts", x):
        raise no_kernel("moe.experts", x)
    check.tensor("x", x, (None, None), check.ACTIVATION, row=True)
    tokens, width = x.shape
    check.tensor("topk_ids", topk_ids, (tokens, None), check.INT32, like=x)
    check.require(1 <= topk_ids.shape[1] <= 16, "topk_ids", "1 to 16 columns", topk_ids.shape[1])
    check.tensor("topk_weights", topk_weights, topk_ids.shape, check.F32, like=x)
    check.require(activation in ACTIVATIONS, "activation", '"fp8" or "bf16"', repr(activation))
    _check_weights(x, w13, w2)
    if expert_range is not None:
        first, last = expert_range
        fits = 0 <= first < last and (w13.num_experts == last - first or w13.num_experts >= last)
        check.require(fits, "expert_range", f"first < last+1 and weights for it ({w13.num_experts} held)", expert_range)
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, (width,), check.ACTIVATION, like=x)
    mode = "exact" if x.dtype == torch.float32 else activation
    total = reference.experts(
        x,
        topk_ids,
        topk_weights,
        w13,
        w2,
        activation=mode,
        beta=beta,
        linear_beta=linear_beta,
        expert_range=expert_range,
    )
    if norm_weight is not None:
        total = reference.rms(total, norm_weight, eps)
    return _deliver(total, x.dtype, out)


def finalize(
    rows: torch.Tensor,
    row_index: torch.Tensor,
    weights: torch.Tensor,
    norm_weight: torch.Tensor | None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Gather a token's expert rows, weigh and sum them in order, apply the latent RMSNorm (K3 spec section 8).

    rows [R, D] row-strided bf16 or f32; row_index [T, k] int32, -1: no row (its weight is not looked at); weights
    [T, k] f32; norm_weight [D] or None (the sum as it is: reduce over ranks first). fp32 inside.
    Returns [T, D] of rows' dtype; a token without rows is 0. Raises ValueError naming the argument at fault.
    """
    if not use_reference("moe.finalize", rows):
        out = _ops.empty((row_index.shape[0], rows.shape[1]), rows.dtype, rows)
        _ops.call("moe_finalize", rows, row_index, weights, norm_weight, out, eps)
        return out
    check.tensor("rows", rows, (None, None), check.ACTIVATION, row=True)
    check.tensor("row_index", row_index, (None, None), check.INT32, like=rows)
    check.tensor("weights", weights, row_index.shape, check.F32, like=rows)
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, (rows.shape[1],), check.ACTIVATION, like=rows)
    return reference.finalize(rows, row_index, weights, norm_weight, eps).to(rows.dtype)


def _check_sizes(experts: int, inner: int, width: int) -> None:
    check.require(1 <= experts <= 1024, "w1", "1 to 1024 experts", experts)
    check.require(inner > 0 and inner % 32 == 0, "w1", "an expert width (rows) that is a multiple of 32", inner)
    check.require(width > 0 and width % 32 == 0, "w1", "an input width (columns) that is a multiple of 32", width)


def _check_weights(x: torch.Tensor, w13: ExpertWeights, w2: ExpertWeights) -> None:
    width = x.shape[1]
    for name, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, ExpertWeights):
            raise TypeError(f"{name}: expected ExpertWeights from a pack function, got {type(w).__name__}")
        check.require(w.layout == "plain", name, 'layout "plain" on the reference path', repr(w.layout))
        check.require(w.format in FORMATS, name, f"a format of {FORMATS}", repr(w.format))
        check.require(w.data.device == x.device, name, f"device {x.device}", w.data.device)
    check.require(w13.cols == width, "w13", f"{width} columns (x has {width})", w13.cols)
    inner = w13.rows // 2
    check.require((w2.rows, w2.cols) == (width, inner), "w2", f"[{width}, {inner}] an expert", [w2.rows, w2.cols])
    check.require(w2.num_experts == w13.num_experts, "w2", f"{w13.num_experts} experts", w2.num_experts)
    check.require(w2.format == w13.format, "w2", f"format {w13.format}", w2.format)


def _deliver(result: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return result.to(dtype)
    check.tensor("out", out, result.shape, (dtype,), like=result, row=True)
    return out.copy_(result)
