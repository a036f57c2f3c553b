"""A weight matrix and the product with it."""

from __future__ import annotations

import torch
from torch import nn

from kimi_kernels import dense


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """An unfilled parameter; under ``torch.device("meta")`` it has a shape and no memory."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T with W [rows, cols] bf16; checkpoint matrices that read the same x may be stacked in W's rows."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = weight(rows, cols)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, cols] -> [T, rows], in x's dtype unless ``out_dtype`` is given."""
        return dense.linear(x, self.weight, out_dtype=out_dtype)
