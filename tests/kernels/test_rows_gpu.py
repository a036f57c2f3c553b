"""Norms, quantisation and finalise on the GPU: operations on rows, against the reference.

Tolerances: bf16 results are one rounding of an fp32 value whose sums ran in another order: one bf16 step. Quantised
values are compared bit by bit where the input is the same (quant.*), and by their product elsewhere.
"""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import moe, norm, quant
from kimi_kernels.reference import moe as moe_reference
from kimi_kernels.reference import norm as norm_reference
from kimi_kernels.reference import quant as quant_reference
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.arrays import call, with_cupy
from tests.kernels.rows_gpu_cases import BF16_STEP, assert_same_bytes, assert_same_mxfp8, bf16, hostile, nan_like

pytestmark = pytest.mark.gpu

TOKENS = [0, 1, 3, 257, 8192]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(17)


@pytest.mark.parametrize(("library", "tokens"), with_cupy(TOKENS))
@pytest.mark.parametrize("width", [32, 512, 1536, 3584, 7168, 16384])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rms(library: str, tokens: int, width: int, weight_dtype: torch.dtype) -> None:
    x, weight = bf16(tokens, 2 * width)[:, width:], (1 + 0.1 * bf16(width)).to(weight_dtype)
    out = nan_like(x)
    assert call(library, norm.rms, x, weight, out=out).data_ptr() == out.data_ptr()
    assert_close("out", out, norm_reference.rms(x, weight, 1e-5), atol=1e-6, rtol=BF16_STEP, cosine=2e-6)
    in_place = x.clone()
    assert_equal("in place", call(library, norm.rms, in_place, weight, out=in_place), out)


@pytest.mark.parametrize(("library", "tokens"), with_cupy(TOKENS))
@pytest.mark.parametrize("width", [32, 1536, 3584, 7168])
def test_rms_fp8(library: str, tokens: int, width: int) -> None:
    x, weight = bf16(tokens, width), 1 + 0.1 * bf16(width)
    if tokens > 2:
        x[1] = 0
    out = nan_like(x)
    values, scale = call(library, norm.rms_fp8, x, weight, out=out)
    want = norm_reference.rms(x, weight, 1e-5)
    _, want_scale = quant_reference.fp8_per_token_group(want, 128)
    assert_close("scale", scale, want_scale, atol=0, rtol=1e-5)
    # E4M3 has 3 mantissa bits: half a step is 1/16 of the value, or of the smallest normal
    got = quant_reference.fp8_groups_dequant(values.view(torch.float8_e4m3fn), scale, 128)
    assert_close("value * scale", got, want, atol=1e-4, rtol=0.07)
    assert_equal("out", out, norm.rms(x, weight))


@pytest.mark.parametrize(("library", "tokens"), with_cupy(TOKENS))
@pytest.mark.parametrize("heads", [1, 12, 96])
def test_rms_gated(library: str, tokens: int, heads: int) -> None:
    both, weight = bf16(tokens, 2 * heads * 128 + 64), (1 + 0.1 * bf16(128)).float()
    x, gate = both[:, : heads * 128], both[:, heads * 128 + 64 :]
    want = norm_reference.rms_gated(x, gate, weight, 1e-5)
    out = torch.full((tokens, heads * 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    got = call(library, norm.rms_gated, x, gate, weight, out=out)
    assert_close("out", got, want, atol=1e-6, rtol=BF16_STEP, cosine=2e-6)
    assert got.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("library", "tokens", "width"),
    [
        *[("torch", *shape) for shape in ((0, 128), (1, 3584), (3, 7168), (257, 200), (1000, 33), (4096, 3584))],
        *[("cupy", *shape) for shape in ((0, 128), (1, 3584), (257, 200), (300, 33))],
    ],
)
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256])
def test_fp8_per_token_group(library: str, tokens: int, width: int, dtype: torch.dtype, group: int) -> None:
    x = hostile(tokens, width, dtype)
    values, scale = call(library, quant.fp8_per_token_group, x, group=group)
    want, want_scale = quant_reference.fp8_per_token_group(x, group)
    assert_equal("scale", scale, want_scale)
    assert_same_bytes(values, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("library", "tokens", "width"),
    [
        *[("torch", *shape) for shape in ((0, 128), (1, 3584), (3, 7168), (257, 96), (4096, 3584))],
        *[("cupy", *shape) for shape in ((0, 128), (1, 3584), (257, 96))],
    ],
)
def test_mxfp8(library: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    x = hostile(tokens, width, dtype)
    values, scale = call(library, quant.mxfp8, x)
    assert_same_mxfp8(values, scale, *quant_reference.mxfp8(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("library", "tokens"), with_cupy([0, 1, 3, 257, 4096]))
@pytest.mark.parametrize(("width", "k"), [(3584, 16), (64, 2), (5120, 7)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_finalize(library: str, tokens: int, width: int, k: int, dtype: torch.dtype, with_norm: bool) -> None:
    rows = torch.randn(max(tokens * k // 2, 1), width, device="cuda").to(dtype)
    index = torch.randint(-1, len(rows), (tokens, k), device="cuda", dtype=torch.int32)
    index[2::5] = -1
    weights = torch.rand(tokens, k, device="cuda")
    weights[index < 0] = float("nan")  # the weight of a missing row is not looked at
    norm_weight = 1 + 0.1 * bf16(width) if with_norm else None
    out = call(library, moe.finalize, rows, index, weights, norm_weight)
    want = moe_reference.finalize(rows, index, weights, norm_weight, 1e-5)
    step = BF16_STEP if dtype == torch.bfloat16 else 1e-5
    assert_close("out", out, want, atol=1e-5, rtol=step, cosine=2e-6)
    assert_equal("out again", moe.finalize(rows, index, weights, norm_weight), out)


def test_offsets_beyond_32_bits() -> None:
    """40,000 tokens of 16 choices at width 3584 are 2.3e9 elements: the last rows equal a small batch of the same."""
    rows = torch.empty(40000 * 16, 3584, device="cuda", dtype=torch.bfloat16)
    rows[:1600].normal_()
    rows[-1600:].copy_(rows[:1600])
    index = torch.arange(40000 * 16, device="cuda", dtype=torch.int32).view(40000, 16)[-100:]
    weights = torch.rand(100, 16, device="cuda")
    small = moe.finalize(rows[:1600], torch.arange(1600, device="cuda", dtype=torch.int32).view(100, 16), weights, None)
    assert_equal("last rows", moe.finalize(rows, index, weights, None), small)
    values, scale = quant.fp8_per_token_group(rows[-1600:])
    all_values, all_scale = quant.fp8_per_token_group(rows.view(-1, 3584))
    assert_equal("scale", all_scale[-1600:], scale)
    assert_same_bytes(all_values[-1600:], values)
