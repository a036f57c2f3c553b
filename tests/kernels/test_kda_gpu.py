"""KDA decode on the GPU: against fp64, and what it must leave alone. Verify and commit: test_kda_verify_gpu.py.

Tolerance: against an fp64 recurrence that rounds nothing, the error (2-norm) may be at most twice that of the plain
torch reference on the same bf16 inputs: both are fp32 with one rounding at the end, in different order.
"""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import kda
from kimi_kernels.reference import kda as reference
from kimi_kernels.testing.compare import assert_equal, relative_error
from tests.kernels.kda_gpu_cases import DIM, Pools, Tokens, Weights, decode, exact, int32, pools, tokens, weights

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def plain(x: Tokens, w: Weights, pool: Pools, slots: torch.Tensor) -> torch.Tensor:
    inputs = reference.Inputs(*x.args(), *w.args(), -5.0, 1e-5)
    return reference.decode(inputs, pool.state, pool.conv, slots, None, None, None, None)


def assert_as_good(name: str, got: torch.Tensor, plain_result: torch.Tensor, want: torch.Tensor) -> None:
    ours, theirs = relative_error(got, want), relative_error(plain_result, want)
    assert ours <= 2 * theirs + 1e-7, f"{name}: error {ours:.2e}, plain torch {theirs:.2e}"


def assert_others_unchanged(pool: Pools, before: Pools, slots: list[int]) -> None:
    for name, got, want in (("state", pool.states, before.states), ("conv_state", pool.convs, before.convs)):
        touched = torch.zeros(got.shape[:2], dtype=torch.bool, device="cuda")
        touched[slots, 1] = True
        assert_equal(f"{name} of other slots and layers", got[~touched], want[~touched])


@pytest.mark.parametrize("heads", [1, 3, 12, 16, 96])
@pytest.mark.parametrize("padding", [7, 64])
def test_one_step(heads: int, padding: int) -> None:
    x, w, slots = tokens(5, heads, padding), weights(heads), int32(4, 1, 8, 6, 2)
    before = pools(9, heads)
    pool, other = before.clone(), before.clone()
    out = decode(x, w, pool, slots)
    want, after = exact(before, slots).step(x, w)
    plain_out = plain(x, w, other, slots)
    assert_as_good("out", out, plain_out, want)
    at = slots.long()
    assert_as_good("state", pool.state[at], other.state[at], after.state)
    assert relative_error(after.state.transpose(-1, -2), after.state) > 0.1  # else a transposed state would pass
    assert_equal("conv_state", pool.conv[at], after.conv.bfloat16())
    assert_others_unchanged(pool, before, slots.tolist())
    contiguous = Tokens(*(t.contiguous() for t in x.args()))
    again = before.clone()
    assert_equal("out from contiguous rows", decode(contiguous, w, again, slots), out)


def test_two_thousand_steps() -> None:
    heads, slots = 2, int32(2, 3, 1)
    w, pool = weights(heads), pools(4, heads)
    other, state = pool.clone(), exact(pool, slots)
    for i in range(1, 2001):
        x = tokens(3, heads)
        out, plain_out = decode(x, w, pool, slots), plain(x, w, other, slots)
        want, state = state.step(x, w)
        if i in (1, 2, 5, 50, 500, 2000):
            assert_as_good(f"out, step {i}", out, plain_out, want)
            assert_as_good(f"state, step {i}", pool.state[slots.long()], other.state[slots.long()], state.state)


def test_fresh_slots_read_nothing() -> None:
    heads = 12
    x, w, slots = tokens(4, heads), weights(heads), int32(3, 1, 2, 5)
    fresh = torch.tensor([True, False, True, False], device="cuda")
    clean = pools(6, heads)
    clean.state[slots[fresh].long()] = 0.0
    clean.conv[slots[fresh].long()] = 0.0
    dirty = clean.clone()
    dirty.state[slots[fresh].long()] = float("nan")
    dirty.conv[slots[fresh].long()] = float("nan")
    assert_equal("out", decode(x, w, dirty, slots, fresh=fresh), decode(x, w, clean, slots))
    assert_equal("state", dirty.states, clean.states)
    assert_equal("conv_state", dirty.convs, clean.convs)


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_padding_touches_nothing(rows: int) -> None:
    heads, live = 3, rows - 1
    x, w = tokens(rows, heads), weights(heads)
    order = torch.randperm(rows, device="cuda").int() + 1
    slots = torch.where(torch.arange(rows, device="cuda") == 1, 0, order)
    before = pools(rows + 2, heads)
    before.states[0], before.convs[0] = float("nan"), float("nan")
    pool, alone = before.clone(), before.clone()
    out = decode(x, w, pool, slots, num_tokens=int32(live))
    real = [i for i in range(live) if i != 1]
    assert_equal("out", out[real], decode(x.rows(real), w, alone, slots[real]))
    assert_equal("states", pool.states, alone.states)
    assert_equal("conv states", pool.convs, alone.convs)
    assert_others_unchanged(pool, before, slots[real].tolist())
    assert not out[[1, *range(live, rows)]].any()


def test_graph_replay_with_changing_slots() -> None:
    heads, rows = 12, 4
    w, x, slots, live = weights(heads), tokens(rows, heads), int32(1, 2, 3, 4), int32(rows)
    pool = pools(12, heads)
    eager = pool.clone()
    decode(x, w, pool.clone(), slots)  # builds the module outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(x, w, pool, slots, num_tokens=live)
    for step in range(6):
        new = tokens(rows, heads)
        chosen, count = torch.randperm(11, device="cuda")[:rows].int() + 1, int32(rows - step % 2)
        for target, source in zip((*x.args(), slots, live), (*new.args(), chosen, count), strict=True):
            target.copy_(source)
        graph.replay()
        assert_equal(f"out, replay {step}", out, decode(new, w, eager, chosen, num_tokens=count))
    assert_equal("states", pool.states, eager.states)
    assert_equal("conv states", pool.convs, eager.convs)


def test_683_sequences_of_96_heads() -> None:
    """More blocks than a 16-bit grid dimension holds, and state offsets beyond 2^31 elements."""
    heads, count = 96, 1400
    w = weights(heads)
    shape = (heads, DIM, DIM)
    state = torch.empty(count + 1, *shape, device="cuda").normal_(0, 0.3)
    conv = torch.randn(count + 1, 3, 3 * heads * DIM, device="cuda").bfloat16()
    assert state.numel() > 2**31
    slots = torch.arange(count, count - 683, -1, device="cuda", dtype=torch.int32)
    x = tokens(683, heads)
    parts = (slice(0, 300), slice(300, 683))
    kept = [(state[slots[p].long()].clone(), conv[slots[p].long()].clone()) for p in parts]
    out = kda.decode_(*x.args(), *w.args(), state, conv, slots)
    for part, (small, small_conv) in zip(parts, kept, strict=True):
        local = torch.arange(small.shape[0] + 1, device="cuda", dtype=torch.int32)[1:]
        small = torch.cat([small.new_zeros(1, *shape), small])
        small_conv = torch.cat([small_conv[:1], small_conv])
        assert_equal("out", kda.decode_(*x.rows(part).args(), *w.args(), small, small_conv, local), out[part])
        assert torch.equal(small[1:], state[slots[part].long()])
        assert torch.equal(small_conv[1:], conv[slots[part].long()])


@pytest.mark.parametrize("keys", ["nearly collinear", "identical"])
@pytest.mark.parametrize("forget", [-30.0, 0.0, 30.0])
@pytest.mark.parametrize("beta", [-30.0, 8.0, 30.0])
def test_extremes(keys: str, forget: float, beta: float) -> None:
    """Gates at both bounds (decay 1 and e^-5), beta at 0 and 1, keys that hardly differ from token to token."""
    heads, slots = 2, int32(1, 2)
    w, pool = weights(heads), pools(3, heads)
    other, state = pool.clone(), exact(pool, slots)
    direction = torch.randn(1, heads * DIM, device="cuda")
    for i in range(1, 201):
        x = tokens(2, heads)
        noise = 1e-3 if keys == "nearly collinear" else 0.0
        k = (direction + noise * torch.randn(2, heads * DIM, device="cuda")).bfloat16()
        x = Tokens(x.q, k, x.v, torch.full_like(x.f, forget), torch.full_like(x.beta, beta), x.gate)
        out, plain_out = decode(x, w, pool, slots), plain(x, w, other, slots)
        want, state = state.step(x, w)
        if i in (16, 64, 200):
            assert out.isfinite().all()
            assert_as_good(f"out, step {i}", out, plain_out, want)
            at = slots.long()
            assert_as_good(f"state, step {i}", pool.state[at], other.state[at], state.state)


def test_conv_window_at_every_batch_size() -> None:
    """The window moves by one row exactly once, however many blocks there are, and every run gives the same bits."""
    heads = 12
    w, before = weights(heads), pools(513, heads)
    x = tokens(512, heads)
    raw = torch.cat([x.q, x.k, x.v], dim=1)
    state = before.state.clone()
    for batch in (*range(1, 257), 512):
        slots = torch.randperm(512, device="cuda")[:batch].int() + 1
        want = before.conv.clone()
        want[slots.long()] = torch.cat([want[slots.long(), 1:], raw[:batch, None]], dim=1)
        first = None
        for _ in range(20 if batch in (1, 64, 65, 256, 512) else 2):
            conv = before.conv.clone()
            state.copy_(before.state) if first is None else None
            out = kda.decode_(*x.rows(slice(0, batch)).args(), *w.args(), state, conv, slots)
            assert torch.equal(conv, want), f"batch {batch}"
            if first is None:
                first = out
        state.copy_(before.state)
        again = kda.decode_(*x.rows(slice(0, batch)).args(), *w.args(), state, before.conv.clone(), slots)
        assert torch.equal(again, first), f"batch {batch}"


def test_results_do_not_depend_on_the_batch() -> None:
    heads = 12
    w, before = weights(heads), pools(301, heads)
    x = tokens(300, heads)
    slots = torch.arange(1, 301, device="cuda", dtype=torch.int32)
    pool = before.clone()
    out = decode(x, w, pool, slots)
    for row in (0, 17, 299):
        alone = before.clone()
        assert_equal("out", decode(x.rows([row]), w, alone, slots[[row]]), out[[row]])
        assert_equal("state", alone.state[row + 1], pool.state[row + 1])


def test_heads_are_independent() -> None:
    heads = 12
    x, w, before, slots = tokens(3, heads, 0), weights(heads), pools(4, heads), int32(1, 2, 3)
    order = torch.randperm(heads, device="cuda")

    def permute(t: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """The last dimension is parts * heads * n."""
        return t.unflatten(-1, (parts, heads, -1))[..., order, :].flatten(-3)

    out = decode(x, w, before.clone(), slots)
    moved_x = Tokens(*(permute(t) for t in x.args()))
    conv = w.conv_weight.view(3, heads, DIM, 4)[:, order].reshape(-1, 4).contiguous()
    moved_w = Weights(conv, w.a_log[order], permute(w.dt_bias), w.o_norm)
    moved = Pools(before.states[:, :, order], permute(before.convs, 3))
    assert_equal("out", decode(moved_x, moved_w, moved, slots), permute(out))


def test_zero_tokens() -> None:
    pool = pools(3, 2)
    before = pool.clone()
    assert decode(tokens(0, 2), weights(2), pool, int32()).shape == (0, 256)
    assert_equal("states", pool.states, before.states)


@pytest.mark.parametrize("whole", [False, True])
def test_zero_and_copy(whole: bool) -> None:
    before = pools(8, 3)
    before.states[2], before.convs[2] = float("nan"), float("inf")
    pool = before.clone()
    pair = (pool.states, pool.convs) if whole else pool.args()
    kda.copy_(*pair, int32(5, 2, 0, 4), int32(1, 7, 3, 0))
    kda.zero_(*pair, int32(2, 0, 6))
    want = before.clone()
    layers = slice(None) if whole else slice(1, 2)
    for t in (want.states, want.convs):
        t[[1, 7], layers] = t[[5, 2], layers].clone()
        t[[2, 6], layers] = 0.0
    assert_equal("states", pool.states, want.states)
    assert_equal("conv states", pool.convs, want.convs)


def test_wrong_arguments_are_named() -> None:
    heads, slots = 2, int32(1, 2)
    x, w, pool = tokens(2, heads), weights(heads), pools(3, heads)

    def call(error: type[Exception], match: str, **changed: torch.Tensor) -> None:
        names = ("q", "k", "v", "f", "beta", "gate", "conv_weight", "a_log", "dt_bias", "o_norm", "state", "conv_state")
        arguments = dict(zip((*names, "slots"), (*x.args(), *w.args(), *pool.args(), slots), strict=True))
        with pytest.raises(error, match=match):
            kda.decode_(**{**arguments, **changed})

    call(ValueError, "q", q=x.q.half())
    call(ValueError, "conv_state", conv_state=pool.conv.half())
    call(ValueError, "slots", slots=slots.long())
    call(ValueError, "a_log", a_log=w.a_log.double())
    call(ValueError, "gate", gate=x.gate[:, :128])
    call(ValueError, "v", v=x.v.t().contiguous().t())
    call(ValueError, "slots", slots=int32(1))
    call(ValueError, "state", state=torch.zeros(3, 2, 64, 64, device="cuda"))
    call(ValueError, "heads", state=torch.zeros(2, 97, 128, 128, device="cuda"))
    call(ValueError, "state", state=pool.state.transpose(-1, -2))
    call(ValueError, "dt_bias", dt_bias=w.dt_bias.cpu())
