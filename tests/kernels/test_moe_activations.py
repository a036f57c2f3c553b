"""What one FP8 scale a row costs rows with outliers, in x and in h: E4M3 keeps its relative error over 14 binades."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels.reference import moe as reference
from kimi_kernels.reference import quant
from kimi_kernels.testing.compare import relative_error

ROWS, WIDTH, COLUMN = 32, 3584, 77
REST = torch.arange(WIDTH) != COLUMN
# E4M3 rounds by at most 2^-4 of a value, and by 2^-10 of the scale where codes are subnormal (below 2^-6).
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10


def with_outlier(size: float) -> torch.Tensor:
    """Normal values, one column of them `size` times as large as the rest."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    x[:, COLUMN] = size
    return x.bfloat16().float()


def finer(x: torch.Tensor) -> torch.Tensor:
    """With a scale per 128 columns, the usual choice: an outlier then spoils 128 columns instead of a row."""
    return quant.fp8_groups_dequant(*quant.fp8_per_token_group(x, 128), 128)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e4])
def test_outliers_cost_less_than_twice_the_error_of_finer_scales(size: float) -> None:
    """Of what is not the outlier, and of a product in which the outlier counts no more than all others together."""
    x = with_outlier(size)
    weight = torch.randn(256, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight[:, COLUMN] *= WIDTH**0.5 / size
    product = lambda rows: rows.double() @ weight.T  # noqa: E731
    for fed in (reference.x_as_fed(x), reference.h_as_fed(x)):
        assert relative_error(fed[:, REST], x[:, REST]) < 2 * relative_error(finer(x)[:, REST], x[:, REST])
        assert relative_error(product(fed), product(x)) < 2 * relative_error(product(finer(x)), product(x))


@pytest.mark.parametrize("size", [1.0, 1e4, 1e5, 1e6, 1e12])
def test_what_larger_outliers_lose(size: float) -> None:
    """Below 2^-14 of a row's largest value the error is no longer relative; below 2^-19 nothing is left."""
    x = with_outlier(size)
    largest = x.abs().amax(-1, keepdim=True)
    fed = reference.x_as_fed(x)
    assert ((fed - x).abs() <= RELATIVE * x.abs() * 1.0001 + ABSOLUTE * largest / 448).all()
    fed_h, power = reference.h_as_fed(x), torch.exp2(torch.ceil(torch.log2(largest / 448)))
    assert ((fed_h - x).abs() <= RELATIVE * x.abs() + 2 * ABSOLUTE * power).all()  # rounded twice
    for got in (fed, fed_h):
        assert not got[x.abs() < 2.0**-20 * largest].any()
        small = x.abs() < 2.0**-14 * largest
        assert relative_error(got[~small], x[~small]) < 0.04
