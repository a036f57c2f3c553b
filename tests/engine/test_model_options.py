"""Config values that the golden model leaves at their neutral value reach the operations."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.model.layers.moe import Experts, Router
from engine.tools.make_tiny import config_dict
from kimi_kernels import routing


def test_router_uses_groups_and_scale_of_the_config() -> None:
    config = ModelConfig.from_dict(config_dict(num_expert_group=4, topk_group=1, routed_scaling_factor=2.5))
    router = Router(config)
    generator = torch.Generator().manual_seed(0)
    router.gate.weight.copy_(torch.randn(router.gate.weight.shape, generator=generator) / 16)
    router.bias.zero_()
    x = torch.randn(20, config.hidden_size, generator=generator)
    ids, weights = router(x)
    logits = router.gate(x, torch.float32)
    k = config.num_experts_per_token
    assert torch.equal(ids // 8, (ids // 8)[:, :1].expand(-1, k)), "one group of 8 experts a token"
    torch.testing.assert_close(weights.sum(-1), torch.full((20,), 2.5))
    free, _ = routing.topk(logits, router.bias, k)
    assert not torch.equal(free.sort().values, ids.sort().values)


def test_experts_use_the_betas_of_the_config() -> None:
    for given, expected in (((3.0, 7.0), (3.0, 7.0)), ((None, None), (1.0, None))):
        names = ("activation_situ_beta", "activation_situ_linear_beta")
        config = ModelConfig.from_dict(config_dict(**dict(zip(names, given, strict=True))))
        experts = Experts(config, "bf16")
        assert (experts.beta, experts.linear_beta) == expected
