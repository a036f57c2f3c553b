"""Kimi K3's text model: one packed forward pass over the tokens of a step, whatever their number of sequences.

A layer is attention (KDA or MLA) and an MLP (dense or MoE). Each of the two reads a mix over the attention-residual
blocks and the running sum, and its output is added to the running sum. Every ``attn_res_block_size`` layers the sum
is put away as a block and starts anew. No position enters anywhere. Nothing but the KDA state and the MLA cache is
kept between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from engine.config import ModelConfig
from engine.model.context import ForwardContext, ModelState
from engine.model.layers.attn_res import AttnRes
from engine.model.layers.kda import KDA
from engine.model.layers.linear import Linear, weight
from engine.model.layers.mla import MLA
from engine.model.layers.mlp import MLP
from engine.model.layers.moe import MoE


class Layer(nn.Module):
    """The parts of one layer; ``KimiK3.forward`` strings them together."""

    def __init__(self, config: ModelConfig, index: int, moe_activation: str) -> None:
        super().__init__()
        self.starts_block = index % config.attn_res_block_size == 0
        self.attn_res = AttnRes(config.hidden_size, config.rms_norm_eps)
        self.attn: KDA | MLA
        if index in config.mla_layers:
            self.attn = MLA(config, config.mla_layers.index(index))
        else:
            self.attn = KDA(config, config.kda_layers.index(index))
        self.mlp_res = AttnRes(config.hidden_size, config.rms_norm_eps)
        self.mlp: MLP | MoE
        if config.is_moe(index):
            self.mlp = MoE(config, moe_activation)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, config.situ_beta, config.situ_linear_beta)


class KimiK3(nn.Module):
    """Parameters are unfilled after construction (build under ``torch.device("meta")``); engine/weights fills them.

    ``moe_activation`` "bf16" or "fp8": how inputs enter the routed experts' products, for every batch alike.
    """

    def __init__(self, config: ModelConfig, moe_activation: str = "bf16") -> None:
        super().__init__()
        self.config = config
        self.embed = weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i, moe_activation) for i in range(config.num_hidden_layers))
        self.output_res = AttnRes(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.vocab_size, config.hidden_size)

    def forward(
        self, token_ids: torch.Tensor, ctx: ForwardContext, state: ModelState, dtype: torch.dtype
    ) -> torch.Tensor:
        """token_ids [T] -> final hidden states [T, H] in ``dtype``, normalised, ready for ``logits``.

        Changes ``state`` in place: the slots absorb the tokens, the cache rows of ``ctx.slot_mapping`` are written.
        """
        num_tokens, hidden = token_ids.shape[0], self.config.hidden_size
        rows = torch.empty(self.config.num_attn_res_blocks, num_tokens, hidden, dtype=dtype, device=token_ids.device)
        rows[0].copy_(self.embed[token_ids])  # block 0 is the bare embedding: layer 0 puts it away before adding to it
        blocks, partial, delta = rows[:0], rows[0], None
        for layer in cast(Iterable[Layer], self.layers):
            if layer.starts_block:
                # the mix sees the sum once, as ``partial``; afterwards the sum lives only in its block row
                m = blocks.shape[0]
                _, x = layer.attn_res(blocks, partial, delta, None if delta is None else rows[m])
                blocks = rows[: m + 1]
                partial, delta = layer.attn(x, ctx, state), None
            else:
                partial, x = layer.attn_res(blocks, partial, delta)
                delta = layer.attn(x, ctx, state)
            partial, x = layer.mlp_res(blocks, partial, delta)
            delta = layer.mlp(x)
        _, x = self.output_res(blocks, partial, delta)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [*, H] -> [*, vocab] f32."""
        return self.lm_head(hidden, torch.float32)
