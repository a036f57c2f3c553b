"""The operations in plain torch, as a user without kernels would write them.

They are the peer that is always there. Called with float32 tensors they are also what the checks compare with: nothing
in here is shared with `kimi_kernels.reference`, so the two can be held against each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0


def topk(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sigmoid, the k best by score + bias, weights from the scores without it: (ids [T, k], weights [T, k])."""
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + bias, k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True)


def dispatch(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [T, k] -> (counts [E], offsets [E + 1], the pairs `token * k + j` in stable order of their expert)."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return counts, torch.nn.functional.pad(counts.cumsum(0), (1, 0)), order


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """[T, H] -> [T, H] in the dtype of x."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return rms_norm(x, weight, eps) * torch.sigmoid(gate)


def attn_res(
    blocks: Tensor, partial: Tensor, delta: Tensor, norm_weight: Tensor, proj_weight: Tensor, out_norm_weight: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """blocks [m, T, H], partial and delta [T, H] -> (partial + delta, the softmax mix over m + 1 sources, normed)."""
    partial = partial + delta
    sources = torch.cat([blocks, partial.unsqueeze(0)])
    scores = rms_norm(sources, norm_weight, eps) @ proj_weight.to(sources.dtype)
    mixed = (scores.softmax(0).unsqueeze(-1) * sources).sum(0)
    return partial, rms_norm(mixed, out_norm_weight, eps)


def fp8_per_token_group(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """x [T, C] -> (E4M3 [T, C], scale [T, C / group] f32), largest magnitude of a group on 448."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1).clamp_min(1e-10) / FP8_MAX
    q = (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] -> (E4M3 [T, C], E8M0 exponents [T, C / 32] u8), the smallest power of two that avoids saturation."""
    groups = x.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2((groups.abs().amax(-1) / FP8_MAX).clamp_min(2.0**-127))).clamp(-127, 127)
    q = (groups * torch.exp2(-exponent).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2), (exponent + 127).to(torch.uint8)


def finalize(rows: Tensor, row_index: Tensor, weights: Tensor, norm_weight: Tensor | None, eps: float = 1e-5) -> Tensor:
    """rows [R, D], row_index and weights [T, k] -> the weighted sum of each token's rows [T, D], normed if asked."""
    total = (rows[row_index.long()].float() * weights.unsqueeze(-1)).sum(1).to(rows.dtype)
    return total if norm_weight is None else rms_norm(total, norm_weight, eps)
