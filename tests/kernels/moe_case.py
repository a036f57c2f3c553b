"""Random experts in each weight format, routed tokens, and the experts written once more in fp64."""

from __future__ import annotations

import torch

from kimi_kernels import moe, quant

FORMATS = ("mxfp4", "fp8", "bf16")
EXPERTS, INNER, WIDTH, TOP_K = 6, 96, 160, 3
# fp32 sums over 160 and 96 products of size up to 100 a token
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def raw_weights(fmt: str, experts: int = EXPERTS, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Arguments of the pack function of ``fmt``."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int) -> tuple[torch.Tensor, ...]:
        if fmt == "mxfp4":
            data = torch.randint(0, 256, (experts, rows, cols // 2), generator=generator, dtype=torch.uint8)
            # each group has its own scale, so that a shifted one shows
            return data, torch.randint(122, 126, (experts, rows, cols // 32), generator=generator, dtype=torch.uint8)
        values = torch.randn(experts, rows, cols, generator=generator)
        if fmt == "bf16":
            return ((values * 0.1).bfloat16(),)
        scale = torch.rand(experts, -(-rows // 128), -(-cols // 128), generator=generator) * 0.1 + 0.01
        return values.to(torch.float8_e4m3fn), scale

    return *matrix(INNER, WIDTH), *matrix(INNER, WIDTH), *matrix(WIDTH, INNER)


def pack(fmt: str, weights: tuple[torch.Tensor, ...]) -> tuple[moe.ExpertWeights, moe.ExpertWeights]:
    return {"mxfp4": moe.pack_mxfp4, "fp8": moe.pack_fp8, "bf16": moe.pack_bf16}[fmt](*weights)


def dense_weights(fmt: str, weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """w1, w3, w2 as numbers, fp64 [experts, N, K]."""
    if fmt == "bf16":
        return [w.double() for w in weights]
    dense = []
    for data, scale in zip(weights[::2], weights[1::2], strict=True):
        if fmt == "mxfp4":
            dense.append(quant.mxfp4_dequant(data, scale, out_dtype=torch.float32).double())
            continue
        spread = scale.repeat_interleave(128, 1)[:, : data.shape[1]].repeat_interleave(128, 2)[:, :, : data.shape[2]]
        dense.append(data.double() * spread.double())
    return dense


def situ64(a: torch.Tensor, u: torch.Tensor, beta: float = 4.0, linear_beta: float | None = 25.0) -> torch.Tensor:
    u = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return beta * torch.tanh(a / beta) * torch.sigmoid(a) * u


def experts64(x, ids, weights, dense, **situ) -> torch.Tensor:
    """K3 spec section 8 for each token and choice by itself, in fp64."""
    w1, w3, w2 = dense
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j, e in enumerate(ids[t].tolist()):
            if e >= 0:
                h = situ64(w1[e] @ x[t].double(), w3[e] @ x[t].double(), **situ)
                out[t] += weights[t, j].double() * (w2[e] @ h)
    return out


def routed(tokens: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=generator)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)] or [torch.zeros(TOP_K)]
    )[:tokens]
    return x, ids.int(), torch.rand(tokens, TOP_K, generator=generator)
