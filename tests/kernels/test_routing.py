"""Expert choice: ties, saturation, bad rows, groups, padding, counts; and the work list made from it."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import routing
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.golden import tiny_states, tiny_weights

INF, NAN = float("inf"), float("nan")


def draw(tokens: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator) * 3, torch.randn(experts, generator=generator)


def choose_one_row(logits: list[float], bias: list[float], k: int) -> tuple[list[int], list[float]]:
    """K3 spec section 8 for one token in plain Python: best first, ties to the lower id."""
    scores = torch.sigmoid(torch.tensor(logits))
    biased = (scores + torch.tensor(bias)).tolist()
    ids = sorted(range(len(logits)), key=lambda e: (-biased[e], e))[:k]
    total = sum(scores[i].item() for i in ids) + 1e-20
    return ids, [scores[i].item() / total for i in ids]


@pytest.mark.parametrize(
    ("experts", "k"), [(1, 1), (16, 4), (16, 16), (128, 8), (384, 8), (896, 16), (897, 16), (1024, 16)]
)
def test_choice_and_weights(experts: int, k: int) -> None:
    logits, bias = draw(9, experts)
    ids, weights = routing.topk(logits, bias, k)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    for row in range(9):
        want_ids, want_weights = choose_one_row(logits[row].tolist(), bias.tolist(), k)
        assert ids[row].tolist() == want_ids
        # fp32 sum of up to 16 scores in another order: 16 half units of 2^-24
        assert_close("weights", weights[row], torch.tensor(want_weights), atol=0, rtol=16 * 2**-24)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(3, 896)
    logits[1] = -0.0
    logits[2, 100:] = 1.0
    ids, weights = routing.topk(logits, torch.zeros(896), 16)
    assert ids[0].tolist() == list(range(16))
    assert ids[1].tolist() == list(range(16))
    assert ids[2].tolist() == list(range(100, 116))
    assert_close("weights", weights, torch.full((3, 16), 1 / 16), atol=1e-7)


def test_saturated_logits_tie() -> None:
    logits = torch.full((1, 32), 40.0)  # sigmoid is 1 in fp32
    logits[0, 20] = 60.0
    ids, _ = routing.topk(logits, torch.zeros(32), 4)
    assert ids[0].tolist() == [0, 1, 2, 3]


def test_minus_infinity_and_underflow_give_finite_weights() -> None:
    logits, bias = draw(3, 64)
    logits[0] = -INF
    bias[:8] += 100.0
    logits[1, :8] = -120.0  # every preferred score underflows to 0
    logits[2, 5] = INF
    ids, weights = routing.topk(logits, bias, 8)
    assert sorted(ids[0].tolist()) == list(range(8))
    assert sorted(ids[1].tolist()) == list(range(8))
    assert not weights[:2].any()  # 0 / (0 + 1e-20)
    assert weights.isfinite().all()


def test_renormalisation_adds_1e_20_to_the_sum() -> None:
    logits = torch.tensor([[-46.0, -47.0]])
    _, weights = routing.topk(logits, torch.zeros(2), 2)
    scores = torch.sigmoid(logits.double())
    assert_close("weights", weights, scores / (scores.sum() + 1e-20), atol=0, rtol=1e-5)


def test_nan_row_is_flagged_and_leaves_its_neighbours_alone() -> None:
    logits, bias = draw(3, 896)
    want = routing.topk(logits, bias, 16)
    logits[1, 777] = NAN
    counts = torch.zeros(897, dtype=torch.int32)
    ids, weights = routing.topk(logits, bias, 16, counts=counts)
    assert (ids[1] == -1).all()
    assert weights[1].isnan().all()
    assert_equal("ids", ids[[0, 2]], want[0][[0, 2]])
    assert_equal("weights", weights[[0, 2]], want[1][[0, 2]])
    assert counts[896] == 1
    assert counts[:896].sum() == 32


def test_biased_scores_below_minus_one() -> None:
    bias = torch.full((896,), -3.0)
    chosen = torch.arange(20) * 44 + 3
    bias[chosen] = -2.5
    ids, _ = routing.topk(torch.zeros(1, 896), bias, 16)
    assert ids[0].tolist() == chosen[:16].tolist()


def test_padding_rows() -> None:
    logits, bias = draw(32, 64)
    logits[20] = NAN
    counts, short = torch.ones(65, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
    want = routing.topk(logits[:17], bias, 4, counts=short)
    ids, weights = routing.topk(logits, bias, 4, num_tokens=torch.tensor([17], dtype=torch.int32), counts=counts)
    assert_equal("ids", ids[:17], want[0])
    assert_equal("weights", weights[:17], want[1])
    assert (ids[17:] == -1).all()
    assert not weights[17:].any()
    assert_equal("counts are added to", counts, short + 1)


@pytest.mark.parametrize(("groups", "keep"), [(8, 3), (4, 1), (8, 8), (1, 1)])
def test_groups(groups: int, keep: int) -> None:
    logits, bias = draw(20, 64, seed=3)
    k = 6
    ids, weights = routing.topk(logits, bias, k, num_groups=groups, topk_groups=keep, scale=2.5)
    biased = torch.sigmoid(logits) + bias
    for row in range(20):
        per_group = biased[row].view(groups, -1)
        order = sorted(range(groups), key=lambda g: -float(per_group[g].sort(descending=True).values[:2].sum()))
        allowed = biased[row].clone()
        for group in order[keep:]:
            allowed.view(groups, -1)[group] = -INF
        want = allowed.sort(descending=True, stable=True).indices[:k]
        assert ids[row].tolist() == want.tolist()
        scores = torch.sigmoid(logits[row])[want]
        assert_close("weights", weights[row], scores / scores.sum() * 2.5, atol=0, rtol=1e-6)


def test_excluded_groups_stay_behind_kept_experts_of_minus_infinity() -> None:
    bias = torch.full((8,), -INF)
    bias[1] = 5.0  # its group is kept, but the group's other experts are at -inf
    ids, _ = routing.topk(torch.zeros(1, 8), bias, 3, num_groups=2, topk_groups=1)
    assert ids[0].tolist() == [1, 0, 2]


def test_tiny_golden_choice() -> None:
    states, weights = tiny_states(), tiny_weights()
    for layer in (1, 2, 3):
        bias = weights[f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"]
        ids, got = routing.topk(states[f"layer{layer}.router_logits"], bias, 4)
        want_ids = states[f"layer{layer}.topk_ids"]
        assert_equal("sorted ids", ids.sort(-1).values, want_ids.int().sort(-1).values)
        # the golden's order is its own
        want = states[f"layer{layer}.topk_weights"].gather(1, want_ids.long().argsort(-1))
        assert_close("weights", got.gather(1, ids.long().argsort(-1)), want, atol=1e-6)


def test_zero_tokens_and_strided_rows() -> None:
    ids, weights = routing.topk(torch.zeros(0, 16), torch.zeros(16), 4)
    assert ids.shape == weights.shape == (0, 4)
    wide = torch.randn(5, 896 + 7, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(896)
    view = wide[:, 7:]
    for got, want in zip(routing.topk(view, bias, 16), routing.topk(view.contiguous(), bias, 16), strict=True):
        assert_equal("strided", got, want)


@pytest.mark.parametrize("expert_range", [None, (0, 5), (5, 16)])
@pytest.mark.parametrize("tokens", [0, 1, 7, 900])
def test_dispatch_lists_every_pair_once(tokens: int, expert_range: tuple[int, int] | None) -> None:
    logits, bias = draw(tokens, 16)
    counts = torch.zeros(17, dtype=torch.int32)
    ids, _ = routing.topk(logits, bias, 4, counts=counts)
    if tokens == 7:
        ids[3] = -1
    plan = routing.dispatch(ids, 16, expert_range=expert_range, counts=counts)
    assert not counts.any()
    first, last = expert_range or (0, 16)
    flat = ids.flatten().tolist()
    want = [[p for p, e in enumerate(flat) if e == expert] for expert in range(first, last)]
    assert plan.counts.tolist() == [len(pairs) for pairs in want]
    total = sum(len(pairs) for pairs in want)
    assert plan.pairs.tolist() == [p for pairs in want for p in pairs] + [-1] * (tokens * 4 - total)
    assert plan.offsets[0] == 0
    assert (plan.offsets.diff() == plan.counts).all()

    covered = []
    sizes = []
    for expert, at, rows in plan.tiles[: int(plan.num_tiles)].tolist():
        assert 0 < rows <= 192
        assert plan.offsets[expert] <= at
        assert at + rows <= plan.offsets[expert + 1]
        covered += range(at, at + rows)
        sizes.append(int(plan.counts[expert]))
    assert sorted(covered) == list(range(total))
    assert sizes == sorted(sizes, reverse=True)
    assert (plan.tiles[int(plan.num_tiles) :] == -1).all()


def test_dispatch_ignores_padding_rows() -> None:
    ids = torch.tensor([[0, 1], [1, 2], [2, 3]], dtype=torch.int32)
    plan = routing.dispatch(ids, 4, num_tokens=torch.tensor([2], dtype=torch.int32))
    assert plan.counts.tolist() == [1, 2, 1, 0]
    assert plan.pairs.tolist() == [0, 1, 2, 3, -1, -1]


@pytest.mark.parametrize("same", [True, False])
def test_dispatch_holds_any_skew(same: bool) -> None:
    tokens, experts = 512, 896
    ids = torch.arange(16) if same else torch.arange(tokens * 16) % experts
    plan = routing.dispatch(ids.expand(tokens, 16).int() if same else ids.view(tokens, 16).int(), experts)
    assert int(plan.counts.sum()) == tokens * 16
    assert int(plan.num_tiles) <= plan.tiles.shape[0]


LOGITS, BIAS = torch.zeros(2, 8), torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: routing.topk(LOGITS.bfloat16(), BIAS, 2), "logits: expected dtype float32, got bfloat16"),
        (lambda: routing.topk(LOGITS, torch.zeros(9), 2), r"bias: expected shape \[8\], got \[9\]"),
        (lambda: routing.topk(LOGITS, BIAS, 9), "k: expected 1 to 8, got 9"),
        (lambda: routing.topk(torch.zeros(1, 1025), torch.zeros(1025), 2), "logits: expected 1 to 1024 experts"),
        (lambda: routing.topk(LOGITS, BIAS, 2, num_groups=3), "num_groups: expected a divisor of 8, got 3"),
        (lambda: routing.topk(LOGITS, BIAS, 3, num_groups=4, topk_groups=1), "k: expected at most the 2 experts"),
        (
            lambda: routing.topk(LOGITS, BIAS, 2, counts=torch.zeros(8, dtype=torch.int32)),
            r"counts: expected shape \[9\], got \[8\]",
        ),
        (
            lambda: routing.topk(LOGITS, BIAS, 2, num_tokens=torch.tensor([1])),
            "num_tokens: expected dtype int32, got int64",
        ),
        (lambda: routing.topk(LOGITS.T.contiguous().T, BIAS, 2), "logits: expected a contiguous last dimension"),
        (lambda: routing.dispatch(torch.full((1, 2), 8, dtype=torch.int32), 8), "ids: expected -1 to 7, got 8 to 8"),
        (lambda: routing.dispatch(torch.zeros(1, 2), 8), "ids: expected dtype int32, got float32"),
        (
            lambda: routing.dispatch(torch.zeros(1, 2, dtype=torch.int32), 8, expert_range=(4, 9)),
            "expert_range: expected 0 <= first",
        ),
    ],
)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
