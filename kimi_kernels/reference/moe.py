"""The routed experts (K3 spec sections 7 to 9). One expert is dequantised at a time, and only experts that are hit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kimi_kernels.reference import quant
from kimi_kernels.reference.expert_weights import ExpertWeights
from kimi_kernels.reference.norm import rms

# Columns of h whose exponent a warpgroup works out alone: those of 64 neighbours with the same bit 3.
H_GROUP = (4, 2, 8)


def x_as_fed(x: torch.Tensor) -> torch.Tensor:
    """x [T, D] as FP8 activations, in f32: E4M3 with one scale a token, max(amax, 1e-10) / 448."""
    return quant.fp8_groups_dequant(*quant.fp8_per_token_group(x, x.shape[1]), x.shape[1])


def h_as_fed(h: torch.Tensor) -> torch.Tensor:
    """h f32 [R, I] as FP8 activations, in f32: E4M3 with one power of two a row, the smallest that keeps amax in 448.

    No CTA of the kernel sees a whole row. Groups of 32 columns are rounded with a power of two of their own, and their
    codes later brought to the largest of the row: what becomes subnormal (below 2^-14 of the row's maximum) is rounded
    twice.
    """
    groups = F.pad(h, (0, -h.shape[1] % 64)).unflatten(-1, (-1, *H_GROUP))  # [R, blocks of 64, 4, 2, 8]
    exponent = quant.e4m3_exponent(groups.abs().amax((-3, -1), keepdim=True))
    top = exponent.amax((-4, -2), keepdim=True)
    codes = quant.times_power(groups, -exponent).to(torch.float8_e4m3fn).float()
    codes = torch.ldexp(codes, exponent - top).to(torch.float8_e4m3fn).float()
    return quant.times_power(codes, top).flatten(1)[:, : h.shape[1]]


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """beta*tanh(a/beta) * sigmoid(a) * linear_beta*tanh(u/linear_beta); u itself without a linear_beta. fp32."""
    gate, up = gate.float(), up.float()
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def weight(w: ExpertWeights, expert: int) -> torch.Tensor:
    """One expert of a plain layout -> f32 [rows, cols]."""
    data = w.data[expert]
    if w.format == "bf16":
        return data.float()
    assert w.scale is not None
    scale = w.scale[expert]
    if w.format == "mxfp4":
        return quant.mxfp4(data, scale)
    # Gate and up rows were scaled apart: each half starts its own 128-row blocks.
    halves = w.parts
    pairs = zip(data.chunk(halves), scale.chunk(halves), strict=True)
    return torch.cat([quant.fp8_blocks(d, s) for d, s in pairs])


def expert_rows(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    beta: float,
    linear_beta: float | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert on rows x [R, D], with f32 weights w13 [2I, D], w2 [D, I] -> (y f32 [R, D], h f32 [R, I]).

    ``activation`` says how x and h enter the products: "exact" as they are, "bf16" h rounded to bf16 (x is bf16
    already), "fp8" quantised as the kernels do (x_as_fed, h_as_fed), h from fp32.
    The returned h is the value before it is rounded or quantised.
    """
    if activation == "fp8":
        x = x_as_fed(x)
    gate, up = F.linear(x.float(), w13).chunk(2, dim=-1)  # [R, I] each
    h = situ(gate, up, beta, linear_beta)
    if activation == "fp8":
        used = h_as_fed(h)
    elif activation == "bf16":
        used = h.bfloat16().float()
    else:
        used = h
    return F.linear(used, w2), h


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    *,
    activation: str,
    beta: float,
    linear_beta: float | None,
    expert_range: tuple[int, int] | None,
) -> torch.Tensor:
    """x [T, D], ids and weights [T, k] -> fp32 [T, D]: the weighted sum over the chosen experts."""
    first, last = expert_range or (0, w13.num_experts)
    # Weights may hold the range alone or all experts; the ids always count over all.
    base = first if w13.num_experts == last - first else 0
    flat = topk_ids.flatten().long()  # [T*k]
    flat = torch.where((flat >= first) & (flat < last), flat, last)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=last + 1).tolist()
    out = x.new_zeros(x.shape, dtype=torch.float32)
    start = 0
    for expert in range(first, last):
        count = counts[expert]
        if count == 0:
            continue
        pairs = order[start : start + count]  # flat positions token*k + j, ascending
        start += count
        token = pairs // topk_ids.shape[1]
        y, _ = expert_rows(
            x[token],
            weight(w13, expert - base),
            weight(w2, expert - base),
            beta=beta,
            linear_beta=linear_beta,
            activation=activation,
        )
        out.index_add_(0, token, y * topk_weights.flatten()[pairs].unsqueeze(-1))
    return out


def all_rows(
    x: torch.Tensor,
    offsets: list[int],
    pairs: torch.Tensor,
    expert_range: tuple[int, int],
    w13: ExpertWeights,
    w2: ExpertWeights,
    situ: dict[str, Any],
    first_product: torch.Tensor | None,
) -> torch.Tensor:
    """x [T, D] and a work list -> rows [T*k, D] of x's dtype, row token*k + j; NaN where a choice takes no part."""
    first, last = expert_range
    base = first if w13.num_experts == last - first else 0
    rows = x.new_full((len(pairs), x.shape[1]), float("nan"))
    for expert in range(first, last):
        mine = pairs[offsets[expert - first] : offsets[expert - first + 1]].long()
        if len(mine) == 0:
            continue
        dense13, dense2 = weight(w13, expert - base), weight(w2, expert - base)
        picked = x[mine // (len(pairs) // x.shape[0])]
        y, _ = expert_rows(picked, dense13, dense2, **situ)
        rows[mine] = y.to(x.dtype)
        if first_product is not None:
            fed = x_as_fed(picked) if situ["activation"] == "fp8" else picked
            at = offsets[expert - first]
            first_product[at : at + len(mine)] = F.linear(fed.float(), dense13).to(first_product.dtype)
    return rows


def finalize(
    rows: torch.Tensor, row_index: torch.Tensor, weights: torch.Tensor, norm_weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """rows [R, D], row_index [T, k] -> fp32 [T, D]: sum in the order of k, skipping -1, then the latent norm."""
    out = rows.new_zeros((row_index.shape[0], rows.shape[1]), dtype=torch.float32)
    for j in range(row_index.shape[1]):
        token = (row_index[:, j] >= 0).nonzero().squeeze(1)  # selection: a skipped row's weight may be NaN
        out[token] += weights[token, j].unsqueeze(-1) * rows[row_index[token, j].long()].float()
    return out if norm_weight is None else rms(out, norm_weight, eps)
