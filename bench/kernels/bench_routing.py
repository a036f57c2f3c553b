"""Routing: 16 of 896 experts per token, then counts, offsets and the order of the pairs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernels import eager, quoted
from bench.kernels.case import Case, Prepared, Session, Side, relative_error
from kimi_kernels import routing

EXPERTS, TOP_K = 896, 16
TOKENS = (1, 16, 64, 256, 1024, 8192)
SEGMENT = 16  # rows per block of vLLM's alignment, its choice at decode sizes


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield Case("routing.topk", {"T": tokens, "E": EXPERTS, "k": TOP_K}, partial(prepare_topk, tokens))
    for tokens in TOKENS:
        yield Case("routing.dispatch", {"T": tokens, "E": EXPERTS, "k": TOP_K}, partial(prepare_dispatch, tokens))


def prepare_topk(tokens: int, session: Session) -> Prepared:
    read, written = 4 * tokens * EXPERTS, 8 * tokens * TOP_K
    count = session.num_sets(read + written)
    logits = [session.randn(tokens, EXPERTS, dtype=torch.float32, key=i) for i in range(count)]
    bias = session.randn(EXPERTS, dtype=torch.float32, scale=0.1, key="bias")

    def dense(ids: Tensor, weights: Tensor) -> Tensor:
        """The weights at their experts, 0 elsewhere: equal whatever the order of the chosen ones."""
        return torch.zeros(tokens, EXPERTS, device=session.device).scatter_(1, ids.long(), weights.float())

    want = dense(*eager.topk(logits[0].double(), bias.double(), TOP_K))

    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        return routing.topk(x, bias, TOP_K)

    def theirs(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = session.kit.peers.vllm_grouped_topk(x, bias, TOP_K)
        return ids, weights

    def their_calls() -> list:
        _ = session.kit.peers  # a missing kit is seen here, not in the first timed call
        return [partial(theirs, x) for x in logits]

    return Prepared(
        Side(
            "ours",
            lambda: [partial(ours, x) for x in logits],
            lambda: relative_error(dense(*ours(logits[0])), want),
            tolerance=1e-5,  # fp32 sigmoid and one division: a few 1e-7
        ),
        [
            Side(
                "vLLM grouped_topk",
                their_calls,
                lambda: relative_error(dense(*theirs(logits[0])), want),
                tolerance=1e-5,
                quoted_us=quoted.GROUPED_TOPK.get(tokens),
            ),
            Side("torch eager", lambda: [partial(eager.topk, x, bias, TOP_K) for x in logits]),
        ],
        read_bytes=read,
        write_bytes=written,
    )


def prepare_dispatch(tokens: int, session: Session) -> Prepared:
    pairs = tokens * TOP_K
    read, written = 4 * pairs, 4 * pairs + 8 * EXPERTS  # ids in; the order of the pairs, counts and offsets out
    generators = [session.generator("ids", tokens, i) for i in range(session.num_sets(read + written, highest=16))]
    ids = [
        torch.rand(tokens, EXPERTS, device=session.device, generator=g).topk(TOP_K).indices.int().contiguous()
        for g in generators
    ]

    def error() -> float:
        """0 when the order is the stable one and every count fits, else 1: integers are right or wrong."""
        got = routing.dispatch(ids[0], EXPERTS)
        counts, offsets, order = eager.dispatch(ids[0], EXPERTS)
        expected = ((got.counts, counts), (got.offsets, offsets), (got.pairs, order))
        return 0.0 if all(torch.equal(mine.long(), want) for mine, want in expected) else 1.0

    def their_calls() -> list:
        return [partial(session.kit.peers_moe.align, x, SEGMENT, None) for x in ids]

    note = f"pairs grouped into blocks of {SEGMENT}, block experts; no counts, no offsets"
    return Prepared(
        Side("ours", lambda: [partial(routing.dispatch, x, EXPERTS) for x in ids], error, tolerance=0.0),
        [
            Side("vLLM moe_align_block_size", their_calls, note=note),
            Side("torch eager", lambda: [partial(eager.dispatch, x, EXPERTS) for x in ids]),
        ],
        read_bytes=read,
        write_bytes=written,
    )
