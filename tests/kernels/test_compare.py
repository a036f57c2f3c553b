"""The comparison that other tests rely on finds what it should find."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels.testing.compare import assert_close, assert_equal, relative_error

NAN, INF = float("nan"), float("inf")


def test_equal_tensors_pass_with_nan_and_inf_at_the_same_places() -> None:
    x = torch.tensor([1.0, NAN, INF, -INF, 0.0])
    assert_close("x", x, x.clone(), atol=0.0, cosine=0.0)
    assert_equal("x", x, x.clone())


@pytest.mark.parametrize("bad", [[1.0, 2.0], [NAN, NAN], [1.0, INF], [INF, NAN], [-INF, NAN]])
def test_nan_and_inf_at_other_places_fail(bad: list[float]) -> None:
    with pytest.raises(AssertionError, match="at other places"):
        assert_close("x", torch.tensor(bad), torch.tensor([1.0, NAN]), atol=1e9, rtol=1e9)


def test_worst_position_is_named() -> None:
    want = torch.zeros(3, 4)
    got = want.clone()
    got[1, 2], got[2, 3] = 0.5, 0.25
    with pytest.raises(AssertionError, match=r"worst at \[1, 2\]: got 0\.5, expected 0"):
        assert_close("x", got, want, atol=0.1)
    assert_close("x", got, want, atol=0.5)


def test_cosine_sees_a_systematic_error_within_the_bounds() -> None:
    want = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    got = want + 0.05
    assert_close("x", got, want, atol=0.06)
    with pytest.raises(AssertionError, match="cosine"):
        assert_close("x", got, want, atol=0.06, cosine=1e-4)


def test_bits_and_dtypes_are_compared() -> None:
    with pytest.raises(AssertionError, match="dtype"):
        assert_equal("x", torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, first at \[1\]"):
        assert_equal("x", torch.tensor([0.0, -0.0]), torch.zeros(2))
    with pytest.raises(AssertionError, match="shape"):
        assert_close("x", torch.zeros(2, 1), torch.zeros(2), atol=1.0)


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0
    assert relative_error(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(0.1, rel=1e-6)
