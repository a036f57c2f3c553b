"""Attention residuals: residual add, softmax over depth, weighted sum and the RMSNorm that follows, in one call."""

from __future__ import annotations

import torch

from kimi_kernels import _check as check
from kimi_kernels import _ops
from kimi_kernels._dispatch import use_reference
from kimi_kernels.reference import attn_res as reference

_ops.define(
    "attn_res_mix(Tensor blocks, Tensor partial, Tensor? delta, Tensor norm_weight, Tensor proj_weight, "
    "Tensor out_norm_weight, Tensor(a!)? partial_out, Tensor(b!) x_out, float eps) -> ()"
)


def mix(
    blocks: torch.Tensor,
    partial: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    out_norm_weight: torch.Tensor,
    *,
    eps: float = 1e-5,
    partial_out: torch.Tensor | None = None,
    x_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``delta`` to the running sum, mix it with the blocks, normalise the mix (K3 spec section 4).

    ``p = partial + delta``, rounded to its dtype; sources are the blocks in order, then p; score of a source v is
    ``sum(v * norm_weight * proj_weight) / sqrt(mean(v^2) + eps)``; x is RMSNorm of the softmax-weighted sum of the raw
    sources, with ``out_norm_weight`` and the same eps. fp32 inside.

    blocks [m, T, H], 0 <= m <= 15, any strides over m and T; partial, delta [T, H] row-strided; all bf16 (CPU: also
    float32). norm_weight, proj_weight, out_norm_weight [H] bf16 or f32. On CUDA H is a multiple of 8 up to 32768; all
    rows and weights start at multiples of 16 bytes.
    ``partial_out`` [T, H] receives p; it may be ``partial``, ``delta`` or a further row of the buffer that ``blocks``
    is a view of (a block start without a copy). ``x_out`` [T, H] receives x. With ``delta=None`` p is ``partial``: that
    very tensor is returned (copied into ``partial_out`` when one is given).

    Returns (p, x), both [T, H] of partial's dtype. Raises ValueError naming the argument at fault.
    """
    if not use_reference("attn_res.mix", partial):
        shape = tuple(partial.shape)
        if x_out is None:
            x_out = _ops.empty(shape, torch.bfloat16, partial)
        if partial_out is None and delta is not None:
            partial_out = _ops.empty(shape, torch.bfloat16, partial)
        weights = (norm_weight, proj_weight, out_norm_weight)
        _ops.call("attn_res_mix", blocks, partial, delta, *weights, partial_out, x_out, eps)
        return (partial if partial_out is None else partial_out), x_out
    check.tensor("partial", partial, (None, None), check.ACTIVATION, row=True)
    tokens, hidden = partial.shape
    own = (partial.dtype,)
    check.tensor("blocks", blocks, (None, tokens, hidden), own, like=partial, row=True)
    check.require(blocks.shape[0] <= 15, "blocks", "at most 15 blocks", blocks.shape[0])
    if delta is not None:
        check.tensor("delta", delta, (tokens, hidden), own, like=partial, row=True)
    for name, weight in (
        ("norm_weight", norm_weight),
        ("proj_weight", proj_weight),
        ("out_norm_weight", out_norm_weight),
    ):
        check.tensor(name, weight, (hidden,), check.ACTIVATION, like=partial)
    for name, out in (("partial_out", partial_out), ("x_out", x_out)):
        if out is not None:
            check.tensor(name, out, (tokens, hidden), own, like=partial, row=True)
    total = partial if delta is None else partial + delta
    if partial_out is not None:
        total = partial_out.copy_(total)
    x = reference.mix(blocks, total, norm_weight, proj_weight, out_norm_weight, eps)
    return total, x.to(partial.dtype) if x_out is None else x_out.copy_(x)
