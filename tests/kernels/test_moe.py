"""Routed experts: golden, packing, skipped ids, splits over ranks, quantised activations, finalise."""

from __future__ import annotations

import itertools

import pytest
import torch

from kimi_kernels import moe, quant
from kimi_kernels.reference import moe as reference
from kimi_kernels.testing.compare import assert_close, assert_equal, relative_error
from tests.kernels.golden import mxfp4_golden, tiny_states, tiny_weights
from tests.kernels.moe_case import (
    CLOSE,
    EXPERTS,
    FORMATS,
    INNER,
    TOP_K,
    WIDTH,
    dense_weights,
    experts64,
    pack,
    raw_weights,
    routed,
    situ64,
)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_experts_against_fp64(fmt: str, tokens: int) -> None:
    raw = raw_weights(fmt)
    x, ids, weights = routed(tokens)
    if tokens > 3:
        ids[2, 1], weights[2, 1] = -1, float("nan")  # a skipped choice's weight is not looked at
        ids[3] = -1
    got = moe.experts(x, ids, weights, *pack(fmt, raw))
    assert got.dtype == torch.float32
    assert_close("experts", got, experts64(x, ids, weights, dense_weights(fmt, raw)), **CLOSE)
    if tokens > 3:
        assert not got[3].any()


@pytest.mark.parametrize(("name", "value"), [("beta", 0.0), ("beta", float("nan")), ("linear_beta", -1.0)])
def test_activation_constants_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a positive number"):
        moe.experts(torch.zeros(1, 32), None, None, None, None, **{name: value})


@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, None), (1.0, 25.0), (2.0, 3.0)])
def test_activation_constants(beta: float, linear_beta: float | None) -> None:
    raw = raw_weights("bf16")
    x, ids, weights = routed(5)
    got = moe.experts(x, ids, weights, *pack("bf16", raw), beta=beta, linear_beta=linear_beta)
    want = experts64(x, ids, weights, dense_weights("bf16", raw), beta=beta, linear_beta=linear_beta)
    assert_close("experts", got, want, **CLOSE)


def test_golden_expert() -> None:
    golden = mxfp4_golden()
    raw = [golden[f"expert.{w}.{part}"][None] for w in ("w1", "w3", "w2") for part in ("weight_packed", "weight_scale")]
    w13, w2 = moe.pack_mxfp4(*raw)
    x = golden["expert.x_bf16"]
    y, h = reference.expert_rows(
        x, reference.weight(w13, 0), reference.weight(w2, 0), beta=4.0, linear_beta=25.0, activation="exact"
    )
    assert_close("h", h, golden["expert.h"], atol=1e-4, rtol=1e-5)
    assert_close("y", y, golden["expert.y"], atol=1e-3, rtol=1e-5)
    ids, one = torch.zeros(6, 1, dtype=torch.int32), torch.ones(6, 1)
    assert_close("experts", moe.experts(x.float(), ids, one, w13, w2), golden["expert.y"], atol=1e-3, rtol=1e-5)
    # h rounded to bf16 and y rounded to bf16: each 2^-8 of what stands there
    rounded = moe.experts(x, ids, one, w13, w2, activation="bf16")
    assert relative_error(rounded, golden["expert.y"]) < 2**-7


def test_golden_layer() -> None:
    """Router weights in, routed sum out, through the norm and the up-projection, plus the golden's shared experts."""
    states, weights = tiny_states(), tiny_weights()
    name = "model.layers.1.block_sparse_moe."
    x = states["layer1.mlp_mix"]
    norm = weights["model.layers.1.post_attention_layernorm.weight"].float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm
    stacked = [
        torch.stack([weights[f"{name}experts.{e}.{w}.{part}"] for e in range(16)])
        for w in ("w1", "w3", "w2")
        for part in ("weight_packed", "weight_scale")
    ]
    z = x @ weights[name + "routed_expert_down_proj.weight"].float().T
    routed_sum = moe.experts(
        z,
        states["layer1.topk_ids"],
        states["layer1.topk_weights"],
        *moe.pack_mxfp4(*stacked),
        norm_weight=weights[name + "routed_expert_norm.weight"],
    )
    got = routed_sum @ weights[name + "routed_expert_up_proj.weight"].float().T + states["layer1.shared_out"]
    assert_close("mlp output", got, states["layer1.mlp_out"], atol=5e-5)


@pytest.mark.parametrize("fmt", FORMATS)
def test_pack_and_unpack_are_inverse(fmt: str) -> None:
    raw = raw_weights(fmt)
    w13, w2 = pack(fmt, raw)
    assert (w13.rows, w13.cols, w13.num_experts) == (2 * INNER, WIDTH, EXPERTS)
    assert (w2.rows, w2.cols, w2.num_experts) == (WIDTH, INNER, EXPERTS)
    for i, (got, want) in enumerate(zip(moe.unpack(w13, w2), raw, strict=True)):
        assert_equal(f"tensor {i}", got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("cuts", [[0, 6], [0, 3, 6], [0, 1, 2, 5, 6]])
def test_expert_ranges_add_up(cuts: list[int]) -> None:
    raw = raw_weights("mxfp4")
    x, ids, weights = routed(9)
    whole = moe.experts(x, ids, weights, *pack("mxfp4", raw))
    local, indexed = torch.zeros_like(whole), torch.zeros_like(whole)
    for first, last in itertools.pairwise(cuts):
        share = pack("mxfp4", tuple(w[first:last].contiguous() for w in raw))
        local += moe.experts(x, ids, weights, *share, expert_range=(first, last))
        indexed += moe.experts(x, ids, weights, *pack("mxfp4", raw), expert_range=(first, last))
    assert_close("weights of the range", local, whole, **CLOSE)
    assert_close("weights of all", indexed, whole, **CLOSE)
    # the norm is not linear: it belongs after the complete sum
    norm = torch.rand(WIDTH)
    normed = moe.experts(x, ids, weights, *pack("mxfp4", raw), norm_weight=norm)
    want = whole.double() / torch.sqrt(whole.double().pow(2).mean(-1, keepdim=True) + 1e-5) * norm
    assert_close("normed", normed, want, atol=1e-5, rtol=1e-5)


def test_tokens_do_not_depend_on_each_other() -> None:
    packed = pack("mxfp4", raw_weights("mxfp4"))
    x, ids, weights = routed(16)
    whole = moe.experts(x, ids, weights, *packed)
    for t in range(16):
        one = moe.experts(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], *packed)
        assert_close(f"token {t}", whole[t : t + 1], one, **CLOSE)


def test_fp8_activations_are_quantised_as_documented() -> None:
    raw = raw_weights("bf16")
    w13, w2 = pack("bf16", raw)
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense13, dense2 = reference.weight(w13, 2), reference.weight(w2, 2)
    options = {"beta": 4.0, "linear_beta": 25.0}
    y, h = reference.expert_rows(x, dense13, dense2, activation="fp8", **options)
    values, scale = quant.fp8_per_token_group(x, group=WIDTH)
    x8 = values.float() * scale
    want_h = situ64(x8.double() @ dense13[:INNER].double().T, x8.double() @ dense13[INNER:].double().T)
    assert_close("h before quantisation", h, want_h, atol=1e-5, rtol=1e-5)
    h8 = reference.h_as_fed(h).double()  # from fp32, never through bf16
    assert_close("y", y, h8 @ dense2.double().T, atol=1e-5, rtol=1e-5)

    ids, one = torch.full((7, 1), 2, dtype=torch.int32), torch.ones(7, 1)
    assert_equal("bf16 in, fp8 activations", moe.experts(x, ids, one, w13, w2), y.bfloat16())
    exact, _ = reference.expert_rows(x, dense13, dense2, activation="exact", **options)
    assert 5e-3 < relative_error(y, exact) < 8e-2  # about 4.5e-2: design figure for two GEMMs with E4M3 activations
    assert relative_error(moe.experts(x, ids, one, w13, w2, activation="bf16"), exact) < 8e-3
    for activation in moe.ACTIVATIONS:  # float32 is exact whatever is asked
        assert_equal("float32", moe.experts(x.float(), ids, one, w13, w2, activation=activation), exact)


def test_h_has_one_power_of_two_a_row() -> None:
    g = torch.Generator().manual_seed(0)
    h = torch.randn(50, 200, generator=g)
    h[10:20] *= torch.exp2(torch.randint(-30, 1, (10, 200), generator=g))  # columns of all sizes
    h[20:30, 64:128] *= 2.0**-12  # groups far below their row
    h[30:40] *= 2.0**-120
    h[40], h[41, :64], h[42] = 0.0, 0.0, 448.0
    got = reference.h_as_fed(h).double()
    power = torch.exp2(torch.ceil(torch.log2(h.double().abs().amax(-1, keepdim=True) / 448)))
    scaled = (h.double() / power).nan_to_num()
    want = scaled.float().to(torch.float8_e4m3fn).double()
    normal = scaled.abs() >= 2.0**-6
    assert_equal("codes", torch.where(normal, (got / power).nan_to_num(), 0.0), torch.where(normal, want, 0.0))
    # below, a code rounded twice may be the neighbour
    assert ((got - want * power.nan_to_num()).abs() <= 2.0**-9 * power).all()


def test_out_and_strided_rows() -> None:
    packed = pack("fp8", raw_weights("fp8"))
    x, ids, weights = routed(5)
    wide = torch.full((5, WIDTH + 7), float("nan"))
    wide[:, 3 : 3 + WIDTH] = x
    out = torch.full((5, WIDTH + 64), float("nan"))[:, :WIDTH]
    want = moe.experts(x, ids, weights, *packed)
    assert moe.experts(wide[:, 3 : 3 + WIDTH], ids, weights, *packed, out=out) is out
    assert_equal("out", out.contiguous(), want)
    assert moe.workspace_size(5, TOP_K, *packed) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finalize(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 64, generator=generator).to(dtype)
    rows[11] = float("nan")  # a row that nothing points at
    index = torch.tensor([[0, 5, 3], [-1, -1, -1], [10, -1, 2]], dtype=torch.int32)
    weights = torch.rand(3, 3, generator=generator)
    weights[index < 0] = float("nan")
    norm = torch.rand(64, generator=generator)
    want = torch.stack(
        [sum(weights[t, j].double() * rows[i].double() for j, i in enumerate(r) if i >= 0) + torch.zeros(64).double()
         for t, r in enumerate(index.tolist())]
    )  # fmt: skip
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 2**-8}
    got = moe.finalize(rows, index, weights, None)
    assert got.dtype == dtype
    assert_close("sum", got, want, **tolerance)
    want = want / torch.sqrt(want.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.double()
    assert_close("normed", moe.finalize(rows, index, weights, norm), want, **tolerance)
    assert moe.finalize(rows, index[:0], weights[:0], norm).shape == (0, 64)


def call_with(name: str, value) -> torch.Tensor:
    x, ids, weights = routed(2)
    w13, w2 = pack("mxfp4", raw_weights("mxfp4"))
    arguments = {"x": x, "topk_ids": ids, "topk_weights": weights, "w13": w13, "w2": w2}
    arguments[name] = value
    return moe.experts(**arguments)


OTHER_FORMAT = pack("fp8", raw_weights("fp8"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(2, 128), r"w13: expected 128 columns \(x has 128\), got 160"),
        ("topk_ids", torch.zeros(2, 3), "topk_ids: expected dtype int32, got float32"),
        ("topk_weights", torch.zeros(2, 2), r"topk_weights: expected shape \[2, 3\], got \[2, 2\]"),
        ("activation", "fp4", 'activation: expected "fp8" or "bf16", got \'fp4\''),
        ("w2", OTHER_FORMAT[1], "w2: expected format mxfp4, got fp8"),
        ("w2", OTHER_FORMAT[0], r"w2: expected \[160, 96\] an expert, got \[192, 160\]"),
        ("expert_range", (4, 9), r"expert_range: expected .*6 held.*, got \(4, 9\)"),
        ("norm_weight", torch.zeros(96), r"norm_weight: expected shape \[160\], got \[96\]"),
        ("out", torch.zeros(2, 160).bfloat16(), "out: expected dtype float32, got bfloat16"),
    ],
)
def test_errors_name_the_argument(name: str, value, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call_with(name, value)


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (1, lambda w: w[:, :, :3].contiguous(), r"w1_scale: expected shape \[6, 96, 5\], got \[6, 96, 3\]"),
        (2, lambda w: w[:5], r"w3: expected shape \[6, 96, 80\], got \[5, 96, 80\]"),
        (4, lambda w: w.float(), "w2: expected dtype uint8, got float32"),
        (5, lambda w: torch.full_like(w, 255), "w2_scale: expected E8M0 bytes 0 to 254, got 2880 bytes of 255"),
        (0, lambda w: w[:, :90], "w1: expected an expert width .* multiple of 32, got 90"),
    ],
)
def test_pack_errors_name_the_argument(position: int, change, message: str) -> None:
    raw = list(raw_weights("mxfp4"))
    raw[position] = change(raw[position])
    with pytest.raises(ValueError, match=message):
        moe.pack_mxfp4(*raw)


def test_weights_must_be_packed() -> None:
    with pytest.raises(TypeError, match="w13: expected ExpertWeights from a pack function, got Tensor"):
        call_with("w13", torch.zeros(1))
