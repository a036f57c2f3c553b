"""RMSNorm over the hidden width, and the gated one over a head's 128 columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernels import eager
from bench.kernels.case import Case, Prepared, Session, Side, relative_error
from kimi_kernels import norm

HIDDEN, HEADS, HEAD = 7168, 96, 128
TOKENS = (1, 16, 256, 8192)


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield Case("norm.rms", {"T": tokens, "H": HIDDEN}, partial(prepare_rms, tokens))
    for tokens in TOKENS:
        yield Case("norm.rms_gated", {"T": tokens, "heads": HEADS, "H": HEAD}, partial(prepare_gated, tokens))


def prepare_rms(tokens: int, session: Session) -> Prepared:
    one = 2 * tokens * HIDDEN
    xs = [session.randn(tokens, HIDDEN, key=i) for i in range(session.num_sets(2 * one))]
    weight = session.randn(HIDDEN, scale=0.2, key="weight").add_(1)
    outs = [torch.full_like(x, torch.nan) for x in xs]  # NaN: what is not written cannot pass the check
    want = eager.rms_norm(xs[0].double(), weight)

    def their_calls() -> list:
        kit = session.kit.peers
        return [partial(kit.vllm_rms_norm, x, weight, torch.full_like(x, torch.nan)) for x in xs]

    def their_error() -> float:
        return relative_error(session.kit.peers.vllm_rms_norm(xs[0], weight, torch.full_like(xs[0], torch.nan)), want)

    return Prepared(
        Side(
            "ours",
            lambda: [partial(norm.rms, x, weight, out=out) for x, out in zip(xs, outs, strict=True)],
            lambda: relative_error(norm.rms(xs[0], weight, out=outs[0]), want),
        ),
        [
            Side("vLLM rms_norm", their_calls, their_error),
            Side("torch eager", lambda: [partial(eager.rms_norm, x, weight) for x in xs]),
        ],
        read_bytes=one,
        write_bytes=one,
    )


def prepare_gated(tokens: int, session: Session) -> Prepared:
    one = 2 * tokens * HEADS * HEAD
    count = session.num_sets(3 * one)
    xs = [session.randn(tokens, HEADS * HEAD, key=("x", i)) for i in range(count)]
    gates = [session.randn(tokens, HEADS * HEAD, key=("gate", i)) for i in range(count)]
    outs = [torch.full_like(x, torch.nan) for x in xs]
    weight = session.randn(HEAD, dtype=torch.float32, scale=0.2, key="weight").add_(1)

    def plain(x: Tensor, gate: Tensor) -> Tensor:
        """[T, heads * 128] -> the same; each head is normed by itself."""
        by_head = (HEADS, HEAD)
        return eager.rms_norm_gated(x.unflatten(-1, by_head), gate.unflatten(-1, by_head), weight).flatten(-2)

    def ours(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
        return norm.rms_gated(x, gate, weight, out=out)

    return Prepared(
        Side(
            "ours",
            lambda: [partial(ours, *tensors) for tensors in zip(xs, gates, outs, strict=True)],
            lambda: relative_error(ours(xs[0], gates[0], outs[0]), plain(xs[0].double(), gates[0].double())),
        ),
        [Side("torch eager", lambda: [partial(plain, *pair) for pair in zip(xs, gates, strict=True)])],
        read_bytes=2 * one,
        write_bytes=one,
    )
