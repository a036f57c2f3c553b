"""Comparison of a result with its reference that says where and how they differ."""

from __future__ import annotations

import torch


def assert_close(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    atol: float,
    rtol: float = 0.0,
    cosine: float | None = None,
) -> None:
    """AssertionError unless ``got`` equals ``want`` as far as asked.

    Shapes are equal; NaN and each infinity stand at the same places; every other element is within
    ``atol + rtol * |want|``; ``1 - cosine similarity`` over all finite elements is at most ``cosine`` when that is
    given (it sees a small systematic error that the elementwise bound lets pass). Compared in fp64; dtypes may differ.
    The message names the worst element, its position and both values. Returns None.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    g, w = got.detach().double().cpu(), want.detach().double().cpu()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = test(g) != test(w)
        if differs.any():
            at = tuple(int(i) for i in differs.nonzero()[0])
            count = int(differs.sum())
            raise AssertionError(
                f"{name}: {kind} at other places than expected, {count} elements, first at {list(at)}: "
                f"got {g[at].item()}, expected {w[at].item()}"
            )
    finite = w.isfinite()
    error = torch.where(finite, (g - w).abs(), 0.0)
    excess = error - torch.where(finite, atol + rtol * w.abs(), 0.0)
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        share = float((excess > 0).double().mean())
        raise AssertionError(
            f"{name}: {share:.3%} of the elements are off; worst at {list(at)}: got {g[at].item():.9g}, expected "
            f"{w[at].item():.9g}, difference {error[at].item():.3g} (allowed {atol:.3g} + {rtol:.3g} * |expected|)"
        )
    if cosine is not None:
        loss = cosine_loss(g[finite], w[finite])
        if loss > cosine:
            raise AssertionError(f"{name}: 1 - cosine similarity is {loss:.3g}, allowed {cosine:.3g}")


def assert_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """AssertionError, with the first differing position, unless dtype, shape and bits are the same (NaN equals NaN)."""
    if got.dtype != want.dtype:
        raise AssertionError(f"{name}: dtype {got.dtype}, expected {want.dtype}")
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    g, w = got.detach().contiguous(), want.detach().contiguous()
    if g.numel() == 0:
        return
    # Where they are, first: pools of hundreds of megabytes would take seconds to come to the CPU.
    if g.device == w.device and torch.equal(g.reshape(-1).view(torch.uint8), w.reshape(-1).view(torch.uint8)):
        return
    g, w = g.cpu(), w.cpu()
    size = g.element_size()
    differs = (g.reshape(-1).view(torch.uint8) != w.reshape(-1).view(torch.uint8)).view(-1, size).any(1).view(g.shape)
    if g.is_floating_point():
        differs &= ~(g.isnan() & w.isnan())
    if differs.any():
        at = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(differs.sum())} of {g.numel()} elements differ, first at {list(at)}: "
            f"got {g[at].item()!r}, expected {w[at].item()!r}"
        )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference over the L2 norm of ``want``, in fp64; 0 for two zero tensors."""
    g, w = got.detach().double().cpu(), want.detach().double().cpu()
    size = float(w.norm())
    error = float((g - w).norm())
    return error / size if size > 0 else error


def cosine_loss(got: torch.Tensor, want: torch.Tensor) -> float:
    """1 - cosine similarity over all elements, in fp64; 0 for two zero tensors."""
    g, w = got.double().flatten(), want.double().flatten()
    norms = float(g.norm() * w.norm())
    return 1.0 - float(g @ w) / norms if norms > 0 else float(g.norm() + w.norm() > 0)
