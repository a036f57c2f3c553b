"""Routed experts: packing of the checkpoint's weights, the two grouped GEMMs with SiTU between, the weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from kimi_kernels import _check as check
from kimi_kernels import _check_moe as check_moe
from kimi_kernels import _moe_cuda, _ops, routing
from kimi_kernels._dispatch import use_reference
from kimi_kernels.reference import expert_weights
from kimi_kernels.reference import moe as reference
from kimi_kernels.reference.expert_weights import ExpertWeights

_ops.define(
    "moe_finalize(Tensor rows, Tensor row_index, Tensor weights, Tensor? norm_weight, Tensor(a!) out, float eps) -> ()"
)

ACTIVATIONS = check_moe.ACTIVATIONS


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
    check_moe.mxfp4(w1, w1_scale, w3, w3_scale, w2, w2_scale)
    if not use_reference("moe.experts", w1):
        return _moe_cuda.pack("mxfp4", w1, w1_scale, w3, w3_scale, w2, w2_scale)
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
    check_moe.fp8(w1, w1_scale, w3, w3_scale, w2, w2_scale)
    if not use_reference("moe.experts", w1):
        return _moe_cuda.pack("fp8", w1, w1_scale, w3, w3_scale, w2, w2_scale)
    return expert_weights.plain("fp8", w1, w1_scale, w3, w3_scale, w2, w2_scale)


def pack_bf16(w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> tuple[ExpertWeights, ExpertWeights]:
    """Stack experts of a checkpoint without quantisation: w1 (gate), w3 (up) bf16 [E, I, D], w2 (down) bf16 [E, D, I].

    CPU reference only: on CUDA such weights are converted to FP8 or MXFP4 when asked for. Inputs are not changed.
    Returns (w13, w2). Raises ValueError naming the argument at fault.
    """
    bf16 = (torch.bfloat16,)
    check.tensor("w1", w1, (None, None, None), bf16)
    experts, inner, width = w1.shape
    check_moe.sizes(experts, inner, width)
    check.tensor("w3", w3, (experts, inner, width), bf16, like=w1)
    check.tensor("w2", w2, (experts, width, inner), bf16, like=w1)
    return expert_weights.plain("bf16", w1, None, w3, None, w2, None)


def unpack(w13: ExpertWeights, w2: ExpertWeights) -> tuple[torch.Tensor, ...]:
    """The inverse of the pack functions, bit for bit.

    Returns (w1, w1_scale, w3, w3_scale, w2, w2_scale) as pack_mxfp4 and pack_fp8 took them, (w1, w3, w2) for bf16.
    The tensors may share memory with the packed ones. Raises ValueError for a layout that is not known.
    """
    if w13.layout == w2.layout == _moe_cuda.LAYOUT:
        return _moe_cuda.unpack(w13, w2)
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
    shape = (num_tokens, top_k, w13.num_experts, w13.num_experts, w13.cols, w2.cols)
    return _moe_cuda.plan(*shape, w13.format, activation)["workspace_bytes"]


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
    num_experts: int | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the chosen experts on every token and sum: ``sum_j weights[j] * (SiTU(x w1^T, x w3^T) w2^T)`` (K3 spec
    sections 7, 8), before the latent norm unless ``norm_weight`` is given.

    x [T, D] row-strided bf16 (CPU: also float32); topk_ids [T, k] int32 over all experts, -1 is skipped (its weight is
    not looked at); topk_weights [T, k] f32; w13 [2I, D] and w2 [D, I] an expert, from a pack function. ``linear_beta``
    None leaves the up branch as it is. norm_weight [D]: RMSNorm of the complete sum with ``eps``.
    ``expert_range`` (first, last+1): ids outside are skipped; the weights may hold just that range or all experts.
    ``num_experts``: over how many experts the ids are spread, other ranks' too (speed only; None: those held here).
    ``dispatch``: the work list of ``routing.dispatch`` for these ids; None makes it inside. ``out`` [T, D] of x's
    dtype is written and returned. ``workspace``: uint8 of ``workspace_size`` bytes; None allocates. k is at most 16.
    On CUDA: compute capability 9.0, D at most 8192, x and out rows at multiples of 16 bytes, workspace at 128.

    ``activation`` says how bf16 x and the intermediate h enter the products: "fp8" quantises both to E4M3 with one
    scale a row (h from fp32, its scale a power of two): what is more than 2^13 below its row's largest value loses
    precision, 2^19 below it becomes 0. "bf16" rounds h to bf16. A bf16 x means the same on the CPU as on CUDA. float32
    x (CPU only) is exact: nothing is quantised or rounded. Sums are fp32, in an order that does not depend on the other
    tokens; of FP8 products CUDA first sums up to 512 columns in the tensor cores, which keep some 14 bits.

    Returns [T, D] of x's dtype. Raises ValueError naming the argument at fault.
    """
    check_moe.settings(activation, beta, linear_beta)
    if not use_reference("moe.experts", x):
        check.rank("x", x, 2)
        check.rank("topk_ids", topk_ids, 2)
        check_moe.packed(x, w13, w2, _moe_cuda.LAYOUT)
        first, last = check_moe.expert_range(expert_range, w13)
        if out is None:
            out = _ops.empty(tuple(x.shape), torch.bfloat16, x)
        spread = num_experts or w13.num_experts
        if dispatch is None:
            form = str(topk_ids.dtype).rsplit(".", 1)[-1]
            check.require(form == "int32", "topk_ids", "dtype int32", form)
            plan = _moe_cuda.plan(*topk_ids.shape, last - first, spread, w13.cols, w2.cols, w13.format, activation)
            dispatch = routing.dispatch(topk_ids, last, expert_range=(first, last), tile_tokens=plan["piece_rows"])
        made_for = dispatch.expert_range
        check.require(made_for == (first, last), "dispatch", f"one of experts {(first, last)}", made_for)
        situ: dict[str, Any] = {"activation": activation, "beta": beta, "linear_beta": linear_beta}
        rest: dict[str, Any] = {"num_experts": spread, "norm_weight": norm_weight, "eps": eps, **situ}
        weights = (topk_ids, topk_weights, w13, w2)
        return _moe_cuda.run(x, *weights, dispatch=dispatch, workspace=workspace, out=out, **rest)
    check.tensor("x", x, (None, None), check.ACTIVATION, row=True)
    tokens, width = x.shape
    check.tensor("topk_ids", topk_ids, (tokens, None), check.INT32, like=x)
    check.require(1 <= topk_ids.shape[1] <= 16, "topk_ids", "1 to 16 columns", topk_ids.shape[1])
    check.tensor("topk_weights", topk_weights, topk_ids.shape, check.F32, like=x)
    check_moe.packed(x, w13, w2, "plain")
    check.require(w13.data.device == x.device, "w13", f"device {x.device}", w13.data.device)
    check_moe.expert_range(expert_range, w13)
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


def expert_rows(
    x: torch.Tensor,
    dispatch: routing.Dispatch,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    activation: str = "fp8",
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
    first_product: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The part of ``experts`` between the dispatch and the weighted sum: rows [T*k, D] of x's dtype.

    Row token*k + j is choice j of a token; rows of choices that take no part are left as they are. ``first_product``
    [T*k, 2I] of x's dtype: row i receives x w1^T | x w3^T of the pair ``dispatch.pairs[i]``. The rows lie in
    ``workspace`` (as in ``experts``) on CUDA. Other arguments and errors as ``experts``.
    """
    check_moe.settings(activation, beta, linear_beta)
    check.require(x.shape[0] > 0, "x", "at least one token", 0)
    situ: dict[str, Any] = {"activation": activation, "beta": beta, "linear_beta": linear_beta}
    if not use_reference("moe.experts", x):
        check.rank("x", x, 2)
        check_moe.packed(x, w13, w2, _moe_cuda.LAYOUT)
        check_moe.expert_range(dispatch.expert_range, w13)
        rest: dict[str, Any] = {"num_experts": w13.num_experts, "first_product": first_product, **situ}
        return _moe_cuda.run(x, None, None, w13, w2, dispatch=dispatch, workspace=workspace, **rest)
    check_moe.packed(x, w13, w2, "plain")
    settings = {**situ, "activation": "exact" if x.dtype == torch.float32 else activation}
    work = (dispatch.offsets.tolist(), dispatch.pairs, dispatch.expert_range)
    return reference.all_rows(x, *work, w13, w2, settings, first_product)


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
    [T, k] f32; norm_weight [D] or None (the sum as it is: reduce over ranks first). On CUDA D is a multiple of 8 up to
    8192, rows and norm_weight start at multiples of 16 bytes. fp32 inside.
    Returns [T, D] of rows' dtype; a token without rows is 0. Raises ValueError naming the argument at fault.
    """
    if not use_reference("moe.finalize", rows):
        check.rank("rows", rows, 2)
        check.rank("row_index", row_index, 2)
        out = _ops.empty((row_index.shape[0], rows.shape[1]), rows.dtype, rows)
        _ops.call("moe_finalize", rows, row_index, weights, norm_weight, out, eps)
        return out
    check.tensor("rows", rows, (None, None), check.ACTIVATION, row=True)
    check.tensor("row_index", row_index, (None, None), check.INT32, like=rows)
    check.tensor("weights", weights, row_index.shape, check.F32, like=rows)
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, (rows.shape[1],), check.ACTIVATION, like=rows)
    return reference.finalize(rows, row_index, weights, norm_weight, eps).to(rows.dtype)


def _deliver(result: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return result.to(dtype)
    check.tensor("out", out, result.shape, (dtype,), like=result, row=True)
    return out.copy_(result)
