"""Row operations from none to 70,000 rows: every row of a large batch, and offsets and grids beyond 32 and 16 bits.

The rows of a batch repeat those of a small one, so each result row has to repeat too, bit by bit, and the first ones
are compared with the reference. Tolerances: as in test_rows_gpu.py and test_attn_res_gpu.py, for the same reasons.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kimi_kernels import attn_res, moe, norm, quant
from kimi_kernels.reference import attn_res as attn_res_reference
from kimi_kernels.reference import moe as moe_reference
from kimi_kernels.reference import norm as norm_reference
from kimi_kernels.reference import quant as quant_reference
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.rows_gpu_cases import (
    BF16_STEP,
    assert_repeats,
    assert_same_bytes,
    assert_same_mxfp8,
    bf16,
    hostile,
    repeated,
)

pytestmark = pytest.mark.gpu

PERIOD = 257  # odd, so that a row and its copy fall to other warps, blocks and waves
COUNTS = [0, 1, 3, 257, 8192, 40000]
# 65,535 is the limit of a grid's y and z; 37,449 tokens of 16 rows of 3584 are the first beyond 2^31 elements
LARGE_COUNTS = [*COUNTS, 37448, 37449, 37513, 65536, 70000]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(19)


def assert_bf16(name: str, got: torch.Tensor, want: torch.Tensor, atol: float = 1e-6) -> None:
    """``got`` [tokens, n] repeats, and its first rows are ``want`` within one rounding."""
    assert got.dtype == torch.bfloat16
    assert_close(name, got[:PERIOD], want, atol=atol, rtol=BF16_STEP, cosine=2e-6)
    assert_repeats(name, got, PERIOD)


def nan_rows(tokens: int, width: int) -> torch.Tensor:
    return torch.full((tokens, width), float("nan"), device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("tokens", COUNTS)
def test_attn_res_mix(tokens: int) -> None:
    blocks, rows, weight = bf16(8, PERIOD, 7168), bf16(2, PERIOD, 7168), 1 + 0.1 * bf16(2, 7168)
    proj = 0.05 * bf16(7168)
    partial, delta = (repeated(r, tokens) for r in rows)
    total, x = attn_res.mix(
        repeated(blocks, tokens, dim=1),
        partial,
        delta,
        weight[0],
        proj,
        weight[1],
        partial_out=nan_rows(tokens, 7168),
        x_out=nan_rows(tokens, 7168),
    )
    want = (rows[0] + rows[1])[:tokens]
    assert_equal("partial + delta", total[:PERIOD], want)
    assert_repeats("partial + delta", total, PERIOD)
    mixed = attn_res_reference.mix(blocks[:, :tokens], want, weight[0], proj, weight[1], 1e-5)
    assert_bf16("x", x, mixed, atol=2e-3)


@pytest.mark.parametrize("tokens", COUNTS)
def test_rms(tokens: int) -> None:
    base, weight = bf16(PERIOD, 7168), 1 + 0.1 * bf16(7168)
    got = norm.rms(repeated(base, tokens), weight, out=nan_rows(tokens, 7168))
    assert_bf16("out", got, norm_reference.rms(base[:tokens], weight, 1e-5))


@pytest.mark.parametrize("tokens", COUNTS)
def test_rms_gated(tokens: int) -> None:
    base, gate, weight = bf16(PERIOD, 12288), bf16(PERIOD, 12288), 1 + 0.1 * bf16(128)
    got = norm.rms_gated(repeated(base, tokens), repeated(gate, tokens), weight, out=nan_rows(tokens, 12288))
    assert_bf16("out", got, norm_reference.rms_gated(base[:tokens], gate[:tokens], weight, 1e-5))


@pytest.mark.parametrize("tokens", COUNTS)
def test_rms_fp8(tokens: int) -> None:
    base, weight = bf16(PERIOD, 7168), 1 + 0.1 * bf16(7168)
    values, scale = norm.rms_fp8(repeated(base, tokens), weight)
    want = norm_reference.rms(base[:tokens], weight, 1e-5)
    _, want_scale = quant_reference.fp8_per_token_group(want, 128)
    assert_close("scale", scale[:PERIOD], want_scale, atol=0, rtol=1e-5)
    got = quant_reference.fp8_groups_dequant(values[:PERIOD], scale[:PERIOD], 128)
    assert_close("value * scale", got, want, atol=1e-4, rtol=0.07)
    assert_repeats("values", values, PERIOD)
    assert_repeats("scale", scale, PERIOD)


def check_fp8(base: torch.Tensor, tokens: int) -> None:
    values, scale = quant.fp8_per_token_group(repeated(base, tokens))
    want, want_scale = quant_reference.fp8_per_token_group(base[:tokens], 128)
    assert_equal("scale", scale[: len(base)], want_scale)
    assert_same_bytes(values[: len(base)], want)
    assert_repeats("values", values, len(base))
    assert_repeats("scale", scale, len(base))


def check_mxfp8(base: torch.Tensor, tokens: int) -> None:
    values, scale = quant.mxfp8(repeated(base, tokens))
    assert_same_mxfp8(values[: len(base)], scale[: len(base)], *quant_reference.mxfp8(base[:tokens]))
    assert_repeats("values", values, len(base))
    assert_repeats("scale", scale, len(base))


@pytest.mark.parametrize("tokens", LARGE_COUNTS)
@pytest.mark.parametrize("check", [check_fp8, check_mxfp8])
def test_quantise(tokens: int, check: Callable[[torch.Tensor, int], None]) -> None:
    check(hostile(PERIOD, 3584, torch.bfloat16), tokens)


@pytest.mark.parametrize("check", [check_fp8, check_mxfp8])
def test_quantise_more_than_two_to_the_31_elements(check: Callable[[torch.Tensor, int], None]) -> None:
    """600,000 rows of 3584 are 2.15e9 elements, 6.4 GB with the result."""
    base = hostile(4099, 3584, torch.bfloat16)
    assert 600_000 * 3584 > 2**31
    check(base, 600_000)


@pytest.mark.parametrize("tokens", LARGE_COUNTS)
@pytest.mark.parametrize("with_norm", [True, False])
def test_finalize(tokens: int, with_norm: bool) -> None:
    """Each token has 16 rows of its own, as after the experts: up to 4.0e9 elements, 8 GB."""
    k, width = 16, 3584
    base = bf16(PERIOD * k, width)
    index = torch.arange(PERIOD * k, device="cuda", dtype=torch.int32).view(PERIOD, k).flip(1)
    weights = torch.rand(PERIOD, k, device="cuda")
    missing = torch.rand(PERIOD, k, device="cuda") < 0.2
    missing[2::5] = True
    weights[missing] = float("nan")  # the weight of a missing row is not looked at
    norm_weight = 1 + 0.1 * bf16(width) if with_norm else None
    start = torch.arange(tokens, device="cuda", dtype=torch.int32) // PERIOD * (PERIOD * k)
    own = repeated(index, tokens) + start.unsqueeze(1)
    own = own.masked_fill(repeated(missing, tokens), -1)
    rows = repeated(base, max(tokens, 1) * k)
    got = moe.finalize(rows, own, repeated(weights, tokens).contiguous(), norm_weight)
    first = index.masked_fill(missing, -1)[:tokens]
    assert_bf16("out", got, moe_reference.finalize(base, first, weights[:tokens], norm_weight, 1e-5), atol=1e-5)
