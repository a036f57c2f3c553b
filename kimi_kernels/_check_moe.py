"""Argument checks of the experts' packing functions and of packed weights."""

from __future__ import annotations

from typing import Any

import torch

from kimi_kernels import _check as check
from kimi_kernels.reference.expert_weights import ExpertWeights

FORMATS = ("mxfp4", "fp8", "bf16")
ACTIVATIONS = ("fp8", "bf16")
FP8 = (torch.float8_e4m3fn,)


def settings(activation: str, beta: float, linear_beta: float | None) -> None:
    """How the products run and SiTU's two numbers."""
    check.require(activation in ACTIVATIONS, "activation", '"fp8" or "bf16"', repr(activation))
    check.require(beta > 0, "beta", "a positive number", beta)
    check.require(linear_beta is None or linear_beta > 0, "linear_beta", "a positive number or None", linear_beta)


def sizes(experts: int, inner: int, width: int) -> None:
    """Numbers of a stack w1 [experts, inner, width]."""
    check.require(1 <= experts <= 1024, "w1", "1 to 1024 experts", experts)
    check.require(inner > 0 and inner % 32 == 0, "w1", "an expert width (rows) that is a multiple of 32", inner)
    check.require(width > 0 and width % 32 == 0, "w1", "an input width (columns) that is a multiple of 32", width)


def mxfp4(w1: Any, w1_scale: Any, w3: Any, w3_scale: Any, w2: Any, w2_scale: Any) -> None:
    """Arguments of pack_mxfp4. Looks at every scale byte."""
    check.tensor("w1", w1, (None, None, None), check.UINT8)
    experts, inner, half = w1.shape
    width = 2 * half
    sizes(experts, inner, width)
    shapes = {
        "w1_scale": (w1_scale, (experts, inner, width // 32)),
        "w3": (w3, (experts, inner, half)),
        "w3_scale": (w3_scale, (experts, inner, width // 32)),
        "w2": (w2, (experts, width, inner // 2)),
        "w2_scale": (w2_scale, (experts, width, inner // 32)),
    }
    for name, (value, shape) in shapes.items():
        check.tensor(name, value, shape, check.UINT8, like=w1)
    for name, value in (("w1_scale", w1_scale), ("w3_scale", w3_scale), ("w2_scale", w2_scale)):
        bad = int((value == 255).sum())
        check.require(bad == 0, name, "E8M0 bytes 0 to 254", f"{bad} bytes of 255 (not a number)")


def fp8(w1: Any, w1_scale: Any, w3: Any, w3_scale: Any, w2: Any, w2_scale: Any) -> None:
    """Arguments of pack_fp8."""
    check.tensor("w1", w1, (None, None, None), FP8)
    experts, inner, width = w1.shape
    sizes(experts, inner, width)
    inner_blocks, width_blocks = -(-inner // 128), -(-width // 128)
    check.tensor("w3", w3, (experts, inner, width), FP8, like=w1)
    check.tensor("w2", w2, (experts, width, inner), FP8, like=w1)
    check.tensor("w1_scale", w1_scale, (experts, inner_blocks, width_blocks), check.F32, like=w1)
    check.tensor("w3_scale", w3_scale, (experts, inner_blocks, width_blocks), check.F32, like=w1)
    check.tensor("w2_scale", w2_scale, (experts, width_blocks, inner_blocks), check.F32, like=w1)


def packed(x: Any, w13: Any, w2: Any, layout: str) -> None:
    """That w13 and w2 are a pair from a pack function, in ``layout``, for x [T, D]."""
    width = x.shape[1]
    for name, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, ExpertWeights):
            raise TypeError(f"{name}: expected ExpertWeights from a pack function, got {type(w).__name__}")
        check.require(w.layout == layout, name, f'layout "{layout}"', repr(w.layout))
        check.require(w.format in FORMATS, name, f"a format of {FORMATS}", repr(w.format))
    check.require(w13.cols == width, "w13", f"{width} columns (x has {width})", w13.cols)
    inner = w13.rows // 2
    check.require((w2.rows, w2.cols) == (width, inner), "w2", f"[{width}, {inner}] an expert", [w2.rows, w2.cols])
    check.require(w2.num_experts == w13.num_experts, "w2", f"{w13.num_experts} experts", w2.num_experts)
    check.require(w2.format == w13.format, "w2", f"format {w13.format}", w2.format)


def expert_range(value: Any, w13: ExpertWeights) -> tuple[int, int]:
    """The experts that take part, (first, last+1)."""
    if value is None:
        return 0, w13.num_experts
    first, last = value
    fits = 0 <= first < last and (w13.num_experts == last - first or w13.num_experts >= last)
    check.require(fits, "expert_range", f"first < last+1 and weights for it ({w13.num_experts} held)", value)
    return first, last
