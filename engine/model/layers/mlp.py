"""The dense MLP with the SiTU activation: layer 0 and the shared experts."""

from __future__ import annotations

import torch
from torch import nn

from engine.model.layers.linear import Linear


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta), fp32 in and out."""
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


class MLP(nn.Module):
    """SiTU(x Wgate^T, x Wup^T) Wdown^T, [T, H] -> [T, H]."""

    def __init__(self, hidden_size: int, width: int, beta: float, linear_beta: float | None) -> None:
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta
        self.gate_up = Linear(2 * width, hidden_size)
        self.down = Linear(hidden_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]. SiTU takes the product unrounded: fewer roundings tip fewer near ties of a router."""
        gate, up = self.gate_up(x, torch.float32).chunk(2, dim=-1)
        return self.down(situ(gate, up, self.beta, self.linear_beta).to(x.dtype))
