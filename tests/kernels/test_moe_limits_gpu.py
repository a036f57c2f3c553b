"""The expert kernels at their limits: empty experts, large counts, guard rows, graphs, memory, errors."""

from __future__ import annotations

import random

import pytest
import torch

from kimi_kernels import KernelUnavailableError, moe, routing
from kimi_kernels.reference import moe as reference
from kimi_kernels.testing.compare import assert_equal, relative_error
from tests.kernels.moe_gpu_cases import PAIRS, Experts, skewed, tokens, uniform, weights_of

pytestmark = pytest.mark.gpu
NAN = float("nan")
# Two roundings to E4M3 that may fall either way; the stages have bounds of their own in test_moe_gpu.py.
WHOLE = {"fp8": 6e-2, "bf16": 8e-3}


def expected(e: Experts, x, ids, weights, activation: str = "bf16") -> torch.Tensor:
    weights = weights.nan_to_num()
    return reference.experts(
        x, ids, weights, *e.plain, activation=activation, beta=4.0, linear_beta=25.0, expert_range=None
    )


def run(e: Experts, x, ids, weights, activation: str = "bf16", **settings) -> torch.Tensor:
    out = torch.full(x.shape, NAN, dtype=torch.bfloat16, device="cuda")
    return moe.experts(x, ids, weights, *e.packed, activation=activation, out=out, **settings)


@pytest.mark.parametrize(("fmt", "activation"), PAIRS)
def test_empty_experts(fmt: str, activation: str) -> None:
    e = Experts(fmt, 16, 96, 128)
    all_to_four = uniform(40, 4, 4)
    middle = uniform(40, 14, 4) + 1
    last = torch.full((40, 4), -1, dtype=torch.int32, device="cuda")
    last[:, 2] = 15
    nothing = torch.full((40, 4), -1, dtype=torch.int32, device="cuda")
    for ids in (all_to_four, all_to_four[:1], middle, last, nothing):
        x, weights = tokens(len(ids), 128), weights_of(ids)
        got, want = run(e, x, ids, weights, activation), expected(e, x, ids, weights, activation)
        assert relative_error(got, want) < WHOLE[activation] if want.any() else not got.any()
    assert run(e, tokens(0, 128), nothing[:0], weights_of(nothing)[:0], activation).shape == (0, 128)


@pytest.mark.parametrize("activation", moe.ACTIVATIONS)
def test_every_count_gives_the_same_rows(activation: str) -> None:
    """All switch points: dispatch by one block up to 8,192 pairs, piece sizes at 6 and 20 rows an expert."""
    e = Experts("mxfp4", 16, 64, 96)
    x, ids = tokens(4098, 96), skewed(4098, 16, 4)
    weights = weights_of(ids)
    full = run(e, x, ids, weights, activation)
    assert relative_error(full, expected(e, x, ids, weights, activation)) < WHOLE[activation]
    counts = [*range(1, 301), *range(511, 515), *range(1023, 1027), *range(2046, 2051), *range(4095, 4099)]
    for count in counts:
        got = run(e, x[:count], ids[:count], weights[:count], activation)
        assert torch.equal(got, full[:count]), f"{count} tokens"


def test_guard_rows_and_a_thousand_random_calls() -> None:
    rng, e = random.Random(0), Experts("mxfp4", 12, 64, 96)
    x, ids = tokens(700, 96), skewed(700, 12, 3)
    weights = weights_of(ids)
    full = run(e, x, ids, weights, "fp8")
    sizes = {n: moe.workspace_size(n, 3, *e.packed) for n in (700,)}
    memory = torch.full((sizes[700] + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
    frame = torch.full((720, 160), NAN, dtype=torch.bfloat16, device="cuda")
    for _ in range(1000):
        start, count = rng.randrange(600), rng.randrange(1, 101)
        rows, size = slice(start, start + count), moe.workspace_size(count, 3, *e.packed)
        memory.fill_(0xFF)
        frame.fill_(NAN)
        out = frame[8 : 8 + count, 32:128]
        moe.experts(x[rows], ids[rows], weights[rows], *e.packed, out=out, workspace=memory[:size])
        assert torch.equal(out, full[rows])
        assert int((memory[size:] != 0xFF).sum()) == 0, "beyond the workspace"
        out.fill_(NAN)
        assert frame.isnan().all(), "beside the output"


def test_strided_rows_and_padding() -> None:
    e = Experts("fp8", 8, 128, 160)
    ids = uniform(32, 8, 3)
    weights, wide = weights_of(ids), tokens(32, 512)
    x = wide[:, 64:224]
    want = run(e, x.contiguous(), ids, weights, "fp8")
    assert_equal("strided x", run(e, x, ids, weights, "fp8"), want)
    padded = ids.clone()
    padded[17:] = -1  # as routing.topk leaves rows beyond num_tokens
    live = torch.tensor([17], dtype=torch.int32, device="cuda")
    work = routing.dispatch(padded, 8, num_tokens=live)
    got = run(e, x, padded, weights, "fp8", dispatch=work)
    assert_equal("17 of 32", got[:17], want[:17])
    assert not got[17:].any()


@pytest.mark.slow
@pytest.mark.parametrize("count", [18_723, 18_724, 21_846, 37_448, 37_449, 37_513, 65_536])
def test_offsets_beyond_32_bits(count: int) -> None:
    """16 x tokens x 3584 passes 2^31 at 37,449 tokens; the last rows equal a small call of the same tokens."""
    e = Experts("mxfp4", 4, 64, 3584)
    x, ids = tokens(count, 3584), torch.randint(0, 4, (count, 16), dtype=torch.int32, device="cuda")
    weights = weights_of(ids)
    got = run(e, x, ids, weights, "fp8")
    for rows in (slice(0, 50), slice(count // 2, count // 2 + 50), slice(count - 50, count)):
        assert_equal(f"rows from {rows.start}", got[rows], run(e, x[rows], ids[rows], weights[rows], "fp8"))


@pytest.mark.parametrize("activation", moe.ACTIVATIONS)
def test_odd_scales_and_inputs(activation: str) -> None:
    e = Experts("fp8", 4, 128, 256)
    values = [1.0, 1.5, 0.3, 1e-8, 0.0, 1e-40]
    for scale in e.raw[1::2]:
        scale[:] = torch.tensor(values, device="cuda")[torch.arange(scale.numel(), device="cuda") % 6].view(scale.shape)
    e.pack()
    x, ids = tokens(20, 256, scale=1e-2), uniform(20, 4, 2)
    x[3] = 0.0
    x[4, :128] = 0.0
    weights = weights_of(ids)
    got = run(e, x, ids, weights, activation)
    assert torch.isfinite(got).all()
    assert relative_error(got, expected(e, x, ids, weights, activation)) < WHOLE[activation]
    assert not got[3].any()
    x[7, 5] = NAN
    poisoned = run(e, x, ids, weights, activation)
    assert poisoned[7].isnan().any()
    others = torch.arange(20, device="cuda") != 7
    assert_equal("other tokens", poisoned[others], got[others])


def test_a_captured_graph_follows_the_routing() -> None:
    e = Experts("mxfp4", 32, 128, 256)
    x, ids = tokens(48, 256), uniform(48, 32, 4)
    weights = weights_of(ids)
    workspace = torch.empty(moe.workspace_size(48, 4, *e.packed), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(x)
    call = lambda: moe.experts(x, ids, weights, *e.packed, out=out, workspace=workspace)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(5):
        ids.copy_(skewed(48, 32, 4, seed) if seed % 2 else uniform(48, 32, 4, seed))
        x.copy_(tokens(48, 256, seed))
        weights.copy_(weights_of(ids, seed))
        want = moe.experts(x, ids, weights, *e.packed)
        out.fill_(NAN)
        graph.replay()
        assert_equal(f"replay {seed}", out, want)


def test_weights_stay_packed() -> None:
    """No buffer of decoded weights: packed bytes within 2% of the checkpoint's, a call needs its workspace alone."""
    e = Experts("mxfp4", 4, 3072, 3584)
    packed = sum(w.data.nbytes for w in e.packed)
    assert packed <= 1.02 * sum(t.nbytes for t in e.raw)
    x, ids = tokens(256, 3584), uniform(256, 4, 2)
    weights = weights_of(ids)
    size = moe.workspace_size(256, 2, *e.packed)
    run(e, x, ids, weights, "fp8")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(e, x, ids, weights, "fp8")
    assert torch.cuda.max_memory_allocated() - before < size + x.nbytes + 2**20


@pytest.mark.parametrize("activation", moe.ACTIVATIONS)
def test_only_our_kernels_run(activation: str) -> None:
    e = Experts("mxfp4", 16, 64, 96)
    for count in (1, 3, 16, 64, 257, 1024, 8192):
        x, ids = tokens(count, 96), uniform(count, 16, 4)
        weights, out = weights_of(ids), torch.empty(count, 96, dtype=torch.bfloat16, device="cuda")
        moe.experts(x, ids, weights, *e.packed, activation=activation, out=out)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            moe.experts(x, ids, weights, *e.packed, activation=activation, out=out)
            torch.cuda.synchronize()
        names = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
        kernels = {name for name in names if "kimi::" in name}
        assert len(kernels) >= 4
        assert names == kernels, f"foreign: {names - kernels}"


def test_errors_name_the_argument() -> None:
    e = Experts("mxfp4", 4, 64, 96)
    x, ids = tokens(3, 96), uniform(3, 4, 2)
    weights = weights_of(ids)
    with pytest.raises((TypeError, ValueError), match=r"topk_ids"):
        moe.experts(x, ids.long(), weights, *e.packed)
    with pytest.raises((TypeError, ValueError), match=r"\bx\b"):
        moe.experts(x.float(), ids, weights, *e.packed)
    with pytest.raises(ValueError, match="topk_weights"):
        moe.experts(x, ids, weights[:2], *e.packed)
    with pytest.raises(ValueError, match="workspace"):
        moe.experts(x, ids, weights, *e.packed, workspace=torch.empty(128, dtype=torch.uint8, device="cuda"))
    with pytest.raises(ValueError, match=r"w13: expected 64 columns"):
        moe.experts(x[:, :64].contiguous(), ids, weights, *e.packed)
    with pytest.raises(ValueError, match=r'w13: expected layout "sm90"'):
        moe.experts(x, ids, weights, *e.plain)
    with pytest.raises(ValueError, match="expert_range"):
        moe.experts(x, ids, weights, *e.packed, expert_range=(3, 9))
    assert issubclass(KernelUnavailableError, RuntimeError)
