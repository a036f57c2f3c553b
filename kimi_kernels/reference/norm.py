"""RMSNorm and its gated form (spec of the model, sections 3 and 5.7). fp32 statistics, one rounding at the end."""

from __future__ import annotations

import torch


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H] in fp32: x / sqrt(mean(x^2) + eps) * weight."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rms_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, gate [T, groups*D], weight [D] -> fp32 [T, groups*D]: rms over each D, then times sigmoid(gate)."""
    grouped = x.unflatten(-1, (-1, weight.shape[0]))  # [T, groups, D]
    return rms(grouped, weight, eps).flatten(-2) * torch.sigmoid(gate.float())
