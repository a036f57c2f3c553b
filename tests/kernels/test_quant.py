"""Number formats: the MXFP4 golden to the bit, and the rules of the two activation formats."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import quant
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.golden import mxfp4_golden

MXFP4_NAMES = (
    "all_bytes",
    "one_group",
    "ragged_rows",
    "square",
    "wide",
    "wide2",
    "quantised",
    "expert.w1",
    "expert.w3",
)


@pytest.mark.parametrize("name", [*MXFP4_NAMES, "expert.w2"])
def test_mxfp4_golden_is_decoded_to_the_bit(name: str) -> None:
    golden = mxfp4_golden()
    packed, scale, want = (golden[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "expected"))
    assert_equal(name, quant.mxfp4_dequant(packed, scale, out_dtype=torch.float32), want)
    assert_equal(f"{name} in bf16", quant.mxfp4_dequant(packed, scale).float(), want)


@pytest.mark.parametrize("name", ["square", "wide", "wide2", "ragged_rows", "one_group"])
def test_mxfp4_golden_products(name: str) -> None:
    golden = mxfp4_golden()
    weight = quant.mxfp4_dequant(
        golden[f"{name}.weight_packed"], golden[f"{name}.weight_scale"], out_dtype=torch.float32
    )
    got = golden[f"{name}.x_bf16"].double() @ weight.double().T
    # The golden is the fp64 product rounded to fp32 once: half a unit in the last place, 2^-24.
    assert_close(name, got, golden[f"{name}.y"], atol=0.0, rtol=2**-23)


def test_mxfp4_over_leading_dims_and_extreme_scales() -> None:
    packed = torch.full((3, 2, 16), 0x72, dtype=torch.uint8)  # low nibble 2 is 1.0, high nibble 7 is 6.0
    scale = torch.tensor([0, 1, 127, 130, 254, 255], dtype=torch.uint8).view(3, 2, 1)
    got = quant.mxfp4_dequant(packed, scale, out_dtype=torch.float32)
    assert got.shape == (3, 2, 32)
    assert got[1, 0, :2].tolist() == [1.0, 6.0]
    assert got[1, 1, :2].tolist() == [8.0, 48.0]
    assert got[0, 0, 0].item() == 2.0**-127
    assert got[2, 0, 0].item() == 2.0**127
    assert got[2, 1].isnan().all()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("tokens", "cols"), [(0, 128), (1, 32), (5, 192), (3, 3584)])
def test_fp8_groups(tokens: int, cols: int, group: int) -> None:
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)) * 10
    values, scale = quant.fp8_per_token_group(x, group=group)
    groups = -(-cols // group)
    assert values.shape == (tokens, cols)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (tokens, groups)
    back = values.float() * scale.repeat_interleave(group, 1)[:, :cols]
    # E4M3 keeps 3 bits after the leading one: half a unit is 2^-4 of the value; below 2^-6 * scale it is 2^-10 * scale.
    spread = scale.repeat_interleave(group, 1)[:, :cols]
    assert ((back - x).abs() <= (x.abs() * 2**-4).maximum(spread * 2**-10) * 1.0001).all()


def test_fp8_groups_of_zeros_tiny_and_bad_values() -> None:
    x = torch.zeros(6, 128)
    x[1, 5] = 1e-30
    x[2, 5] = 1e-8
    x[3, 5] = float("nan")
    x[4, 5] = 3.4e38
    x[5] = torch.linspace(-448, 448, 128)
    values, scale = quant.fp8_per_token_group(x)
    values = values.float()
    assert not values[0].any()
    assert scale[:3].isfinite().all()
    assert scale[:3].min() > 0
    assert values[1, 5] == 0
    assert values[2, 5] == 448
    assert values[3, 5].isnan()
    assert values[4, 5] == 448
    assert scale[5, 0] == 1.0
    assert_equal("exact at scale 1", values[5], x[5].to(torch.float8_e4m3fn).float())


def test_mxfp8_scale_is_the_smallest_power_that_fits() -> None:
    x = torch.zeros(8, 64)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 448.0, 448.1, 1.0, -0.875
    x[4, 0], x[5, 0], x[6, 0], x[7, 0] = 1e-40, float("nan"), float("inf"), 3e38
    values, scale = quant.mxfp8(x)
    assert scale[:4, 0].tolist() == [127, 128, 127 - 8, 127 - 9]
    assert scale[4, 0] == 0  # the least scale; the denormal is below what it can show
    assert scale[5, 0] == 255
    assert scale[6, 0] == 255
    assert (scale[:, 1] == 0).all()  # groups of zeros
    assert not values[:, 32:].float().any()
    assert values[:4, 0].float().tolist() == [448.0, 224.0, 256.0, -448.0]
    assert values[7, 0].float() * 2.0 ** (int(scale[7, 0]) - 127) == pytest.approx(3e38, rel=2**-4)


def test_mxfp8_error_is_that_of_e4m3() -> None:
    x = torch.randn(7, 3584, generator=torch.Generator().manual_seed(2)) * torch.logspace(-20, 20, 7).unsqueeze(1)
    values, scale = quant.mxfp8(x)
    power = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    back = values.double() * power
    assert ((back - x.double()).abs() <= (x.double().abs() * 2**-4).maximum(power * 2**-10)).all()


def test_strided_rows_are_read_as_they_stand() -> None:
    wide = torch.randn(5, 256 + 7, generator=torch.Generator().manual_seed(3))
    view = wide[:, 3 : 3 + 256]
    for function in (quant.fp8_per_token_group, quant.mxfp8):
        for got, want in zip(function(view), function(view.contiguous()), strict=True):
            assert_equal(function.__name__, got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quant.mxfp8(torch.zeros(2, 33)), "x: expected a multiple of 32 columns, got 33"),
        (
            lambda: quant.mxfp8(torch.zeros(2, 32, dtype=torch.float64)),
            "x: expected dtype float32 or bfloat16, got float64",
        ),
        (lambda: quant.fp8_per_token_group(torch.zeros(2, 64), group=48), "group: expected a multiple of 32, got 48"),
        (lambda: quant.fp8_per_token_group(torch.zeros(64)), r"x: expected shape \[\*, \*\], got \[64\]"),
        (
            lambda: quant.mxfp4_dequant(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)),
            r"scale: expected shape \[2, 1\], got \[2, 2\]",
        ),
    ],
)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
