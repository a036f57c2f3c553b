"""Inputs of the row operations on the GPU, and comparisons that see every row of a large result."""

from __future__ import annotations

import torch

from kimi_kernels.testing.compare import assert_equal

BF16_STEP = 2.0**-7


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


def hostile(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows with a strided layout; zeros, exact maxima, tiny and huge values, NaN and infinity among them."""
    x = torch.randn(tokens, width + 64, device="cuda", dtype=torch.float32)[:, 64:] * 5
    if tokens >= 257:
        x[1] = 0
        x[2, ::7] = 448
        x[3] *= 1e-30
        x[4] *= 1e30
        x[5, 5] = float("nan")
        x[6, 6] = float("inf")
        x[7] *= 1e-38
        x[8, 8] = -float("inf")
    wide = torch.empty(tokens, width + 64, device="cuda", dtype=dtype)[:, 64:]
    return wide.copy_(x)


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    """E4M3 bit by bit; NaN is NaN whatever its sign."""
    g, w = got.view(torch.uint8) & 0x7F, want.view(torch.uint8) & 0x7F
    nan = w == 0x7F
    assert_equal("NaN", g == 0x7F, nan)
    assert_equal("bytes", got.view(torch.uint8).masked_fill(nan, 0), want.view(torch.uint8).masked_fill(nan, 0))


def assert_same_mxfp8(values: torch.Tensor, scale: torch.Tensor, want: torch.Tensor, want_scale: torch.Tensor) -> None:
    assert_equal("scale", scale, want_scale)
    bad = (want_scale == 255).repeat_interleave(32, 1)  # such a group holds no numbers
    assert_same_bytes(values.view(torch.uint8).masked_fill(bad, 0), want.view(torch.uint8).masked_fill(bad, 0))


def repeated(base: torch.Tensor, rows: int, dim: int = 0) -> torch.Tensor:
    """``rows`` rows along ``dim``: those of ``base`` over and over."""
    times = [1] * base.ndim
    times[dim] = -(-rows // base.shape[dim])
    return base.repeat(times).narrow(dim, 0, rows)


def assert_repeats(name: str, got: torch.Tensor, period: int) -> None:
    """Every row of ``got`` [rows, n] has the bits of row i % period; compared on the device."""
    raw = got.view(torch.uint8)
    for start in range(period, len(raw), period):
        part = raw[start : start + period]
        if not torch.equal(part, raw[: len(part)]):
            row = start + int((part != raw[: len(part)]).any(1).nonzero()[0])
            raise AssertionError(f"{name}: row {row} of {len(raw)} differs from row {row % period}, its input's copy")
