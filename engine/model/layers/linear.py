"""A weight matrix and the product with it."""

from __future__ import annotations

import torch
from torch import nn

from kimi_kernels import dense


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """An unfilled parameter; under ``torch.device("meta")`` it has a shape and no memory."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


ROW_MULTIPLE = 64  # kernels read outputs in 16-byte pieces and tile weights by 64 rows


class Linear(nn.Module):
    """y = x W^T with W [rows, cols] bf16; checkpoint matrices that read the same x may be stacked in W's rows.

    ``pad``: W gets rows of zeros up to a multiple of 64, and y as many columns of zeros, so that slices of a stacked
    output stay aligned whatever the number of heads.
    """

    def __init__(self, rows: int, cols: int, *, pad: bool = False) -> None:
        super().__init__()
        self.num_pad_rows = -rows % ROW_MULTIPLE if pad else 0
        self.weight = weight(rows + self.num_pad_rows, cols)

    def zero_padding(self) -> None:
        """Set the rows that no checkpoint tensor fills; the loader calls it."""
        if self.num_pad_rows:
            self.weight[-self.num_pad_rows :].zero_()

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, cols] -> [T, rows], in x's dtype unless ``out_dtype`` is given."""
        return dense.linear(x, self.weight, out_dtype=out_dtype)
