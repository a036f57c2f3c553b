"""RMSNorm forms, the mix of attention residuals, dense projections."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import attn_res, dense, norm, quant
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.golden import tiny_states, tiny_weights

# fp32 against fp64: a reduction over some hundred elements and a reciprocal root stay below 16 units of 2^-24
FP32 = {"atol": 1e-6, "rtol": 16 * 2**-24}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rms(tokens: int, eps: float) -> None:
    x, weight = randn(tokens, 200) * 1e-3, randn(200, seed=1)  # small, so that eps shows
    assert_close("rms", norm.rms(x, weight, eps=eps), rms64(x, weight, eps), **FP32)
    x16 = x.bfloat16()
    got = norm.rms(x16, weight.bfloat16(), eps=eps)
    assert got.dtype == torch.bfloat16
    # one rounding to bf16: half a unit is at most 2^-8 of the value
    assert_close("rms bf16", got, rms64(x16, weight.bfloat16(), eps), atol=1e-6, rtol=2**-8)


def test_rms_of_a_tiny_and_a_zero_row() -> None:
    x = torch.zeros(2, 64)
    x[1] = 1e-12
    got = norm.rms(x, torch.ones(64), eps=1e-5)
    assert not got[0].any()
    assert got.isfinite().all()


def test_rms_gated_norms_each_group_apart() -> None:
    x, gate, weight = randn(4, 3 * 128), randn(4, 3 * 128, seed=1), randn(128, seed=2)
    x[:, 128:256] *= 100
    want = rms64(x.view(4, 3, 128), weight, 1e-5).view(4, -1) * torch.sigmoid(gate.double())
    assert_close("rms_gated", norm.rms_gated(x, gate, weight), want, **FP32)
    assert norm.rms_gated(x[:0], gate[:0], weight).shape == (0, 384)


def test_rms_fp8_is_the_norm_then_the_quantiser() -> None:
    x, weight = randn(5, 200).bfloat16(), randn(200, seed=1).bfloat16()
    out = torch.full_like(x, float("nan"))
    values, scale = norm.rms_fp8(x, weight, out=out)
    assert_equal("out", out, norm.rms(x, weight))
    want_values, want_scale = quant.fp8_per_token_group(norm.rms(x.float(), weight.float()))
    assert_equal("values", values.view(torch.uint8), want_values.view(torch.uint8))
    assert_equal("scale", scale, want_scale)


def test_out_and_strided_rows() -> None:
    wide = randn(5, 128 + 7)
    view, weight = wide[:, 3:131], randn(128, seed=1)
    want = norm.rms(view.contiguous(), weight)
    buffer = torch.full((5, 128 + 64), float("nan"))
    out = buffer[:, 8:136]
    assert norm.rms(view, weight, out=out) is out
    assert_equal("strided", out.contiguous(), want)
    assert buffer[:, :8].isnan().all()
    assert buffer[:, 136:].isnan().all()
    norm.rms(view, weight, out=view)
    assert_equal("in place", view.contiguous(), want)


def mix64(blocks, p, n, u, out_norm, eps=1e-5):
    """K3 spec section 4 in fp64, one token and source at a time."""
    sources = [*blocks.double(), p.double()]
    scores = torch.stack([(v * n.double() * u.double()).sum(-1) / torch.sqrt(v.pow(2).mean(-1) + eps) for v in sources])
    weights = scores.softmax(0)
    mixed = sum(w.unsqueeze(-1) * v for w, v in zip(weights, sources, strict=True))
    return rms64(mixed, out_norm, eps)


@pytest.mark.parametrize("blocks", [0, 1, 8])
@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mix(blocks: int, tokens: int, dtype: torch.dtype) -> None:
    memory = randn(blocks, tokens, 96).to(dtype) * 3
    p, delta = randn(tokens, 96, seed=1).to(dtype), randn(tokens, 96, seed=2).to(dtype)
    weights = [randn(96, seed=seed).bfloat16() for seed in (3, 4, 5)]
    total, x = attn_res.mix(memory, p, delta, *weights)
    assert_equal("sum", total, p + delta)
    assert x.dtype == dtype
    # scores of size 10 carry 1e-6, which the exponential makes a relative error of the weights
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 2**-8}
    assert_close("x", x, mix64(memory, total, *weights), **tolerance)


def test_mix_without_delta_returns_partial_itself() -> None:
    memory, p = randn(2, 3, 32), randn(3, 32, seed=1)
    weights = [randn(32, seed=seed) for seed in (3, 4, 5)]
    total, x = attn_res.mix(memory, p, None, *weights)
    assert total is p
    assert_equal("x", x, attn_res.mix(memory, p, torch.zeros_like(p), *weights)[1])


def test_mix_writes_the_next_block_in_place() -> None:
    buffer = torch.full((4, 3, 32), float("nan"))
    buffer[:2] = randn(2, 3, 32)
    p, delta = randn(3, 32, seed=1), randn(3, 32, seed=2)
    weights = [randn(32, seed=seed) for seed in (3, 4, 5)]
    want = attn_res.mix(buffer[:2].clone(), p, delta, *weights)
    x_out = torch.full((3, 32), float("nan"))
    total, x = attn_res.mix(buffer[:2], p, delta, *weights, partial_out=buffer[2], x_out=x_out)
    assert total.data_ptr() == buffer[2].data_ptr()
    assert x is x_out
    assert_equal("sum", buffer[2], want[0])
    assert_equal("x", x, want[1])
    assert buffer[3].isnan().all()


@pytest.mark.parametrize("extra", [7, 64])
def test_mix_and_linear_read_strided_rows(extra: int) -> None:
    wide = randn(6, 5, 32 + extra)
    memory, p, delta = wide[:3, :, 2:34], wide[3, :, :32], wide[4, :, 5:37]
    weights = [randn(32, seed=seed) for seed in (3, 4, 5)]
    got = attn_res.mix(memory, p, delta, *weights)
    want = attn_res.mix(memory.contiguous(), p.contiguous(), delta.contiguous(), *weights)
    assert_equal("sum", got[0], want[0])
    assert_equal("x", got[1], want[1])
    weight = randn(9, 32 + extra, seed=6)[:, 1:33]
    assert_close("linear", dense.linear(p, weight), dense.linear(p.contiguous(), weight.contiguous()), atol=1e-5)


def test_mix_of_the_tiny_golden() -> None:
    states, weights = tiny_states(), tiny_weights()
    blocks = torch.stack([states["embed"], states["layer1.out_partial"]])
    p = states["layer3.out_partial"]
    n, u = weights["model.output_attn_res_norm.weight"], weights["model.output_attn_res_proj.weight"][0]
    _, x = attn_res.mix(blocks, p, None, n, u, weights["model.norm.weight"])
    assert_close("final norm", x, states["final_norm"], atol=2e-5)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_linear(tokens: int) -> None:
    x, weight = randn(tokens, 48), randn(20, 48, seed=1)
    assert_close("linear", dense.linear(x, weight), x.double() @ weight.double().T, atol=1e-5)
    x16, w16 = x.bfloat16(), weight.bfloat16()
    want = x16.double() @ w16.double().T
    exact = dense.linear(x16, w16, out_dtype=torch.float32)
    assert exact.dtype == torch.float32
    assert_close("bf16 products, fp32 sum", exact, want, atol=1e-5)
    parts = dense.linear(x16, w16, out_dtype=((3, torch.float32), (0, torch.bfloat16), (17, torch.bfloat16)))
    assert [part.dtype for part in parts] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert_equal("router range", parts[0], exact[:, :3])
    assert_equal("other range", parts[2], exact[:, 3:].bfloat16())


X, W = torch.zeros(2, 8), torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norm.rms(X, torch.zeros(9)), r"weight: expected shape \[8\], got \[9\]"),
        (lambda: norm.rms(X.double(), W), "x: expected dtype float32 or bfloat16, got float64"),
        (lambda: norm.rms(X, W, out=torch.zeros(2, 8).bfloat16()), "out: expected dtype float32, got bfloat16"),
        (lambda: norm.rms_gated(X, X, torch.zeros(3)), "x: expected a multiple of 3 columns, got 8"),
        (lambda: norm.rms_gated(X, X[:1], W), r"gate: expected shape \[2, 8\], got \[1, 8\]"),
        (
            lambda: attn_res.mix(torch.zeros(1, 2, 9), X, None, W, W, W),
            r"blocks: expected shape \[\*, 2, 8\], got \[1, 2, 9\]",
        ),
        (lambda: attn_res.mix(torch.zeros(16, 2, 8), X, None, W, W, W), "blocks: expected at most 15 blocks, got 16"),
        (lambda: attn_res.mix(torch.zeros(0, 2, 8), X, X.bfloat16(), W, W, W), "delta: expected dtype float32"),
        (lambda: dense.linear(X, torch.zeros(3, 9)), r"weight: expected shape \[\*, 8\], got \[3, 9\]"),
        (
            lambda: dense.linear(X, torch.zeros(3, 8), out_dtype=torch.float16),
            "out_dtype: expected float32 or bfloat16",
        ),
        (lambda: dense.linear(X, torch.zeros(3, 8), out_dtype=((2, torch.float32),)), "add up to 3 columns"),
    ],
)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_list_is_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="weight: expected a tensor, got list"):
        norm.rms(X, [1.0] * 8)
