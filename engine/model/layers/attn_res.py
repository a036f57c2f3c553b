"""Attention residuals: what a sublayer reads is a softmax-weighted mix over the started blocks and the running sum."""

from __future__ import annotations

import torch
from torch import nn

from engine.model.layers.linear import weight
from kimi_kernels import attn_res


class AttnRes(nn.Module):
    """One mix with its own score vectors, followed by the RMSNorm of the sublayer that reads it."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.score_norm = weight(hidden_size)
        self.score_proj = weight(hidden_size)
        self.out_norm = weight(hidden_size)

    def forward(
        self,
        blocks: torch.Tensor,
        partial: torch.Tensor,
        delta: torch.Tensor | None,
        partial_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """blocks [m, T, H], partial, delta [T, H] -> (partial + delta, norm(mix of blocks and that sum)), both [T, H].

        The mix is only the sublayer's input: the running sum is never replaced by it.
        """
        return attn_res.mix(
            blocks,
            partial,
            delta,
            self.score_norm,
            self.score_proj,
            self.out_norm,
            eps=self.eps,
            partial_out=partial_out,
        )
