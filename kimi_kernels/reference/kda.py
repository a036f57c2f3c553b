"""KDA (K3 spec section 5): the parts that every form shares, one-token decode, runs that are verified before commit.

``Inputs`` is what the public functions take, unchanged; ``Tokens`` is what the recurrence takes: fp32, normalised,
gates applied. The state is [slots, heads, 128 v, 128 k].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kimi_kernels.reference.norm import rms_gated

DIM = 128
TAPS = 4  # convolution width; the state keeps TAPS - 1 raw rows
# Rows of a record, each [128] f32 a head: what a commit needs to repeat a token's update to the bit.
RECORD_DECAY, RECORD_K, RECORD_DELTA, RECORD_RAW = 0, 1, 2, slice(3, 6)
RECORD_ROWS = 6


@dataclass(frozen=True, slots=True)
class Inputs:
    q: torch.Tensor  # [T, heads*128] raw, as k and v
    k: torch.Tensor
    v: torch.Tensor
    f: torch.Tensor  # [T, heads*128] raw forget gate
    beta: torch.Tensor  # [T, heads] raw
    gate: torch.Tensor  # [T, heads*128] raw output gate
    conv_weight: torch.Tensor  # [3*heads*128, 4]
    a_log: torch.Tensor  # [>= heads]
    dt_bias: torch.Tensor  # [heads*128]
    o_norm: torch.Tensor  # [128]
    lower_bound: float
    eps: float

    @property
    def heads(self) -> int:
        return self.beta.shape[1]

    def raw(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """[R, 3*heads*128] before the convolution, in the activation dtype."""
        return torch.cat([self.q[rows], self.k[rows], self.v[rows]], dim=-1)


@dataclass(frozen=True, slots=True)
class Tokens:
    q: torch.Tensor  # [R, heads, 128] unit length times 128^-0.5
    k: torch.Tensor  # [R, heads, 128] unit length
    v: torch.Tensor  # [R, heads, 128]
    g: torch.Tensor  # [R, heads, 128] log of the decay, lower_bound < g < 0
    beta: torch.Tensor  # [R, heads] in (0, 1)


def convolve(window: list[torch.Tensor], x: Inputs) -> torch.Tensor:
    """Four raw rows [R, 3*heads*128], oldest first -> SiLU of the weighted sum in fp32, not rounded."""
    weight = x.conv_weight
    total = window[0].float() * weight[:, 0]
    for tap in range(1, TAPS):
        total.addcmul_(window[tap].float(), weight[:, tap])
    return F.silu(total, inplace=True)


def tokens(mixed: torch.Tensor, x: Inputs, rows: torch.Tensor | slice = slice(None)) -> Tokens:
    """Convolved [R, 3*heads*128] and the gates of the same rows of x -> what the recurrence takes."""
    heads = x.heads
    q, k, v = mixed.unflatten(-1, (3, heads, DIM)).unbind(1)  # [R, heads, 128]
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * DIM**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    f = (x.f[rows].float() + x.dt_bias).unflatten(-1, (heads, DIM))
    g = x.lower_bound * torch.sigmoid(x.a_log[:heads].exp().unsqueeze(-1) * f)
    return Tokens(q, k, v, g, torch.sigmoid(x.beta[rows].float()))


def finish(o: torch.Tensor, x: Inputs, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """o f32 [R, heads, 128] -> gated RMSNorm per head, [R, heads*128] in the activation dtype."""
    return rms_gated(o.flatten(1), x.gate[rows], x.o_norm, x.eps).to(x.q.dtype)


def predict(state: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """state [..., v, k], k [..., k] -> [..., v]."""
    return torch.matmul(k.unsqueeze(-2), state.transpose(-1, -2)).squeeze(-2)


def write_(state: torch.Tensor, k: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """state [n, heads, v, k], in place: + delta [n, heads, v] k^T."""
    return state.addcmul_(delta.unsqueeze(-1), k.unsqueeze(-2))


def decay_(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """state [n, heads, v, k] times decay [n, heads, k], in place."""
    return state.mul_(decay.unsqueeze(-2))


def step_(state: torch.Tensor, t: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of n sequences, token by token form; state [n, heads, v, k] is changed. -> (o, decay, delta)."""
    decay = t.g.exp()
    error = t.v - predict(decay_(state, decay), t.k)
    delta = t.beta.unsqueeze(-1) * error
    return predict(write_(state, t.k, delta), t.q), decay, delta


def load(
    state: torch.Tensor, conv_state: torch.Tensor, slots: torch.Tensor, fresh: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """States of slots [n]: f32 [n, heads, v, k], conv [n, 3, C]; zero where fresh, by selection: NaN is harmless."""
    current, conv = state.index_select(0, slots), conv_state.index_select(0, slots)  # copies
    if fresh is not None:
        current.masked_fill_(fresh[:, None, None, None], 0.0)
        conv.masked_fill_(fresh[:, None, None], 0.0)
    return current, conv


def shift(conv: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """conv [n, 3, C], raw [n, C] -> the three newest rows [n, 3, C]."""
    return torch.cat([conv[:, 1:], raw.to(conv.dtype).unsqueeze(1)], dim=1)


def live_rows(slots: torch.Tensor, num_tokens: torch.Tensor | None) -> torch.Tensor:
    """Rows of a decode batch that are not padding."""
    live = slots > 0
    if num_tokens is not None:
        live = live & (torch.arange(slots.shape[0], device=slots.device) < num_tokens)
    return live.nonzero().squeeze(1)


def decode(
    x: Inputs,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    records: torch.Tensor | None,
    accepted: torch.Tensor | None,
) -> torch.Tensor:
    """One token for each row -> [T, heads*128]; both states are changed in place, padding rows give 0."""
    rows = live_rows(slots, num_tokens)
    where = slots[rows].long()
    fresh_rows = None if fresh is None else fresh[rows]
    current, conv = load(state, conv_state, where, fresh_rows)
    if records is not None and accepted is not None:
        current, conv = replay(records[where], current, conv, counts(accepted[rows], fresh_rows))
    raw = x.raw(rows)
    t = tokens(convolve([*conv.unbind(1), raw], x), x, rows)
    o, _, _ = step_(current, t)
    state.index_copy_(0, where, current)
    conv_state.index_copy_(0, where, shift(conv, raw))
    out = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
    out[rows] = finish(o, x, rows)
    return out


def counts(accepted: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
    """A fresh sequence has no earlier run, whatever ``accepted`` says."""
    return accepted if fresh is None else accepted.masked_fill(fresh, 0)


def replay(
    records: torch.Tensor, current: torch.Tensor, conv: torch.Tensor, accepted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat the first accepted [n] tokens of records [n, heads, 6, run, 128], with the operations of ``step_``."""
    longest = int(accepted.max()) if accepted.numel() else 0
    for token in range(min(longest, records.shape[3])):
        rows = (accepted > token).nonzero().squeeze(1)
        record = records[rows, :, :, token]  # [r, heads, 6, 128]
        decay, k, delta = (record[:, :, i] for i in (RECORD_DECAY, RECORD_K, RECORD_DELTA))
        current[rows] = write_(decay_(current[rows], decay), k, delta)
        raw = record[:, :, RECORD_RAW].transpose(1, 2).flatten(1)  # [r, 3*heads*128]
        conv[rows] = shift(conv[rows], raw)
    return current, conv


def commit(
    records: torch.Tensor, state: torch.Tensor, conv_state: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor
) -> None:
    """Apply the first accepted tokens of each slot's last run to the two states, in place."""
    rows = ((slots > 0) & (accepted > 0)).nonzero().squeeze(1)
    where = slots[rows].long()
    current, conv = load(state, conv_state, where, None)
    current, conv = replay(records[where], current, conv, accepted[rows])
    state.index_copy_(0, where, current)
    conv_state.index_copy_(0, where, conv)


def verify(
    x: Inputs,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    fresh: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    records: torch.Tensor,
    accepted: torch.Tensor | None,
) -> torch.Tensor:
    """Short runs of n sequences -> [T, heads*128]; fills records, commits only the run before (``accepted``).

    A fresh sequence's slot is made to hold zeros.
    """
    if accepted is not None:
        # A fresh slot has nothing to commit, and its content is not to be read.
        commit(records, state, conv_state, slots, counts(accepted, fresh))
    starts, stops = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if num_tokens is not None:
        stops = stops.minimum(num_tokens.long())
    lengths = torch.where(slots > 0, stops - starts, 0)
    out = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
    live = (lengths > 0).nonzero().squeeze(1)
    if fresh is not None:  # a later commit must find the zeros that this run starts from
        started = slots[live[fresh[live]]].long()
        state[started], conv_state[started] = 0.0, 0.0
    current, conv = load(state, conv_state, slots[live].long(), None)
    for token in range(int(lengths.max()) if lengths.numel() else 0):
        keep = lengths[live] > token
        live, current, conv = live[keep], current[keep], conv[keep]
        rows = starts[live] + token
        raw = x.raw(rows)
        t = tokens(convolve([*conv.unbind(1), raw], x), x, rows)
        o, decay, delta = step_(current, t)
        conv = shift(conv, raw)
        record = torch.stack([decay, t.k, delta, *raw.float().unflatten(-1, (3, x.heads, DIM)).unbind(1)], dim=2)
        records[slots[live].long(), :, :, token] = record
        out[rows] = finish(o, x, rows)
    return out


def zero(state: torch.Tensor, conv_state: torch.Tensor, slots: torch.Tensor) -> None:
    where = slots[slots > 0].long()
    state[where] = 0.0
    conv_state[where] = 0.0


def copy(state: torch.Tensor, conv_state: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    live = (src > 0) & (dst > 0)
    source, target = src[live].long(), dst[live].long()
    state[target] = state[source]
    conv_state[target] = conv_state[source]
