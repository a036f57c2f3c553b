"""Inputs, pools and an fp64 recurrence for the KDA tests on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kimi_kernels import kda

DIM = 128


@dataclass(frozen=True)
class Weights:
    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.conv_weight, self.a_log, self.dt_bias, self.o_norm


@dataclass(frozen=True)
class Tokens:
    """Projections of T tokens, slices of one row each, as a fused projection leaves them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    f: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.f, self.beta, self.gate

    def rows(self, rows: slice | list[int]) -> Tokens:
        return Tokens(*(x[rows] for x in self.args()))


@dataclass(frozen=True)
class Pools:
    """Slot-major pools of three layers; the operations work on a view of the middle one."""

    states: torch.Tensor  # [slots, 3, heads, 128, 128]
    convs: torch.Tensor  # [slots, 3, 3, 3*heads*128]

    @property
    def state(self) -> torch.Tensor:
        return self.states[:, 1]

    @property
    def conv(self) -> torch.Tensor:
        return self.convs[:, 1]

    def clone(self) -> Pools:
        return Pools(self.states.clone(), self.convs.clone())

    def args(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.state, self.conv


def weights(heads: int) -> Weights:
    """Different for every head and channel, so that a wrong index shows."""
    width = heads * DIM
    conv = torch.rand(3 * width, 4, device="cuda") - 0.5
    a_log = torch.linspace(-1.0, 1.0, heads, device="cuda") + 0.1 * torch.rand(heads, device="cuda")
    return Weights(conv, a_log, torch.randn(width, device="cuda"), torch.rand(DIM, device="cuda") + 0.5)


def tokens(count: int, heads: int, padding: int = 7) -> Tokens:
    width = heads * DIM
    fused = torch.randn(count, 5 * width + heads + padding, device="cuda").bfloat16()
    q, k, v, gate, f, beta = (fused[:, i * width : (i + 1) * width] for i in range(6))
    v *= 10  # in place: it stays a slice
    return Tokens(q, k, v, f, beta[:, :heads], gate)


def pools(slots: int, heads: int) -> Pools:
    states = torch.randn(slots, 3, heads, DIM, DIM, device="cuda") * 0.3
    return Pools(states, torch.randn(slots, 3, 3, 3 * heads * DIM, device="cuda").bfloat16())


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def decode(x: Tokens, w: Weights, pool: Pools, slots: torch.Tensor, **options: object) -> torch.Tensor:
    return kda.decode_(*x.args(), *w.args(), *pool.args(), slots, **options)  # type: ignore[arg-type]


def verify(
    x: Tokens, w: Weights, pool: Pools, slots: torch.Tensor, cu_seqlens: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return kda.verify(*x.args(), *w.args(), *pool.args(), slots, cu_seqlens, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Exact:
    """The states of n sequences in fp64, moved on one token at a time by the formulas of the spec, nothing rounded."""

    state: torch.Tensor  # [n, heads, 128 v, 128 k]
    conv: torch.Tensor  # [n, 3, 3*heads*128]

    def step(self, x: Tokens, w: Weights) -> tuple[torch.Tensor, Exact]:
        count, heads = self.state.shape[:2]
        raw = torch.cat([x.q, x.k, x.v], dim=1).double()
        window = torch.cat([self.conv, raw[:, None]], dim=1)
        mixed = F.silu(torch.einsum("njc,cj->nc", window, w.conv_weight.double()))
        q, k, v = mixed.view(count, 3, heads, DIM).unbind(1)
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * DIM**-0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        f = (x.f.double() + w.dt_bias.double()).view(count, heads, DIM)
        g = -5 * torch.sigmoid(w.a_log[:heads].double().exp()[:, None] * f)
        state = self.state * g.exp()[:, :, None]
        delta = torch.sigmoid(x.beta.double())[..., None] * (v - torch.einsum("nhvk,nhk->nhv", state, k))
        state = state + delta[..., None] * k[:, :, None]
        o = torch.einsum("nhvk,nhk->nhv", state, q)
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.o_norm.double()
        o = o * torch.sigmoid(x.gate.double()).view(count, heads, DIM)
        return o.flatten(1), replace(self, state=state, conv=window[:, 1:])


def exact(pool: Pools, slots: torch.Tensor) -> Exact:
    at = slots.long()
    return Exact(pool.state[at].double(), pool.conv[at].double())
