"""The packed form of all experts' weights, and the plain layout: the checkpoint's own bytes, stacked."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix of all experts, packed: y = x W^T with W [rows, cols] for each expert.

    ``layout`` "plain" holds the checkpoint's own bytes stacked, w13 being the gate rows (w1), then the up rows (w3):
    mxfp4: data uint8 [E, rows, cols/2], scale uint8 [E, rows, cols/32] (E8M0);
    fp8: data float8_e4m3fn [E, rows, cols], scale f32 [E, parts*ceil(rows/parts/128), ceil(cols/128)];
    bf16: data bfloat16 [E, rows, cols], scale None. Other layouts are the kernels' own.
    ``parts`` is the number of matrices stacked by rows: 2 for w13, 1 for w2.
    """

    format: str  # "mxfp4", "fp8" or "bf16"
    layout: str
    data: torch.Tensor
    scale: torch.Tensor | None
    num_experts: int
    rows: int
    cols: int
    parts: int = 1


def plain(
    format: str,
    w1: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w3: torch.Tensor,
    w3_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
) -> tuple[ExpertWeights, ExpertWeights]:
    """w1, w3 [E, I, ...], w2 [E, D, ...] -> (w13, w2); w2 is kept as it is, w1 and w3 are copied."""
    num_experts, inner, width = w1.shape[0], w1.shape[1], w2.shape[1]
    scale = None if w1_scale is None or w3_scale is None else torch.cat([w1_scale, w3_scale], dim=1)
    # Concatenated as bytes: not every torch build can concatenate float8.
    data = torch.cat([w1.view(torch.uint8), w3.view(torch.uint8)], dim=1).view(w1.dtype)
    return (
        ExpertWeights(format, "plain", data, scale, num_experts, 2 * inner, width, parts=2),
        ExpertWeights(format, "plain", w2, w2_scale, num_experts, width, inner),
    )


def split(w13: ExpertWeights, w2: ExpertWeights) -> tuple[torch.Tensor, ...]:
    """The inverse of ``plain``: (w1, w1_scale, w3, w3_scale, w2, w2_scale), or (w1, w3, w2) without scales; views."""
    w1, w3 = w13.data.chunk(2, dim=1)
    if w13.scale is None or w2.scale is None:
        return w1, w3, w2.data
    w1_scale, w3_scale = w13.scale.chunk(2, dim=1)
    return w1, w1_scale, w3, w3_scale, w2.data, w2.scale
