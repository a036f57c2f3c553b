"""Kimi Delta Attention: a gated delta rule with a fixed-size state per sequence."""

from __future__ import annotations

import torch
from torch import nn

from engine.config import A_LOG_SIZE, ModelConfig
from engine.model.context import ForwardContext, ModelState
from engine.model.layers.linear import Linear, weight
from kimi_kernels import kda


class KDA(nn.Module):
    """[T, H] -> [T, H]; reads and writes this layer's part of the slots' state."""

    def __init__(self, config: ModelConfig, state_index: int) -> None:
        super().__init__()
        heads, head_dim, dim = config.kda_num_heads, config.kda_head_dim, config.kda_dim
        self.state_index = state_index  # which of the KDA layers this is
        self.lower_bound, self.eps = config.gate_lower_bound, config.rms_norm_eps
        self.splits = [dim, dim, dim, dim, head_dim, heads]
        self.in_proj = Linear(sum(self.splits), config.hidden_size, pad=True)  # rows: q, k, v, output gate, f_a, beta
        self.splits.append(self.in_proj.num_pad_rows)
        self.f_b_proj = Linear(dim, head_dim)
        self.conv_weight = weight(3 * dim, config.conv_kernel_size, dtype=torch.float32)
        self.a_log = weight(A_LOG_SIZE, dtype=torch.float32)
        self.dt_bias = weight(dim, dtype=torch.float32)
        self.o_norm = weight(head_dim, dtype=torch.float32)
        self.o_proj = Linear(config.hidden_size, dim)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, state: ModelState) -> torch.Tensor:
        q, k, v, gate, f_a, beta, _ = self.in_proj(x).split(self.splits, dim=-1)
        f = self.f_b_proj(f_a)
        kda_state = state.kda_state[:, self.state_index]
        conv_state = state.conv_state[:, self.state_index]
        consts = (self.conv_weight, self.a_log, self.dt_bias, self.o_norm, kda_state, conv_state)
        bound, eps = self.lower_bound, self.eps

        n, parts = ctx.num_decodes, []
        if n > 0:
            q_, k_, v_, f_, beta_, gate_ = (t[:n] for t in (q, k, v, f, beta, gate))
            slots, fresh = ctx.slots[:n], ctx.fresh[:n]
            parts.append(
                kda.decode_(q_, k_, v_, f_, beta_, gate_, *consts, slots, fresh=fresh, lower_bound=bound, eps=eps)
            )
        if n < ctx.num_tokens:
            q_, k_, v_, f_, beta_, gate_ = (t[n:] for t in (q, k, v, f, beta, gate))
            slots, fresh, starts = ctx.slots[n:], ctx.fresh[n:], ctx.prefill_cu_seqlens
            plan = kda.plan(beta.shape[1], ctx.query_lens[n:])
            parts.append(
                kda.prefill_(
                    q_, k_, v_, f_, beta_, gate_, *consts, slots, starts,
                    fresh=fresh, lower_bound=bound, eps=eps, plan=plan,
                )
            )  # fmt: skip
        return self.o_proj(parts[0] if len(parts) == 1 else torch.cat(parts))
