"""Dense projection: no bias anywhere in the model (K3 spec, head of the page)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> fp32 [T, N]."""
    return F.linear(x.float(), weight.float())
