"""Attention residuals (K3 spec section 4): softmax over depth of raw sources, scored by their normalised form."""

from __future__ import annotations

import torch

from kimi_kernels.reference.norm import rms


def mix(
    blocks: torch.Tensor,
    partial: torch.Tensor,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    out_norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """blocks [m, T, H], partial [T, H] (delta already added and rounded) -> fp32 [T, H] after the output norm."""
    sources = torch.cat([blocks.float(), partial.float().unsqueeze(0)])  # [m+1, T, H]
    score_weight = norm_weight.float() * proj_weight.float()  # [H]
    scores = (sources * score_weight).sum(-1) * torch.rsqrt(sources.square().mean(-1) + eps)  # [m+1, T]
    weights = scores.softmax(0)
    mixed = (weights.unsqueeze(-1) * sources).sum(0)  # [T, H]
    return rms(mixed, out_norm_weight, eps)
