"""The sparse MLP: a sigmoid router, experts that work in a narrower latent space, and shared experts beside them."""

from __future__ import annotations

import torch
from torch import nn

from engine.config import ModelConfig
from engine.model.layers.linear import Linear, weight
from engine.model.layers.mlp import MLP
from kimi_kernels import moe, norm, routing


class Router(nn.Module):
    """Chooses the experts of each token. The bias takes part in choosing only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.num_groups, self.topk_groups = config.num_expert_group, config.topk_group
        self.scale = config.routed_scaling_factor
        self.gate = Linear(config.num_experts, config.hidden_size)
        self.bias = weight(config.num_experts, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (ids [T, k] int32, weights [T, k] f32). Logits stay fp32: rounding them would change choices."""
        logits = self.gate(x, torch.float32)
        return routing.topk(
            logits,
            self.bias,
            self.top_k,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            scale=self.scale,
        )


class Experts(nn.Module):
    """The routed experts, kept in the checkpoint's own format and never dequantised at rest.

    The loader assigns ``w13`` and ``w2`` when it has packed a layer.
    """

    w13: moe.ExpertWeights
    w2: moe.ExpertWeights

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta

    def forward(self, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """z [T, D] latent input -> [T, D], the weighted sum over each token's experts."""
        return moe.experts(
            z, ids, weights, self.w13, self.w2,
            activation=self.activation, beta=self.beta, linear_beta=self.linear_beta,
        )  # fmt: skip


class MoE(nn.Module):
    """norm(sum of experts(x Wdown^T)) Wup^T + shared(x), [T, H] -> [T, H]."""

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.eps = config.rms_norm_eps
        self.router = Router(config)
        self.latent_down = Linear(latent, hidden)
        self.experts = Experts(config, activation)
        self.latent_norm = weight(latent)
        self.latent_up = Linear(hidden, latent)
        shared_width = config.moe_intermediate_size * config.num_shared_experts
        self.shared = MLP(hidden, shared_width, config.situ_beta, config.situ_linear_beta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.router(x)
        routed = self.experts(self.latent_down(x), ids, weights)
        # the norm needs the complete sum, so it stands outside the experts: ranks reduce before it
        routed = norm.rms(routed, self.latent_norm, eps=self.eps)
        return self.latent_up(routed) + self.shared(x)
