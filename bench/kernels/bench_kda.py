"""KDA decode, one token a sequence, and verify of a run, at the 96 heads of one GPU and the 12 of a TP8 rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernels import quoted
from bench.kernels.case import Case, Prepared, Session, Side, relative_error
from kimi_kernels import kda

D = 128
HEADS = (12, 96)
BATCHES = (1, 4, 16, 64, 256)
RUN = kda.MAX_RUN  # a token and eight drafts
INPUT_SETS = 4
ALL = slice(None)
VERIFY_LIMIT = 2.2  # a run of nine with its commit may take this many times as long as one decode step of its sequences


def cases() -> Iterator[Case]:
    for heads in HEADS:
        for batch in BATCHES:
            yield Case("kda.decode_", {"H": heads, "B": batch}, partial(prepare_decode, heads, batch))
    for heads in HEADS:
        yield Case("kda.verify", {"H": heads, "B": 16, "run": RUN, "accepted": RUN}, partial(prepare_verify, heads, 16))


class Problem:
    """One layer's weights, pools with a set of slots for every buffer set, and inputs as slices of one projection."""

    def __init__(self, session: Session, heads: int, batch: int, tokens: int, sets: int) -> None:
        self.heads, self.batch, self.width = heads, batch, heads * D
        width, f32 = self.width, torch.float32
        columns = 4 * width + D + heads + -(D + heads) % 16  # q, k, v, output gate, f_a, beta
        self.fused = [session.randn(tokens, columns, key=("fused", i)) for i in range(INPUT_SETS)]
        self.forget = [session.randn(tokens, width, key=("forget", i)) for i in range(INPUT_SETS)]
        self.conv_weight = session.randn(3, width, 4, dtype=f32, scale=0.3, key="conv")
        self.a_log = session.randn(heads, dtype=f32, scale=0.5, key="a_log")
        self.dt_bias = session.randn(width, dtype=f32, scale=0.5, key="dt_bias")
        self.o_norm = session.randn(D, dtype=f32, scale=0.2, key="o_norm").add_(1)
        generator = session.generator("state")
        self.state = torch.empty(sets * batch + 1, heads, D, D, device=session.device)
        self.state.normal_(0, 0.3, generator=generator)
        self.conv = session.randn(sets * batch + 1, 3, 3 * width, key="conv_state")
        order = torch.randperm(sets * batch, generator=generator, device=session.device)
        self.slots = (order.int() + 1).view(sets, batch)

    def piece(self, index: int, first: int, columns: int) -> Tensor:
        return self.fused[index % INPUT_SETS][:, first : first + columns]

    def beta(self, index: int) -> Tensor:
        return self.piece(index, 4 * self.width + D, self.heads)

    def output_gate(self, index: int) -> Tensor:
        return self.piece(index, 3 * self.width, self.width)

    def arguments(self, index: int, rows: slice = ALL) -> tuple[Tensor, ...]:
        qkv = (self.piece(index, i * self.width, self.width)[rows] for i in range(3))
        weights = (self.conv_weight.view(-1, 4), self.a_log, self.dt_bias, self.o_norm)
        gates = (self.forget[index % INPUT_SETS][rows], self.beta(index)[rows], self.output_gate(index)[rows])
        return (*qkv, *gates, *weights, self.state, self.conv, self.slots[index])

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Copies of the state and the convolution rows of this set's sequences."""
        at = self.slots[index].long()
        return self.state[at], self.conv[at]

    def exact(self, index: int, state: Tensor, conv: Tensor, rows: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Output, state and convolution rows after one token of each sequence, `rows` of the inputs, in fp32 torch:
        written out here so that no kernel's code is in it."""
        shape = (self.batch, self.heads, D)
        raw = self.piece(index, 0, 3 * self.width)[rows]
        window = torch.cat([conv, raw[:, None]], dim=1)
        weight = self.conv_weight.view(-1, 4)
        mixed = torch.nn.functional.silu(torch.einsum("bjc,cj->bc", window.float(), weight))
        q, k, v = mixed.view(self.batch, 3, self.heads, D).unbind(1)
        q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * D**-0.5
        k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        forget = self.forget[index % INPUT_SETS][rows].float() + self.dt_bias
        g = -5 * torch.sigmoid(self.a_log.exp()[:, None] * forget.view(shape))
        state = state * g.exp()[:, :, None]
        delta = torch.sigmoid(self.beta(index)[rows].float())[..., None] * (v - (state * k[:, :, None]).sum(-1))
        state += delta[..., None] * k[:, :, None]
        o = (state * q[:, :, None]).sum(-1)
        o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.o_norm
        o = o * torch.sigmoid(self.output_gate(index)[rows].float()).view(shape)
        return o.flatten(1), state, window[:, 1:]


def prepare_decode(heads: int, batch: int, session: Session) -> Prepared:
    state_bytes = heads * D * D * 4
    sets = session.num_sets(batch * state_bytes, highest=256)
    problem = Problem(session, heads, batch, batch, sets)
    out = torch.full((batch, heads * D), torch.nan, device=session.device, dtype=torch.bfloat16)
    their_weight = problem.conv_weight.transpose(1, 2).contiguous()

    def ours(index: int) -> Tensor:
        return kda.decode_(*problem.arguments(index))

    def vllm(index: int) -> Tensor:
        shape = (batch, heads, D)
        x, forget = problem.piece(index, 0, 3 * heads * D), problem.forget[index % INPUT_SETS].view(1, *shape)
        session.kit.peers.vllm_kda_decode(
            x, their_weight, problem.conv, forget, problem.beta(index)[None], problem.a_log, problem.dt_bias,
            problem.slots[index], problem.state, problem.output_gate(index).view(shape), problem.o_norm,
            out=out.view(1, *shape),
        )  # fmt: skip
        return out

    def vllm_calls() -> list:
        _ = session.kit.peers  # MissingPeerError when it is not packed
        return [partial(vllm, i) for i in range(sets)]

    def error(run: object) -> float:
        want = problem.exact(0, *problem.states(0))
        out.fill_(torch.nan)
        got = run(0)  # type: ignore[operator]
        return max(relative_error(g, w) for g, w in zip((got, *problem.states(0)), want, strict=True))

    qkvg = [session.randn(batch, 1, heads, D, key=("fla", i)) for i in range(4)]
    beta = session.randn(batch, 1, heads, key="fla beta")
    states = problem.state[1:].view(sets, batch, heads, D, D)

    def fla_calls() -> list:
        call = session.kit.peers.fla_kda_decode
        rows = out.view(batch, 1, heads, D)
        return [partial(call, *qkvg, beta, problem.a_log, problem.dt_bias, s, rows) for s in states]

    small = batch * (2 * 3 * 3 * heads * D + 2 * heads * D + 2 * heads)  # conv state and output, both ways about equal
    return Prepared(
        Side("ours", lambda: [partial(ours, i) for i in range(sets)], lambda: error(ours)),
        [
            Side(
                "vLLM fused_kda_decode", vllm_calls, lambda: error(vllm),
                quoted_us=quoted.FUSED_KDA_DECODE.get((heads, batch)),
            ),
            Side(
                "fla fused_recurrent_kda", fla_calls, comparable=False, note="recurrence only, not checked here",
                quoted_us=quoted.FLA_RECURRENCE.get((heads, batch)),
            ),
        ],
        read_bytes=batch * (state_bytes + 2 * 5 * heads * D) + small + 4 * 12 * heads * D,
        write_bytes=batch * state_bytes + small,
        in_place=True,
    )  # fmt: skip


def prepare_verify(heads: int, batch: int, session: Session) -> Prepared:
    """Speculation running steadily: the last run, all of it accepted, is committed in the pass of the next."""
    state_bytes, record_bytes = heads * D * D * 4, RUN * heads * kda.reference.RECORD_ROWS * D * 4
    sets = session.num_sets(batch * (state_bytes + record_bytes))
    problem = Problem(session, heads, batch, batch * RUN, sets)
    records = torch.zeros(sets * batch + 1, *kda.record_shape(heads, RUN), device=session.device)
    borders = torch.arange(0, batch * RUN + 1, RUN, device=session.device, dtype=torch.int32)
    accepted = torch.full((batch,), RUN, device=session.device, dtype=torch.int32)

    def ours(index: int) -> Tensor:
        return kda.verify(*problem.arguments(index), borders, records=records, accepted=accepted)[0]

    def one_token(index: int) -> Tensor:
        return kda.decode_(*problem.arguments(index, slice(batch)))

    def error() -> float:
        states, wanted = problem.states(0), []
        for token in range(RUN):
            out, *states = problem.exact(0, *states, slice(token, None, RUN))
            wanted.append(out)
        fresh_records = torch.full_like(records, torch.nan)
        got = kda.verify(*problem.arguments(0), borders, records=fresh_records)[0]
        kda.commit_(fresh_records, problem.state, problem.conv, problem.slots[0], accepted)
        pairs = zip((got, *problem.states(0)), (torch.stack(wanted, dim=1).flatten(0, 1), *states), strict=True)
        return max(relative_error(g, w) for g, w in pairs)

    rows = batch * RUN * 2 * heads * D
    replayed = (3 * RUN + 3 * 3) * heads * D * 4  # decay, k, error of each token; three raw rows of q, k, v
    conv_bytes = 3 * 3 * heads * D * 2
    return Prepared(
        Side("ours", lambda: [partial(ours, i) for i in range(sets)], error),
        [
            Side(
                "ours, kda.decode_", lambda: [partial(one_token, i) for i in range(sets)], comparable=False,
                note="one token of the same sequences", limit=VERIFY_LIMIT,
            )
        ],
        read_bytes=batch * (state_bytes + replayed) + 5 * rows,
        write_bytes=batch * (state_bytes + record_bytes + conv_bytes) + rows,
        in_place=True,
    )  # fmt: skip
