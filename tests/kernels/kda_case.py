"""Random KDA inputs, and the layer written once more from K3 spec section 5 in fp64, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kimi_kernels import kda
from kimi_kernels.testing.compare import assert_equal

DIM = 128
# The chunk form and the fp64 recurrence differ by fp32 rounding: states of size 10 over up to some hundred tokens.
ATOL, RTOL = 2e-5, 2e-5


@dataclass
class Case:
    """Inputs of T tokens over ``heads`` heads, constants, and pools of ``slots`` slots with random content."""

    tokens: int
    heads: int = 2
    slots: int = 4
    seed: int = 0
    dtype: torch.dtype = torch.float32
    rows: dict[str, torch.Tensor] = field(init=False)
    consts: dict[str, torch.Tensor] = field(init=False)
    state: torch.Tensor = field(init=False)
    conv_state: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        width = self.heads * DIM
        # v has another scale than q and k, so that a transposed state shows; f spreads the gates over their range
        self.rows = {name: randn(self.tokens, width) for name in ("q", "k", "gate")}
        self.rows |= {"v": randn(self.tokens, width) * 10, "f": randn(self.tokens, width) * 4}
        self.rows |= {"beta": randn(self.tokens, self.heads)}
        self.rows = {name: value.to(self.dtype) for name, value in self.rows.items()}
        a_log = torch.zeros(max(128, self.heads))
        a_log[: self.heads] = randn(self.heads) * 0.5
        self.consts = {
            "conv_weight": randn(3 * width, 4) * 0.5,
            "a_log": a_log,
            "dt_bias": randn(width),
            "o_norm": 1 + 0.3 * randn(DIM),
        }
        self.state = randn(self.slots, self.heads, DIM, DIM)
        self.conv_state = randn(self.slots, 3, 3 * width).to(self.dtype)

    def pools(self) -> dict[str, torch.Tensor]:
        """Copies of the two pools, as keyword arguments."""
        return {"state": self.state.clone(), "conv_state": self.conv_state.clone()}

    def slice(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        return {name: value[start:stop] for name, value in self.rows.items()}

    def prefill(self, pools: dict, slots: list[int], lengths: list[int], start: int = 0, **options) -> torch.Tensor:
        rows = self.slice(start, start + sum(lengths))
        return kda.prefill_(
            **rows, **self.consts, **pools, slots=int32(slots), cu_seqlens=cumulative(lengths), **options
        )

    def decode(self, pools: dict, slots: list[int], start: int, **options) -> torch.Tensor:
        rows = self.slice(start, start + len(slots))
        return kda.decode_(**rows, **self.consts, **pools, slots=int32(slots), **options)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def flags(values: list[bool]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def assert_same_pools(got: dict, want: dict, slots: list[int] | None = None) -> None:
    for name in ("state", "conv_state"):
        pair = (got[name], want[name]) if slots is None else (got[name][slots], want[name][slots])
        assert_equal(name, *pair)


def recurrence64(
    case: Case,
    start: int,
    stop: int,
    state: torch.Tensor,
    conv: torch.Tensor,
    *,
    beta_of: Callable[[torch.Tensor], torch.Tensor] = lambda raw: torch.sigmoid(raw.double()),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens start..stop-1 of one sequence in fp64 -> (out, state [heads, v, k], conv rows [3, C]).

    ``beta_of`` turns the raw write strength into the used one.
    """
    heads, width = case.heads, case.heads * DIM
    c = {name: value.double() for name, value in case.consts.items()}
    s, window, out = state.double(), conv.double(), []
    for t in range(start, stop):
        row = {name: value[t].double() for name, value in case.rows.items()}
        window = torch.cat([window, torch.cat([row["q"], row["k"], row["v"]])[None]])
        mixed = torch.stack([window[j] * c["conv_weight"][:, j] for j in range(4)]).sum(0)
        mixed = mixed * torch.sigmoid(mixed)
        window = window[1:]
        q, k, v = mixed.view(3, heads, DIM)
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) * DIM**-0.5
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        f = (row["f"] + c["dt_bias"]).view(heads, DIM)
        g = -5.0 * torch.sigmoid(torch.exp(c["a_log"][:heads])[:, None] * f)
        beta = beta_of(case.rows["beta"][t]).double()
        o = torch.empty(heads, DIM, dtype=torch.float64)
        for h in range(heads):
            s[h] = s[h] * torch.exp(g[h])[None, :]
            error = v[h] - s[h] @ k[h]
            s[h] = s[h] + torch.outer(beta[h] * error, k[h])
            o[h] = s[h] @ q[h]
        o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-5) * c["o_norm"]
        out.append(o.view(width) * torch.sigmoid(row["gate"]))
    return torch.stack(out), s, window
