"""Multi-head latent attention without positional encoding: all heads share one cached row of 576 values a token."""

from __future__ import annotations

import torch
from torch import nn

from engine.config import ModelConfig
from engine.model.context import ForwardContext, ModelState
from engine.model.layers.linear import Linear, weight
from kimi_kernels import mla, norm


class MLA(nn.Module):
    """[T, H] -> [T, H]; appends to and reads this layer's part of the paged cache."""

    def __init__(self, config: ModelConfig, cache_index: int) -> None:
        super().__init__()
        self.cache_index = cache_index  # which of the MLA layers this is
        self.heads, self.eps = config.num_attention_heads, config.mla_norm_eps
        self.nope, self.rope, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = (self.nope + self.rope) ** -0.5
        self.splits = [config.q_lora_rank, self.latent + self.rope, self.heads * self.v_dim]
        self.in_proj = Linear(sum(self.splits), config.hidden_size, pad=True)  # rows: q_a, kv_a, output gate
        self.splits.append(self.in_proj.num_pad_rows)
        self.q_a_norm = weight(config.q_lora_rank)
        self.q_b_proj = Linear(self.heads * (self.nope + self.rope), config.q_lora_rank)
        self.kv_a_norm = weight(self.latent)
        self.kv_b = weight(self.heads * (self.nope + self.v_dim), self.latent)  # per head: k rows, then v rows
        self.o_proj = Linear(config.hidden_size, self.heads * self.v_dim)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, state: ModelState) -> torch.Tensor:
        q_a, kv_a, gate, _ = self.in_proj(x).split(self.splits, dim=-1)
        q = self.q_b_proj(norm.rms(q_a, self.q_a_norm, eps=self.eps)).view(-1, self.heads, self.nope + self.rope)
        cache = state.mla_cache[self.cache_index]
        mla.store_(kv_a, self.kv_a_norm, cache, ctx.slot_mapping, eps=self.eps)

        n, parts = ctx.num_decodes, []
        if n > 0:
            parts.append(self._decode(q[:n], cache, ctx))
        if n < ctx.num_tokens:
            seqs = ctx.block_table[n:], ctx.context_lens[n:], ctx.prefill_cu_seqlens
            parts.append(mla.prefill(q[n:], self.kv_b, cache, *seqs, scale=self.scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        gated = out.flatten(1).float() * torch.sigmoid(gate.float())
        return self.o_proj(gated.to(x.dtype))

    def _decode(self, q: torch.Tensor, cache: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Absorbed form: W_k goes into the query and W_v behind the sum, so cached rows are read as they are."""
        n = q.shape[0]
        w_k, w_v = self.kv_b.view(self.heads, self.nope + self.v_dim, self.latent).split([self.nope, self.v_dim], dim=1)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_k.to(q.dtype)).transpose(0, 1)
        absorbed = torch.cat([q_latent, q_rope], dim=-1)
        mixed = mla.decode(absorbed, cache, ctx.block_table[:n], ctx.context_lens[:n], scale=self.scale)
        return torch.bmm(mixed.to(q.dtype).transpose(0, 1), w_v.to(q.dtype).transpose(1, 2)).transpose(0, 1)
