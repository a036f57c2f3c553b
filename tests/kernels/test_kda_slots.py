"""KDA: slots, padding, fresh starts, exports, errors."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import kda
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.kda_case import ATOL, DIM, RTOL, Case, assert_same_pools, flags, int32

NAN = float("nan")


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_fresh_reads_nothing_of_its_slot(form: str) -> None:
    case = Case(20)
    poisoned, zeroed = case.pools(), case.pools()
    for name in ("state", "conv_state"):
        poisoned[name].fill_(NAN)
        zeroed[name].zero_()
    if form == "prefill":
        got = case.prefill(poisoned, [2, 1], [17, 3], fresh=flags([True, True]))
        want = case.prefill(zeroed, [2, 1], [17, 3])
    else:
        got = case.decode(poisoned, [2, 1], 0, fresh=flags([True, True]))
        want = case.decode(zeroed, [2, 1], 0)
    assert_equal("out", got, want)
    assert_same_pools(poisoned, zeroed, [1, 2])
    assert poisoned["state"][[0, 3]].isnan().all()


@pytest.mark.parametrize("padding", ["slot 0", "num_tokens"])
def test_decode_padding_changes_nothing(padding: str) -> None:
    case = Case(32, slots=40)
    pools, want = case.pools(), case.pools()
    pools["state"][0], pools["conv_state"][0] = NAN, NAN
    slots = list(range(1, 18))
    for value in case.rows.values():
        value[17:] = NAN  # padding rows may hold anything
    if padding == "slot 0":
        out = case.decode(pools, slots + [0] * 15, 0)
    else:
        out = case.decode(pools, slots + list(range(18, 33)), 0, num_tokens=int32([17]))
    assert_equal("out", out[:17], case.decode(want, slots, 0))
    assert not out[17:].any()
    assert_same_pools(pools, want, list(range(1, 40)))
    assert pools["state"][0].isnan().all()


def test_prefill_padding_changes_nothing() -> None:
    case = Case(40)
    for value in case.rows.values():
        value[30:] = NAN
    pools, want = case.pools(), case.pools()
    out = case.prefill(pools, [1, 0, 2, 3], [20, 4, 6, 10], num_tokens=int32([30]))
    assert not out[20:24].any()  # slot 0
    assert not out[30:].any()  # beyond num_tokens
    assert_close("out", out[:20], case.prefill(want, [1], [20]), atol=1e-6, rtol=1e-6)
    case.prefill(want, [2], [6], start=24)
    assert_close("state", pools["state"], want["state"], atol=1e-6, rtol=1e-6)
    assert_same_pools(pools, want, [0, 3])


def test_zero_tokens() -> None:
    case = Case(0)
    pools, want = case.pools(), case.pools()
    assert case.decode(pools, [], 0).shape == (0, 2 * DIM)
    assert case.prefill(pools, [], []).shape == (0, 2 * DIM)
    assert case.prefill(pools, [1, 2], [0, 0], fresh=flags([True, False])).shape == (0, 2 * DIM)
    assert_same_pools(pools, want)


@pytest.mark.parametrize("extra", [7, 64])
def test_strided_rows_and_slot_major_pools(extra: int) -> None:
    case = Case(24)
    plain = case.pools()
    want_prefill, want_decode = case.prefill(plain, [2], [20]), case.decode(plain, [1, 2, 3], 20)
    # rows as slices of one projection, states as one layer of a pool with three
    names = list(case.rows)
    widths = [case.rows[name].shape[1] for name in names]
    wide = torch.full((24, sum(widths) + extra), NAN)
    wide[:, : sum(widths)] = torch.cat([case.rows[name] for name in names], dim=1)
    case.rows = dict(zip(names, wide[:, : sum(widths)].split(widths, dim=1), strict=True))
    state = torch.full((4, 3, 2, DIM, DIM), NAN)
    conv_state = torch.full((4, 3, 3, 6 * DIM), NAN)
    state[:, 1], conv_state[:, 1] = case.state, case.conv_state
    pools = {"state": state[:, 1], "conv_state": conv_state[:, 1]}
    assert_equal("prefill", case.prefill(pools, [2], [20]), want_prefill)
    assert_equal("decode", case.decode(pools, [1, 2, 3], 20), want_decode)
    assert_same_pools(pools, plain)
    assert state[:, [0, 2]].isnan().all()
    assert conv_state[:, [0, 2]].isnan().all()


@pytest.mark.parametrize("fresh", [False, True])
def test_exports_are_the_states_at_those_tokens(fresh: bool) -> None:
    case = Case(60, slots=16)
    done = [0, 1, 2, 3, 15, 16, 17, 31, 32, 50]
    exports = [[1, tokens, 4 + i] for i, tokens in enumerate(done)] + [[0, 10, 14], [1, 7, 0]]
    pools, plain = case.pools(), case.pools()
    out = case.prefill(pools, [1, 2], [10, 50], fresh=flags([fresh, fresh]), exports=int32(exports))
    assert_equal("out is that without exports", out, case.prefill(plain, [1, 2], [10, 50], fresh=flags([fresh, fresh])))
    assert_same_pools(pools, plain, [0, 1, 2, 3, 15])
    for i, tokens in enumerate(done):
        single = case.pools()
        if fresh and tokens == 0:
            single["state"][2], single["conv_state"][2] = 0, 0
        case.prefill(single, [2], [tokens], start=10, fresh=flags([fresh]))
        assert_close(f"state after {tokens}", pools["state"][4 + i], single["state"][2], atol=ATOL, rtol=RTOL)
        assert_equal(f"conv state after {tokens}", pools["conv_state"][4 + i], single["conv_state"][2])
    assert_close("other sequence", pools["state"][14], pools["state"][1], atol=ATOL, rtol=RTOL)


def test_zero_clears_nan_in_the_named_slots_only() -> None:
    state, conv = torch.full((6, 2, 1, DIM, DIM), NAN), torch.full((6, 2, 3, 3 * DIM), NAN)
    kda.zero_(state, conv, int32([2, 0, 4]))
    for pool in (state, conv):
        assert not pool[[2, 4]].any()
        assert pool[[0, 1, 3, 5]].isnan().all()
    layer = state[:, 1], conv[:, 1]
    kda.zero_(*layer, int32([5]))
    assert not state[5, 1].any()
    assert state[5, 0].isnan().all()


def test_copy_is_bit_for_bit_and_skips_slot_0() -> None:
    case = Case(1, slots=6)
    pools = case.pools()
    kda.copy_(**pools, src=int32([1, 0, 2, 3]), dst=int32([4, 5, 0, 3]))
    for name in ("state", "conv_state"):
        want = getattr(case, name).clone()
        want[4] = want[1]
        assert_equal(name, pools[name], want)


@pytest.mark.parametrize(
    ("state", "conv_state", "message"),
    [
        ((4, 2, 128, 64), (4, 3, 768), r"state: expected shape \[\*, \*, 128, 128\], got \[4, 2, 128, 64\]"),
        ((4, 3, 2, 64, 128), (4, 3, 3, 768), r"state: expected shape \[\*, \*, \*, 128, 128\], got"),
        ((4, 128, 128), (4, 3, 768), r"state: expected \[slots, heads, 128, 128\] or the pool of 5 dims, got 3 dims"),
        ((4, 2, 128, 128), (4, 3, 767), r"conv_state: expected shape \[4, 3, 768\], got \[4, 3, 767\]"),
        ((4, 3, 2, 128, 128), (4, 2, 3, 768), r"conv_state: expected shape \[4, 3, 3, 768\], got \[4, 2, 3, 768\]"),
    ],
)
def test_zero_and_copy_name_the_pool_at_fault(state: tuple, conv_state: tuple, message: str) -> None:
    pools = torch.zeros(state), torch.zeros(conv_state)
    with pytest.raises(ValueError, match=f"^{message}"):
        kda.zero_(*pools, int32([1]))
    with pytest.raises(ValueError, match=f"^{message}"):
        kda.copy_(*pools, int32([1]), int32([2]))


def test_plan_belongs_to_its_lengths() -> None:
    case = Case(10)
    pools = case.pools()
    case.prefill(pools, [1, 2], [7, 3], plan=kda.plan(2, [7, 3]))
    with pytest.raises(ValueError, match=r"plan: expected heads 2, lengths \[7, 3\], got \(2, \(8, 2\)\)"):
        case.prefill(pools, [1, 2], [7, 3], plan=kda.plan(2, [8, 2]))
    with pytest.raises(ValueError, match="lengths: expected no negative length"):
        kda.plan(2, [-1])


def change(name: str, value) -> dict:
    case = Case(3)
    arguments = {**case.rows, **case.consts, **case.pools(), "slots": int32([1, 2, 3])}
    arguments[name] = value
    return arguments


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(3, 200), r"q: expected heads\*128 columns, got 200"),
        ("k", torch.zeros(2, 256), r"k: expected shape \[3, 256\], got \[2, 256\]"),
        ("v", torch.zeros(3, 256).bfloat16(), "v: expected dtype float32, got bfloat16"),
        ("f", torch.zeros(256, 3).T, "f: expected a contiguous last dimension"),
        ("beta", torch.zeros(3, 3), r"beta: expected shape \[3, 2\], got \[3, 3\]"),
        ("conv_weight", torch.zeros(768, 3), r"conv_weight: expected shape \[768, 4\], got \[768, 3\]"),
        ("a_log", torch.zeros(1), "a_log: expected at least 2 values, got 1"),
        ("a_log", torch.zeros(2).bfloat16(), "a_log: expected dtype float32, got bfloat16"),
        ("dt_bias", torch.zeros(255), r"dt_bias: expected shape \[256\], got \[255\]"),
        ("o_norm", torch.zeros(256), r"o_norm: expected shape \[128\], got \[256\]"),
        ("state", torch.zeros(4, 2, 128, 128).bfloat16(), "state: expected dtype float32, got bfloat16"),
        ("state", torch.zeros(4, 2, 128, 128).transpose(2, 3), "state: expected contiguous within a slot"),
        ("conv_state", torch.zeros(4, 4, 768), r"conv_state: expected shape \[4, 3, 768\], got \[4, 4, 768\]"),
        ("slots", int32([1, 2, 4]), "slots: expected 0 to 3, got 1 to 4"),
        ("slots", int32([1, 2, -1]), "slots: expected 0 to 3, got -1 to 2"),
        ("slots", torch.tensor([1, 2, 3]), "slots: expected dtype int32, got int64"),
        ("fresh", torch.zeros(2, dtype=torch.bool), r"fresh: expected shape \[3\], got \[2\]"),
        ("lower_bound", 5.0, "lower_bound: expected a negative number, got 5.0"),
        ("accepted", int32([0, 0, 0]), "accepted: expected records and accepted together"),
    ],
)
def test_decode_errors_name_the_argument(name: str, value, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kda.decode_(**change(name, value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [2, 2]}, "cu_seqlens: expected rising from 0 to at most 3"),
        ({"exports": int32([[0, 3, 3]])}, r"exports: expected rows .*, got \[0, 3, 3\]"),
        ({"exports": int32([[2, 0, 3]])}, r"exports: expected rows .*, got \[2, 0, 3\]"),
        ({"exports": int32([0, 1, 3])}, r"exports: expected shape \[\*, 3\], got \[3\]"),
    ],
)
def test_prefill_errors_name_the_argument(options: dict, message: str) -> None:
    case = Case(3)
    lengths = options.pop("lengths", [2, 1])
    with pytest.raises(ValueError, match=message):
        case.prefill(case.pools(), [1, 2], lengths, **options)
