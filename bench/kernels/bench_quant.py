"""Quantisation of activations: E4M3 with one fp32 scale per 128 columns, and MXFP8 (one E8M0 scale per 32)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernels import eager
from bench.kernels.case import Case, Prepared, Session, Side, relative_error
from kimi_kernels import quant

LATENT = 3584
TOKENS = (1, 16, 256, 8192)


def cases() -> Iterator[Case]:
    for operation, group in (("quant.fp8_per_token_group", 128), ("quant.mxfp8", 32)):
        for tokens in TOKENS:
            shape = {"T": tokens, "C": LATENT, "group": group}
            yield Case(operation, shape, partial(prepare, tokens, group))


def dequantise(q: Tensor, scale: Tensor, group: int) -> Tensor:
    if scale.dtype == torch.uint8:  # E8M0: the exponent of a power of two
        scale = torch.exp2(scale.float() - 127)
    values = q.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, group))
    return (values * scale.float().unsqueeze(-1)).flatten(-2)


def prepare(tokens: int, group: int, session: Session) -> Prepared:
    read, written = 2 * tokens * LATENT, tokens * (LATENT + LATENT // group * (4 if group == 128 else 1))
    xs = [session.randn(tokens, LATENT, key=i) for i in range(session.num_sets(read + written))]
    ours = quant.fp8_per_token_group if group == 128 else quant.mxfp8

    def error_of(result: tuple[Tensor, ...]) -> float:
        return relative_error(dequantise(result[0], result[1], group), xs[0])

    peers = []
    if group == 128:
        peers = [
            Side(
                "vLLM per_token_group_fp8_quant",
                lambda: [partial(session.kit.peers_moe.quantise_groups, x) for x in xs],
                lambda: error_of(session.kit.peers_moe.quantise_groups(xs[0])),
                tolerance=4e-2,
            )
        ]
    return Prepared(
        # Against the input itself: rounding to E4M3's 3 mantissa bits alone is 2.6e-2 on normal numbers.
        Side("ours", lambda: [partial(ours, x) for x in xs], lambda: error_of(ours(xs[0])), tolerance=4e-2),
        [*peers, Side("torch eager", lambda: [partial(eager_quantise, x, group) for x in xs])],
        read_bytes=read,
        write_bytes=written,
    )


def eager_quantise(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return eager.fp8_per_token_group(x, group) if group == 128 else eager.mxfp8(x)
