"""Verify, lazy commit and decode after verify on the GPU: bit-equal to one-by-one decode for any accepted length."""

from __future__ import annotations

import random

import pytest
import torch

from kimi_kernels import kda
from kimi_kernels.testing.compare import assert_equal, relative_error
from tests.kernels.kda_gpu_cases import DIM, Pools, Tokens, Weights, decode, int32, pools, tokens, verify, weights

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(6)


def borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def one_by_one(x: Tokens, w: Weights, pool: Pools, slot: int, fresh: bool = False) -> tuple[list, list]:
    """Outputs of the rows of x on one slot, and the (state, conv) after 0, 1, ... of them."""
    outs, states = [], [(pool.state[slot].clone(), pool.conv[slot].clone())]
    for i in range(x.q.shape[0]):
        flag = torch.tensor([fresh and i == 0], device="cuda")
        outs.append(decode(x.rows([i]), w, pool, int32(slot), fresh=flag)[0])
        states.append((pool.state[slot].clone(), pool.conv[slot].clone()))
    return outs, states


def padding_of(heads: int, aligned: bool) -> int:
    """Columns behind a projection's, so that its rows begin at multiples of 16 bytes, or do not."""
    return -heads % 8 + (0 if aligned else 1)


@pytest.mark.parametrize("heads", [1, 12, 16, 24, 36, 96])  # half heads in one wave, whole in one, half in two, whole
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("way", ["commit_", "verify", "decode_"])
def test_any_accepted_length(heads: int, aligned: bool, way: str) -> None:
    """Slots 1..10 accept 0..9 of 9 tokens; the commit happens alone, in the next verify, or in the next decode."""
    w, before, run = weights(heads), pools(12, heads), 9
    x = tokens(10 * run, heads, padding_of(heads, aligned))
    slots = int32(*range(1, 11))
    accepted = int32(*range(10))
    pool = before.clone()
    layers = torch.full((12, 2, *kda.record_shape(heads, run)), float("nan"), device="cuda")
    records = layers[:, 1]  # a slot-major pool of two layers
    out, _ = verify(x, w, pool, slots, borders([run] * 10), records=records)
    assert_equal("states after verify", pool.states, before.states)
    assert_equal("conv states after verify", pool.convs, before.convs)
    assert records[[0, 11]].isnan().all()
    assert layers[:, 0].isnan().all()

    want, after = before.clone(), tokens(10, heads)
    for i, slot in enumerate(slots.tolist()):
        outs, states = one_by_one(x.rows(slice(i * run, (i + 1) * run)), w, want, slot)
        assert_equal(f"out of slot {slot}", out[i * run : (i + 1) * run], torch.stack(outs))
        want.state[slot], want.conv[slot] = states[i]  # i tokens are accepted
    if way == "commit_":
        kda.commit_(records, *pool.args(), slots, accepted)
    elif way == "verify":
        next_out, _ = verify(after, w, pool, slots, borders([1] * 10), records=records, accepted=accepted)
        assert_equal("next out", next_out, decode(after, w, want.clone(), slots))
    else:
        next_out = decode(after, w, pool, slots, records=records, accepted=accepted)
        assert_equal("next out", next_out, decode(after, w, want, slots))
    assert_equal("states", pool.states, want.states)
    assert_equal("conv states", pool.convs, want.convs)


# 3 heads: half heads, a block each. 96 heads of 5 sequences: whole heads.
HALF, WHOLE = 3, 96


@pytest.mark.parametrize("heads", [HALF, WHOLE])
@pytest.mark.parametrize("drafts", [1, 2, 4, 8])
def test_runs_and_decode_alternate(drafts: int, heads: int) -> None:
    """Random mixes of runs, single tokens and rejections follow the sequential replay, slot by slot, step by step."""
    count, rng = 5, random.Random(drafts)
    w, want = weights(heads), pools(count + 1, heads)
    pool = want.clone()
    slots = int32(*range(1, count + 1))
    records = torch.full((count + 1, *kda.record_shape(heads, drafts + 1)), float("nan"), device="cuda")
    accepted: list[int] | None = None
    for step in range(40 if heads == HALF else 12):
        runs = [rng.randint(1, drafts + 1) for _ in range(count)] if rng.random() < 0.6 else None
        options = {} if accepted is None else {"records": records, "accepted": int32(*accepted)}
        if runs is None:
            x = tokens(count, heads)
            out = decode(x, w, pool, slots, **options)
            assert_equal(f"out, step {step}", out, decode(x, w, want, slots))
            accepted = None
        else:
            x = tokens(sum(runs), heads, padding_of(heads, aligned=step % 3 > 0))
            out, _ = verify(x, w, pool, slots, borders(runs), **{"records": records, **options})
            accepted, start = [rng.randint(0, n) for n in runs], 0
            for slot, (n, keep) in enumerate(zip(runs, accepted, strict=True), 1):
                outs, states = one_by_one(x.rows(slice(start, start + n)), w, want, slot)
                assert_equal(f"out, step {step}", out[start : start + n], torch.stack(outs))
                want.state[slot], want.conv[slot] = states[keep]
                start += n
    if accepted is not None:
        kda.commit_(records, *pool.args(), slots, int32(*accepted))
    assert_equal("states", pool.states, want.states)
    assert_equal("conv states", pool.convs, want.convs)


@pytest.mark.parametrize("heads", [HALF, WHOLE])
def test_padding_empty_runs_and_tail_rows(heads: int) -> None:
    """Slot 0, a run without tokens, rows beyond num_tokens and rows of no sequence: output 0, nothing else touched."""
    w = weights(heads)
    before = pools(6, heads)
    before.states[0], before.convs[0] = float("nan"), float("nan")
    x, slots = tokens(12, heads), int32(2, 0, 4, 3, 5)
    cu = borders([3, 2, 0, 4, 1])
    pool = before.clone()
    records = torch.full((6, *kda.record_shape(heads, 9)), float("nan"), device="cuda")
    # Slot 4 has no token but two accepted ones of an earlier run, of which a record is made first.
    earlier = tokens(2, heads)
    verify(earlier, w, pool, int32(4), borders([2]), records=records)
    zeros = int32(0, 0, 2, 0, 0)
    out, _ = verify(x, w, pool, slots, cu, records=records, accepted=zeros, num_tokens=int32(8))
    want = before.clone()
    one_by_one(earlier, w, want, 4)
    assert_equal("states", pool.states, want.states)
    assert_equal("conv states", pool.convs, want.convs)
    for slot, rows in ((2, slice(0, 3)), (3, slice(5, 8))):
        assert_equal("out", out[rows], torch.stack(one_by_one(x.rows(rows), w, want.clone(), slot)[0]))
    assert not out[[3, 4, 8, 9, 10, 11]].any()
    assert records[[0, 5]].isnan().all()


@pytest.mark.parametrize("heads", [HALF, WHOLE])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_fresh_runs(accepted: int, heads: int) -> None:
    """A fresh run reads nothing, and makes its slot hold zeros, so that a later commit starts from them."""
    w, count = weights(heads), 5
    pool = pools(count + 1, heads)
    pool.state[1:], pool.conv[1:] = float("nan"), float("nan")
    want = pool.clone()
    x, slots, fresh = tokens(3 * count, heads), int32(*range(1, count + 1)), torch.ones(count, device="cuda").bool()
    # What an older tenant left in the records does not count for a fresh sequence.
    records = torch.full((count + 1, *kda.record_shape(heads, 3)), float("nan"), device="cuda")
    options = {"fresh": fresh, "records": records, "accepted": int32(*[2] * count)}
    out, _ = verify(x, w, pool, slots, borders([3] * count), **options)
    kda.commit_(records, *pool.args(), slots, int32(*[accepted] * count))
    for i in range(count):
        rows = slice(3 * i, 3 * i + 3)
        outs, states = one_by_one(x.rows(rows), w, want, i + 1, fresh=True)
        assert_equal("out", out[rows], torch.stack(outs))
        zero = (torch.zeros_like(states[0][0]), torch.zeros_like(states[0][1]))
        want.state[i + 1], want.conv[i + 1] = states[accepted] if accepted else zero
    assert_equal("states", pool.states, want.states)
    assert_equal("conv states", pool.convs, want.convs)


@pytest.mark.parametrize("heads", [HALF, WHOLE])
@pytest.mark.parametrize("lengths", [[0, 2, 1, 3, 2], [2, 1, 0, 3, 1], [1, 2, 3, 1, 0], [0, 0, 0, 0, 0]])
def test_empty_runs_keep_their_states(lengths: list[int], heads: int) -> None:
    """First, in the middle, last or all; many times, with the same bits."""
    w, before, slots = weights(heads), pools(6, heads), int32(1, 2, 3, 4, 5)
    x, accepted = tokens(sum(lengths), heads), int32(*lengths)
    first: tuple[torch.Tensor, ...] | None = None
    pool = before.clone()
    for _ in range(100):
        pool.states.copy_(before.states)
        pool.convs.copy_(before.convs)
        records = torch.full((6, *kda.record_shape(heads, 3)), float("nan"), device="cuda")
        out, _ = verify(x, w, pool, slots, borders(lengths), records=records)
        kda.commit_(records, *pool.args(), slots, accepted)
        result = (out, pool.states.clone(), pool.convs.clone())
        first = first or result
        for got, want in zip(result, first, strict=True):
            assert torch.equal(got, want)
    for slot, count in enumerate(lengths, 1):
        moved = (pool.state[slot] != before.state[slot]).any().item()
        assert moved == (count > 0), f"slot {slot} with {count} tokens"


@pytest.mark.parametrize("heads", [HALF, WHOLE])
def test_records_hold_what_the_reference_records(heads: int) -> None:
    """Decay, k, error and raw rows of every token, in the same places; the error follows a state in fp32."""
    w, pool, slots = weights(heads), pools(6, heads), int32(5, 2, 3, 1, 4)
    lengths = [3, 1, 4, 2, 4]
    x = tokens(sum(lengths), heads)
    want = torch.zeros(6, *kda.record_shape(heads, 4))
    got = torch.zeros_like(want, device="cuda")
    cpu = [t.cpu() for t in (*x.args(), *w.args(), *pool.args(), slots, borders(lengths))]
    kda.verify(*cpu, records=want)
    verify(x, w, pool, slots, borders(lengths), records=got)
    got = got.cpu()
    assert_equal("raw rows", got[:, :, 3:], want[:, :, 3:])
    for row, name in enumerate(("decay", "k", "error")):  # fp32 sums of 128 in another order, four tokens at most
        assert relative_error(got[:, :, row], want[:, :, row]) < 1e-4, name
    assert not got[want == 0].any()  # other slots, and tokens beyond a run


def test_more_sequences_than_a_grid_axis() -> None:
    """40,000 sequences of one head, whole heads in several layers of the grid, follow decode; commit too."""
    count = 40_000
    w = weights(1)
    state = torch.empty(count + 1, 1, DIM, DIM, device="cuda").normal_(0, 0.3)
    conv = torch.randn(count + 1, 3, 3 * DIM, device="cuda").bfloat16()
    slots = torch.randperm(count, device="cuda").int() + 1
    x, ones = tokens(count, 1), torch.ones(count, dtype=torch.int32, device="cuda")
    lengths = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    records = torch.zeros(count + 1, *kda.record_shape(1, 1), device="cuda")
    verified, _ = kda.verify(*x.args(), *w.args(), state, conv, slots, lengths, records=records)
    stepped, stepped_conv = state.clone(), conv.clone()
    out = torch.empty_like(verified)
    for part in (slice(0, 15_000), slice(15_000, count)):
        out[part] = kda.decode_(*x.rows(part).args(), *w.args(), stepped, stepped_conv, slots[part])
    assert_equal("out", verified, out)
    kda.commit_(records, state, conv, slots, ones)
    assert torch.equal(state, stepped)
    assert torch.equal(conv, stepped_conv)
    again, again_conv = state.clone(), conv.clone()
    first = kda.decode_(*x.args(), *w.args(), state, conv, slots)
    for part in (slice(0, 15_000), slice(15_000, count)):
        assert_equal("out", kda.decode_(*x.rows(part).args(), *w.args(), again, again_conv, slots[part]), first[part])
    assert torch.equal(state, again)


def test_no_sequences() -> None:
    w, pool, records = weights(2), pools(3, 2), torch.zeros(3, *kda.record_shape(2, 3), device="cuda")
    before, none = pool.clone(), int32()
    out, _ = verify(tokens(0, 2), w, pool, none, int32(0), records=records, accepted=none)
    kda.commit_(records, *pool.args(), none, none)
    assert out.shape == (0, 256)
    assert_equal("states", pool.states, before.states)


def test_records_are_allocated_on_request() -> None:
    heads, w, pool = 2, weights(2), pools(3, 2)
    x = tokens(4, heads)
    out, records = verify(x, w, pool, int32(1, 2), borders([3, 1]))
    assert out.shape == (4, 256)
    assert records.shape == (3, *kda.record_shape(heads, 9))
    with pytest.raises(ValueError, match="records"):
        verify(x, w, pool, int32(1, 2), borders([3, 1]), accepted=int32(0, 0))
    short = torch.zeros(3, *kda.record_shape(heads, 1), device="cuda")
    with pytest.raises(ValueError, match="records"):
        verify(x, w, pool, int32(1, 2), borders([3, 1]), records=short)
