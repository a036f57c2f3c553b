"""The experts on CUDA: packed weights in the layout of the device's kernels, plan, and the call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kimi_kernels import _moe_sm90 as sm90
from kimi_kernels import _ops
from kimi_kernels._dispatch import KernelUnavailableError
from kimi_kernels.reference.expert_weights import ExpertWeights

_ops.define(
    "moe_experts(Tensor x, Tensor? topk_ids, Tensor? topk_weights, Tensor w13, Tensor w2, Tensor? norm_weight, "
    "Tensor pairs, Tensor tiles, Tensor num_tiles, Tensor(a!)? first_product, Tensor(b!)? out, Tensor(c!) workspace, "
    "str format, str activation, int inner, int first, int last, int total_experts, int weight_offset, float beta, "
    "float linear_beta, float eps) -> ()"
)

LAYOUT = "sm90"


def require_device(device: Any) -> None:
    """KernelUnavailableError unless the expert kernels exist for this device."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise KernelUnavailableError(
            f"moe.experts: kernels exist for compute capability 9.0 (sm_90a); {device} has {major}.{minor}"
        )


def pack(
    fmt: str, w1: Any, w1_scale: Any, w3: Any, w3_scale: Any, w2: Any, w2_scale: Any
) -> tuple[ExpertWeights, ExpertWeights]:
    """Checked stacks in checkpoint order -> (w13, w2). A few experts at a time: beside the result it takes the memory
    of about one expert group (CHUNK_BYTES of source and some copies of it), not of the stack."""
    require_device(w1.device)
    experts, inner, width = w1.shape[0], w1.shape[1], w2.shape[1]
    shapes = {"w13": (2 * inner, width, 2), "w2": (width, inner, 1)}
    packed = {
        name: torch.empty(experts, sm90.expert_bytes(fmt, *shape), dtype=torch.uint8, device=w1.device)
        for name, shape in shapes.items()
    }
    fill = sm90.pack_mxfp4 if fmt == "mxfp4" else sm90.pack_fp8
    step = max(1, sm90.CHUNK_BYTES // (w1.shape[1] * w1.shape[2] * 2))
    for start in range(0, experts, step):
        part = slice(start, start + step)
        both = torch.cat([w1[part].view(torch.uint8), w3[part].view(torch.uint8)], 1).view(w1.dtype)
        fill(both, torch.cat([w1_scale[part], w3_scale[part]], 1), 2, packed["w13"][part])
        fill(w2[part], w2_scale[part], 1, packed["w2"][part])
    return (
        ExpertWeights(fmt, LAYOUT, packed["w13"], None, experts, *shapes["w13"]),
        ExpertWeights(fmt, LAYOUT, packed["w2"], None, experts, *shapes["w2"]),
    )


def unpack(w13: ExpertWeights, w2: ExpertWeights) -> tuple[torch.Tensor, ...]:
    """The inverse of ``pack``: (w1, w1_scale, w3, w3_scale, w2, w2_scale)."""
    take = sm90.unpack_mxfp4 if w13.format == "mxfp4" else sm90.unpack_fp8
    both, scale = take(w13.data, w13.rows, w13.cols, 2)
    w1, w3 = both.chunk(2, 1)
    w1_scale, w3_scale = scale.chunk(2, 1)
    return (w1, w1_scale, w3, w3_scale, *take(w2.data, w2.rows, w2.cols, 1))


@functools.lru_cache(maxsize=4096)
def plan(
    tokens: int, top_k: int, experts: int, total_experts: int, width: int, inner: int, fmt: str, activation: str
) -> dict[str, Any]:
    """What a call of these shapes does: `piece_rows`, `max_tiles`, `workspace_bytes`, where `blobs`, `hidden`,
    `rows` and `scales` lie in the workspace, and all that as `text`."""
    return _ops.module().moe_plan(tokens, top_k, experts, total_experts, width, inner, fmt, activation)


def run(
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    dispatch: Any,
    num_experts: int,
    activation: str,
    beta: float,
    linear_beta: float | None,
    workspace: Any,
    norm_weight: Any = None,
    eps: float = 0.0,
    first_product: Any = None,
    out: Any = None,
) -> Any:
    """Everything after the dispatch, on weights that ``_check_moe.packed`` has seen. Returns ``out``; without it the
    rows of all choices, a view of the workspace."""
    first, last = dispatch.expert_range
    inner, pairs = w2.cols, dispatch.pairs.shape[0]
    top_k = pairs // x.shape[0] if topk_ids is None else topk_ids.shape[1]  # there may be no token
    shape = (x.shape[0], top_k, last - first, num_experts, w13.cols, inner)
    if workspace is None or out is None:
        needed = plan(*shape, w13.format, activation)
    if workspace is None:
        workspace = _ops.empty((needed["workspace_bytes"],), torch.uint8, x)
    _ops.call(
        "moe_experts",
        x,
        topk_ids,
        topk_weights,
        w13.data,
        w2.data,
        norm_weight,
        dispatch.pairs,
        dispatch.tiles,
        dispatch.num_tiles,
        first_product,
        out,
        workspace,
        w13.format,
        activation,
        inner,
        first,
        last,
        num_experts,
        0 if w13.num_experts == last - first else first,
        float(beta),
        float(linear_beta or 0.0),
        float(eps),
    )
    if out is not None:
        return out
    return workspace[needed["rows"] :][: pairs * w13.cols * 2].view(x.dtype).reshape(pairs, w13.cols)
