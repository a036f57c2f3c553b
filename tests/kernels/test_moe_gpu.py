"""The expert kernels on the GPU, stage by stage: each stage is compared with fp64 on what the kernel itself gave it.

Bounds (2-norm, relative). First product read out as bf16: the rounding alone is 1.66e-3; FP8 x FP8 sums 32 columns in
the tensor cores' short accumulators: 5e-3, else 2.5e-3. Second product on the kernel's own h: 3.5e-3. The whole FP8
operation has no bound of its own: a code of h that rounds the other way makes 1e-2 of a difference of 0.2%.
"""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import moe, routing
from kimi_kernels.reference import moe as reference
from kimi_kernels.testing.compare import assert_equal, relative_error
from tests.kernels.moe_gpu_cases import (
    PAIRS,
    Call,
    Experts,
    as_fed,
    single,
    situ64,
    skewed,
    tokens,
    uniform,
    weights_of,
)

pytestmark = pytest.mark.gpu
NAN = float("nan")


def assert_stages(call: Call) -> None:
    e, k = call.experts, call.ids.shape[1]
    fed = as_fed(call.x, call.activation)
    sums = torch.zeros(3, 2, dtype=torch.float64, device="cuda")  # squared errors and norms of the three stages
    seen = 0
    for piece in call.pieces():
        expert, row, count, _ = piece
        seen += count
        pair = call.dispatch.pairs[row : row + count].long()
        assert (call.ids.flatten()[pair] == expert).all()
        want = fed[pair // k] @ e.dense(0, expert).T
        got = call.first_product[row : row + count].double()
        h, codes = call.hidden(piece)
        want_h = situ64(*got.chunk(2, 1))
        want_rows = h @ e.dense(1, expert).T
        for stage, (a, b) in enumerate(((got, want), (h, want_h), (call.rows[pair].double(), want_rows))):
            sums[stage] += torch.stack([(a - b).square().sum(), b.square().sum()])
        if call.activation == "fp8":
            top = (codes & 0x7F).amax(-1)  # 0x76: 224, 0x7E: 448
            assert (((top >= 0x76) & (top <= 0x7E)) | (top == 0)).all(), f"a row of h must pass 224, piece {piece}"
    assert seen == int(((call.ids >= 0) & (call.ids < e.num_experts)).sum())
    first, hidden, second = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
    assert first < (5e-3 if (e.fmt, call.activation) == ("fp8", "fp8") else 2.5e-3), f"first product {first:.2e}"
    # E4M3 keeps 3 bits: 2^-4 at most, 2.6e-2 for values spread over a binade; a few values that carry the norm may fall
    # worse than that. bf16 keeps 8. The reference starts from rounded inputs.
    rounding = (4e-2 if seen * e.inner > 1000 else 2**-4) if call.activation == "fp8" else 5e-3
    assert hidden < rounding, f"SiTU and its rounding {hidden:.2e}"
    assert second < 3.5e-3, f"second product {second:.2e}"


@pytest.mark.parametrize(("fmt", "activation"), PAIRS)
@pytest.mark.parametrize(("inner", "width"), [(256, 256), (96, 96), (192, 160), (32, 32), (320, 416)])
@pytest.mark.parametrize("count", [1, 3, 16, 64, 257])
def test_stages_at_odd_sizes(fmt: str, activation: str, inner: int, width: int, count: int) -> None:
    e = Experts(fmt, 8, inner, width)
    for ids in (uniform(count, 8, 3), skewed(count, 8, 3), single(count, 8, 3)):
        assert_stages(Call(e, tokens(count, width), ids, activation))


@pytest.mark.parametrize(("fmt", "activation"), PAIRS)
def test_stages_at_k3_widths(fmt: str, activation: str) -> None:
    e = Experts(fmt, 16, 3072, 3584)
    for count in (1, 3, 16, 64, 257, 1024):
        assert_stages(Call(e, tokens(count, 3584), uniform(count, 16, 8), activation))
    assert_stages(Call(e, tokens(100, 3584), skewed(100, 16, 8), activation))


@pytest.mark.parametrize(("fmt", "activation"), PAIRS)
@pytest.mark.parametrize("experts", [896, 112])
def test_many_experts(fmt: str, activation: str, experts: int) -> None:
    e = Experts(fmt, experts, 64, 96)
    for count in (1, 16, 257, 1024):
        assert_stages(Call(e, tokens(count, 96), uniform(count, experts, 16), activation))


@pytest.mark.parametrize("activation", moe.ACTIVATIONS)
@pytest.mark.parametrize(("low", "high"), [(0, 255), (100, 127), (111, 127), (0, 20), (230, 254)])
def test_adversarial_scales(activation: str, low: int, high: int) -> None:
    """Spreads up to 14 binades fold into the values, wider ones take a path of their own; both are exact."""
    e = Experts("mxfp4", 4, 256, 256, scales=(low, high))
    if (low, high) == (0, 255):
        for scale in e.raw[1::2]:
            scale[:, ::3] = 127  # rows of one scale among those of all
            scale[:, 1] = 0
        e.pack()
    x_scale = 1e-8 if high > 200 else 1.0  # FP8 scales start at 1e-10 / 448
    for count in (3, 33, 300):
        x = tokens(count, 256, scale=x_scale)
        call, fed = Call(e, x, uniform(count, 4, 2), activation), as_fed(x, activation)
        for expert, row, n, _ in call.pieces():
            pair = call.dispatch.pairs[row : row + n].long()
            want = fed[pair // 2] @ e.dense(0, expert).T
            got = call.first_product[row : row + n].double()
            finite = (want.abs() < 3e38).all(0)  # columns of the product whose sums fp32 can hold
            assert torch.isfinite(got[:, finite]).all()
            # Per output column: one of 2^100 must not hide the others; below 2^-126 results are subnormal. BF16 rounds
            # to 2^-9; the tensor cores cut FP8 terms at 2^-13 of the largest, which shows where terms cancel.
            norm = want.square().sum(0).sqrt()
            terms = (fed[pair // 2].abs() @ e.dense(0, expert).abs().T).square().sum(0).sqrt()
            error = (got - want).square().sum(0).sqrt()
            columns = finite & (norm > 1e-36)
            assert (error[columns] < 2.0**-8 * norm[columns] + 2.0**-11 * terms[columns]).all()


@pytest.mark.parametrize("activation", moe.ACTIVATIONS)
def test_the_quantiser_is_exact(activation: str) -> None:
    """Experts whose gate rows are the identity give x back as it was fed: the first product has one term a column."""
    e = Experts("mxfp4", 2, 256, 256)
    one = torch.zeros(2, 256, 128, dtype=torch.uint8, device="cuda")
    row = torch.arange(256, device="cuda")
    one[:, row, row // 2] = (2 << 4 * (row % 2)).to(torch.uint8)  # E2M1 code 2 is 1.0
    e.raw = (one, torch.full((2, 256, 8), 127, dtype=torch.uint8, device="cuda"), *e.raw[2:])
    e.pack()
    for count in (1, 20, 300):
        x = tokens(count, 256) * torch.rand(count, 1, device="cuda").bfloat16()
        x[count // 2, :128] = 0.0
        call = Call(e, x, uniform(count, 2, 1), activation)
        fed = as_fed(x, activation).float().bfloat16()
        assert_equal("x", call.first_product[:, :256], fed[call.dispatch.pairs.long()])


@pytest.mark.parametrize(("fmt", "activation"), PAIRS)
def test_a_call_is_the_composition_of_its_parts(fmt: str, activation: str) -> None:
    e = Experts(fmt, 8, 192, 160)
    for count in (1, 40, 300):
        x, ids = tokens(count, 160), skewed(count, 8, 3)
        weights = weights_of(ids)
        call = Call(e, x, ids, activation)
        index = torch.arange(ids.numel(), dtype=torch.int32, device="cuda").view(ids.shape)
        want = moe.finalize(call.rows, index.masked_fill(ids < 0, -1), weights, None)
        out = torch.full((count, 160), NAN, dtype=torch.bfloat16, device="cuda")
        got = moe.experts(
            x, ids, weights, *e.packed, activation=activation, out=out, workspace=call.workspace.fill_(255)
        )
        assert got is out
        assert_equal("experts", got, want)
        tiles = routing.dispatch(ids, 8)  # tiles of 192, which the kernels cut further
        assert_equal(
            "other tiles", moe.experts(x, ids, weights, *e.packed, activation=activation, dispatch=tiles), want
        )
        norm = torch.rand(160, device="cuda")
        want = moe.finalize(call.rows, index.masked_fill(ids < 0, -1), weights, norm)
        # the rows' memory was written over by the calls above, with the same rows
        normed = moe.experts(x, ids, weights, *e.packed, activation=activation, norm_weight=norm)
        assert relative_error(normed, want) < 3e-3


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8"])
def test_bf16_activations_lose_no_more_than_twice_plain_torch(fmt: str) -> None:
    e = Experts(fmt, 8, 256, 384)
    for count in (5, 300):
        x, ids = tokens(count, 384), uniform(count, 8, 3)
        weights = weights_of(ids)
        settings = {"beta": 4.0, "linear_beta": 25.0, "expert_range": None}
        theirs = reference.experts(x, ids, weights, *e.plain, activation="bf16", **settings).bfloat16()
        exact = torch.zeros(count, 384, dtype=torch.float64, device="cuda")
        for expert in range(8):
            token, choice = torch.where(ids == expert)
            h = situ64(*(x[token].double() @ e.dense(0, expert).T).chunk(2, 1))
            exact.index_add_(0, token, (h @ e.dense(1, expert).T) * weights[token, choice].double()[:, None])
        got = moe.experts(x, ids, weights, *e.packed, activation="bf16")
        assert relative_error(got, exact) <= 2 * relative_error(theirs, exact)


@pytest.mark.parametrize(("fmt", "activation"), PAIRS)
def test_repeatable_and_independent_of_the_batch(fmt: str, activation: str) -> None:
    e = Experts(fmt, 16, 384, 512)
    x, ids = tokens(8192, 512), uniform(8192, 16, 4)
    weights = weights_of(ids)
    run = lambda rows: moe.experts(x[rows], ids[rows], weights[rows], *e.packed, activation=activation)  # noqa: E731
    everything = run(slice(None))
    assert_equal("again", run(slice(None)), everything)
    for rows in (slice(0, 1), slice(8191, 8192), slice(100, 117), slice(5, 262), slice(1000, 5000)):
        assert_equal(f"tokens {rows.start} to {rows.stop}", run(rows), everything[rows])


def test_expert_slices_add_up() -> None:
    e = Experts("mxfp4", 24, 96, 128)
    x, ids = tokens(50, 128), uniform(50, 24, 6)
    weights = weights_of(ids)
    whole = moe.experts(x, ids, weights, *e.packed, activation="bf16").float()
    parts = []
    for first, last in ((0, 5), (5, 16), (16, 24)):
        own = moe.pack_mxfp4(*(t[first:last] for t in e.raw))
        part = moe.experts(x, ids, weights, *own, activation="bf16", expert_range=(first, last))
        full = moe.experts(x, ids, weights, *e.packed, activation="bf16", expert_range=(first, last))
        assert_equal("weights of the slice or of all", part, full)
        parts.append(part.float())
    assert relative_error(sum(parts), whole) < 4e-3  # each part is rounded to bf16


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8"])
def test_unpack_inverts_pack(fmt: str) -> None:
    e = Experts(fmt, 5, 96, 416, scales=(0, 255))
    for name, got, want in zip(("w1", "s1", "w3", "s3", "w2", "s2"), moe.unpack(*e.packed), e.raw, strict=True):
        assert_equal(name, got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
