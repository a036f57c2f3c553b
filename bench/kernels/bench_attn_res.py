"""Attention Residual: residual add, softmax over nine sources, weighted sum, the RMSNorm that follows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernels import eager, quoted
from bench.kernels.case import Case, Prepared, Session, Side, relative_error
from kimi_kernels import attn_res

HIDDEN, BLOCKS = 7168, 8
TOKENS = (1, 16, 64, 256, 1024, 8192)


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        shape = {"T": tokens, "sources": BLOCKS + 1, "H": HIDDEN}
        yield Case("attn_res.mix", shape, partial(prepare, tokens))


def prepare(tokens: int, session: Session) -> Prepared:
    one = 2 * tokens * HIDDEN
    count = session.num_sets((BLOCKS + 4) * one, highest=16)
    blocks = [session.randn(BLOCKS, tokens, HIDDEN, key=i) for i in range(count)]
    partials = [session.randn(tokens, HIDDEN, key=("partial", i)) for i in range(count)]
    deltas = [session.randn(tokens, HIDDEN, key=("delta", i)) for i in range(count)]
    norm_weight = session.randn(HIDDEN, scale=0.2, key="norm").add_(1)
    proj_weight = session.randn(HIDDEN, scale=0.03, key="proj")
    out_norm_weight = session.randn(HIDDEN, scale=0.2, key="out_norm").add_(1)
    weights = (norm_weight, proj_weight, out_norm_weight)

    def want() -> tuple[Tensor, Tensor]:
        total = partials[0] + deltas[0]  # bf16: the sum is a source after it was rounded
        zero = torch.zeros_like(total, dtype=torch.float32)
        return total, eager.attn_res(blocks[0].float(), total.float(), zero, *(w.float() for w in weights))[1]

    wanted = want()

    def error_of(got: tuple[Tensor, Tensor]) -> float:
        return max(relative_error(g, w) for g, w in zip(got, wanted, strict=True))

    def our_calls() -> list:
        # Outputs are given, as the engine gives them; full of NaN, so that what is not written cannot pass the check.
        outs = [torch.full((2, tokens, HIDDEN), torch.nan, dtype=torch.bfloat16, device=session.device) for _ in blocks]
        calls = []
        for b, p, d, out in zip(blocks, partials, deltas, outs, strict=True):
            calls.append(partial(attn_res.mix, b, p, d, *weights, partial_out=out[0], x_out=out[1]))
        made["ours"] = calls[0]
        return calls

    def their_calls() -> list:
        kit = session.kit.peers
        calls = []
        for b, p, d in zip(blocks, partials, deltas, strict=True):
            prefix, by_token = p.clone(), b.transpose(0, 1).contiguous()  # its own layout; the prefix is changed
            out = torch.full_like(p, torch.nan)
            call = partial(kit.vllm_attn_res, prefix, d, by_token, *weights, out)
            calls.append(call)
            made.setdefault("prefix", prefix)
            made.setdefault("theirs", call)
        return calls

    made: dict = {}

    def their_error() -> float:
        x = made["theirs"]()
        return error_of((made["prefix"], x))

    return Prepared(
        Side("ours", our_calls, lambda: error_of(made["ours"]())),
        [
            Side("vLLM attn_res (Triton)", their_calls, their_error, quoted_us=quoted.ATTN_RES.get(tokens)),
            Side(
                "torch eager",
                lambda: [
                    partial(eager.attn_res, b, p, d, *weights) for b, p, d in zip(blocks, partials, deltas, strict=True)
                ],
            ),
        ],
        read_bytes=(BLOCKS + 2) * one,
        write_bytes=2 * one,
    )
