"""KDA: short runs that are verified before they are committed."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import kda
from kimi_kernels.testing.compare import assert_equal
from tests.kernels.kda_case import Case, assert_same_pools, cumulative, flags, int32

NAN = float("nan")


def run_of(case: Case, pools: dict, slots: list[int], lengths: list[int], start: int, **options):
    rows = case.slice(start, start + sum(lengths))
    return kda.verify(**rows, **case.consts, **pools, slots=int32(slots), cu_seqlens=cumulative(lengths), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_then_commit_equals_one_by_one(dtype: torch.dtype) -> None:
    """Any accepted count, committed by the next verify, the next decode or commit_: the bits of one-by-one decode."""
    case = Case(60, slots=8, dtype=dtype)
    slots, lengths, accepted = [5, 2, 7, 3], [4, 9, 1, 4], [0, 9, 1, 3]
    starts = cumulative(lengths).tolist()
    pools, stepped = case.pools(), case.pools()
    out, records = run_of(case, pools, slots, lengths, 0)
    assert_same_pools(pools, case.pools())
    assert records.shape == (8, *kda.record_shape(2, kda.MAX_RUN))

    def step(slot: int, first: int, count: int) -> torch.Tensor:
        return torch.cat([case.decode(stepped, [slot], first + i) for i in range(count)])

    for i, slot in enumerate(slots):
        branch = {name: value.clone() for name, value in stepped.items()}
        want = torch.cat([case.decode(branch, [slot], starts[i] + j) for j in range(lengths[i])])
        assert_equal(f"run of slot {slot}", out[starts[i] : starts[i + 1]], want)
        if accepted[i]:
            step(slot, starts[i], accepted[i])

    committed = {name: value.clone() for name, value in pools.items()}
    kda.commit_(records, **committed, slots=int32(slots), accepted=int32(accepted))
    assert_same_pools(committed, stepped)

    decoded = {name: value.clone() for name, value in pools.items()}
    got = case.decode(decoded, slots, 40, records=records, accepted=int32(accepted))

    got_run, _ = run_of(case, pools, slots, [3, 2, 1, 4], 18, records=records, accepted=int32(accepted))
    assert_same_pools(pools, stepped)  # the first run is committed, the second is not
    start = 18
    for slot, length in zip(slots, [3, 2, 1, 4], strict=True):
        branch = {name: value.clone() for name, value in stepped.items()}
        want = torch.cat([case.decode(branch, [slot], start + j) for j in range(length)])
        assert_equal(f"second run of slot {slot}", got_run[start - 18 : start - 18 + length], want)
        start += length
    want = torch.cat([case.decode(stepped, [slot], 40 + i) for i, slot in enumerate(slots)])
    assert_equal("decode after a run", got, want)
    assert_same_pools(decoded, stepped)


def test_verify_leaves_padding_alone_and_starts_fresh_from_zero() -> None:
    case = Case(8)
    pools, zeroed = case.pools(), case.pools()
    for name in ("state", "conv_state"):
        pools[name][2], zeroed[name][2] = 7.5, 0  # no NaN: a commit of the NaN records below must show
    before = {name: value.clone() for name, value in pools.items()}
    records = torch.full((4, *kda.record_shape(2, 4)), NAN)
    options = {"fresh": flags([True, False, False]), "records": records, "num_tokens": int32([6])}
    out, _ = run_of(case, pools, [2, 0, 3], [3, 2, 3], 0, **options, accepted=int32([2, 1, 0]))
    for name in ("state", "conv_state"):
        before[name][2] = 0  # the fresh slot, and it alone; fresh slots and padding have nothing to commit
    assert_same_pools(pools, before)
    want, _ = run_of(case, zeroed, [2], [3], 0)
    assert_equal("fresh run", out[:3], want)
    assert not out[3:5].any()
    assert out[5].any()
    assert not out[6:].any()
    assert records[[0, 1]].isnan().all()
    assert records[3, :, :, 1:].isnan().all()


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_fresh_run_commits_onto_zeros(accepted: int) -> None:
    """Whatever the slot's former tenant left, NaN too; a fresh sequence without a token is left alone."""
    case = Case(4)
    pools, stepped = case.pools(), case.pools()
    for name in ("state", "conv_state"):
        pools[name][1:3] = NAN
        stepped[name][1], stepped[name][2] = 0, NAN
    _, records = run_of(case, pools, [1, 2], [3, 0], 0, fresh=flags([True, True]))
    kda.commit_(records, **pools, slots=int32([1]), accepted=int32([accepted]))
    for i in range(accepted):
        case.decode(stepped, [1], i)
    assert_same_pools(pools, stepped)


def test_verify_errors_name_the_argument() -> None:
    case = Case(12)
    with pytest.raises(ValueError, match="cu_seqlens: expected runs of at most 9 tokens, got 10"):
        run_of(case, case.pools(), [1, 2], [10, 2], 0)
    with pytest.raises(ValueError, match="records: expected the last run's records"):
        run_of(case, case.pools(), [1, 2], [1, 2], 0, accepted=int32([1, 1]))
    with pytest.raises(ValueError, match="run: expected 1 to 9, got 10"):
        kda.record_shape(2, 10)
