"""The end of the experts: a token's 16 rows, weighed and summed, with and without the latent RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernels import eager
from bench.kernels.case import Case, Prepared, Session, Side, relative_error
from kimi_kernels import moe

LATENT, TOP_K = 3584, 16
TOKENS = (1, 16, 256, 8192)


def cases() -> Iterator[Case]:
    for normed in (0, 1):
        for tokens in TOKENS:
            shape = {"T": tokens, "k": TOP_K, "D": LATENT, "norm": normed}
            yield Case("moe.finalize", shape, partial(prepare, tokens, bool(normed)))


def prepare(tokens: int, normed: bool, session: Session) -> Prepared:
    read = tokens * TOP_K * (2 * LATENT + 8)
    count = session.num_sets(read, highest=16)
    rows = [session.randn(tokens * TOP_K, LATENT, key=i) for i in range(count)]
    weights = session.randn(tokens, TOP_K, dtype=torch.float32, key="weights").softmax(-1)
    index = torch.arange(tokens * TOP_K, dtype=torch.int32, device=session.device).view(tokens, TOP_K)
    norm_weight = session.randn(LATENT, scale=0.2, key="norm").add_(1) if normed else None
    out = torch.full((tokens, LATENT), torch.nan, dtype=torch.bfloat16, device=session.device)

    def ours(x: Tensor) -> Tensor:
        return moe.finalize(x, index, weights, norm_weight)

    def theirs(x: Tensor) -> Tensor:
        grid_kernel = session.kit.peers.module("vllm_fused_moe").moe_fused_mul_sum_kernel[(tokens,)]
        grid_kernel(
            x, weights, out, index, None, None, TOP_K * LATENT, True, False, False, TOP_K, LATENT, 4096,
            num_warps=16, num_stages=3,
        )  # fmt: skip
        return out

    def plain(x: Tensor) -> Tensor:
        return eager.finalize(x, index, weights, norm_weight)

    want = plain(rows[0].float())

    def their_calls() -> list:
        _ = session.kit.peers
        return [partial(theirs, x) for x in rows]

    without = [Side("vLLM moe_fused_mul_sum (Triton)", their_calls, lambda: relative_error(theirs(rows[0]), want))]
    return Prepared(
        Side("ours", lambda: [partial(ours, x) for x in rows], lambda: relative_error(ours(rows[0]), want)),
        [*([] if normed else without), Side("torch eager", lambda: [partial(plain, x) for x in rows])],
        read_bytes=read,
        write_bytes=2 * tokens * LATENT,
    )
