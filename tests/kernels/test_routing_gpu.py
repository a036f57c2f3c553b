"""Routing on the GPU: choices against the reference on the same device, work lists against the reference bit by bit.

Tolerance: sigmoid by exp2 and reciprocal of the special function unit is within 1e-6 of torch's, so a choice may differ
from the reference where two scores are that close; then the chosen scores have to be as good.
"""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import routing
from kimi_kernels.reference import routing as reference
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.arrays import call, with_cupy

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def check_topk(
    logits: torch.Tensor, bias: torch.Tensor, k: int, *, groups: tuple[int, int] = (1, 1), library: str = "torch"
) -> None:
    counts = torch.zeros(logits.shape[1] + 1, dtype=torch.int32, device="cuda")
    expected_counts = counts.clone()
    options = {"num_groups": groups[0], "topk_groups": groups[1], "scale": 2.5}
    ids, weights = call(library, routing.topk, logits, bias, k, counts=counts, **options)
    want, want_weights = reference.topk(logits, bias, k, *groups, 2.5, None, expected_counts)
    assert ids.dtype == torch.int32
    if ids.numel() == 0:
        assert ids.shape == (0, k)
        return
    good = want[:, 0] >= 0
    assert_equal("flagged rows", ids[~good], want[~good])
    score = logits[good].sigmoid() + bias
    got_score = score.gather(1, ids[good].long())
    assert_close("chosen scores, best first", got_score, score.gather(1, want[good].long()), atol=TOLERANCE)
    assert all(len(set(row)) == k for row in ids[good].tolist()), "an expert was chosen twice"
    same = (ids == want).all(1)
    assert same.float().mean() > 0.99
    assert_close("weights", weights[same], want_weights[same], atol=TOLERANCE, rtol=5e-6)
    assert_equal("counts", counts[:-1], torch.bincount(ids[good].flatten(), minlength=len(counts) - 1).int())
    assert int(counts[-1]) == int((~good).sum())
    again = call(library, routing.topk, logits, bias, k, **options)
    assert_equal("ids again", again[0], ids)
    assert_equal("weights again", again[1], weights)


@pytest.mark.parametrize(("library", "tokens"), with_cupy([0, 1, 3, 257, 8192, 40000]))
@pytest.mark.parametrize(("experts", "k"), [(896, 16), (384, 8), (8, 2), (1024, 16), (33, 5), (16, 16), (1, 1)])
def test_topk(library: str, tokens: int, experts: int, k: int) -> None:
    wide = torch.randn(tokens, experts + 3, device="cuda") * 3
    check_topk(wide[:, 1 : experts + 1], torch.randn(experts, device="cuda") * 0.1, k, library=library)


@pytest.mark.parametrize(
    ("experts", "k", "groups"), [(256, 8, (8, 4)), (64, 16, (8, 2)), (32, 4, (32, 6)), (896, 16, (7, 3))]
)
def test_topk_in_groups(experts: int, k: int, groups: tuple[int, int]) -> None:
    check_topk(torch.randn(300, experts, device="cuda"), torch.randn(experts, device="cuda") * 0.1, k, groups=groups)


@pytest.mark.parametrize("experts", [896, 1000, 31])
def test_ties_go_to_the_lower_expert(experts: int) -> None:
    """Equal scores everywhere, saturated ones, few distinct ones: the reference's order exactly."""
    k = min(16, experts)
    zero = torch.zeros(experts, device="cuda")
    rows = [
        torch.zeros(experts, device="cuda"),
        torch.full((experts,), 200.0, device="cuda"),
        torch.full((experts,), float("-inf"), device="cuda"),
        torch.randint(0, 3, (experts,), device="cuda").float(),
        torch.randint(0, 2, (experts,), device="cuda").float() * float("inf"),
    ]
    rows[4] = torch.where(rows[4].isnan(), torch.full_like(rows[4], float("-inf")), rows[4])
    logits = torch.stack(rows)
    ids, weights = routing.topk(logits, zero, k)
    want, want_weights = reference.topk(logits, zero, k, 1, 1, 1.0, None, None)
    assert_equal("ids", ids, want)
    assert_close("weights", weights, want_weights, atol=TOLERANCE)


def test_a_token_does_not_feel_its_neighbours() -> None:
    """The same bits alone and among 3000, with few and with many scores that reach the bound."""
    logits, bias = torch.randn(3000, 896, device="cuda"), torch.zeros(896, device="cuda")
    logits[::3] = (logits[::3] * 4).round()
    ids, weights = routing.topk(logits, bias, 16)
    for row in (0, 1, 2, 3, 1500, 2999):
        one = routing.topk(logits[row : row + 1], bias, 16)
        assert_equal("ids", one[0], ids[row : row + 1])
        assert_equal("weights", one[1], weights[row : row + 1])


def test_bias_chooses_and_does_not_weigh() -> None:
    """Preferred experts with scores of 0, and biases far below 0: finite weights, the right experts."""
    logits = torch.zeros(2, 896, device="cuda")
    bias = torch.zeros(896, device="cuda")
    bias[100:116] = 5
    logits[:, 100:116] = -120
    ids, weights = routing.topk(logits, bias, 16)
    assert ids.tolist() == [list(range(100, 116))] * 2
    assert weights.eq(0).all()
    bias.fill_(-3)
    bias[7:27] = -2.5
    ids, _ = routing.topk(torch.zeros(1, 896, device="cuda"), bias, 16)
    assert ids.tolist() == [list(range(7, 23))]


def test_nan_rows_and_padding() -> None:
    logits = torch.randn(40, 896, device="cuda")
    logits[3, 17] = float("nan")
    logits[39, 0] = float("nan")  # beyond num_tokens: padding wins
    bias = torch.zeros(896, device="cuda")
    counts = torch.zeros(897, dtype=torch.int32, device="cuda")
    ids, weights = routing.topk(logits, bias, 16, num_tokens=int32(33), counts=counts)
    want, want_weights = reference.topk(logits, bias, 16, 1, 1, 1.0, int32(33), None)
    assert_equal("ids", ids, want)
    assert_close("weights", weights, want_weights, atol=TOLERANCE)
    assert counts.sum().item() == 32 * 16 + 1
    assert counts[896].item() == 1


@pytest.mark.parametrize(
    ("library", "tokens"), with_cupy([0, 1, 3, 64, 65, 257, 512, 513, 8192, 40000], few=[0, 1, 257, 513])
)
@pytest.mark.parametrize(("experts", "k"), [(896, 16), (8, 2), (1024, 8)])
@pytest.mark.parametrize("kind", ["random", "one expert", "padded", "sliced"])
def test_dispatch(library: str, tokens: int, experts: int, k: int, kind: str) -> None:
    ids = torch.rand(tokens, experts, device="cuda").topk(k).indices.int().contiguous()
    ids[1::7] = -1
    expert_range, num_tokens = None, None
    if kind == "one expert":
        ids.fill_(experts - 1)
    elif kind == "padded":
        num_tokens = int32(tokens * 2 // 3)
    elif kind == "sliced":
        expert_range = (experts // 4, experts // 2 + 1)
    counts = torch.ones(experts + 1, dtype=torch.int32, device="cuda")
    options = {"expert_range": expert_range, "num_tokens": num_tokens, "counts": counts}
    got = call(library, routing.dispatch, ids, experts, **options)
    first, last = expert_range or (0, experts)
    want = reference.dispatch(ids, first, last, num_tokens)
    for name, result, expected in zip(
        ("counts", "offsets", "pairs", "tiles", "num_tiles"), _parts(got), want, strict=True
    ):
        assert_equal(name, result, expected)
    assert counts.eq(0).all()


@pytest.mark.parametrize("tokens", [5, 300, 1500])
@pytest.mark.parametrize("tile_tokens", [8, 16, 40])
def test_small_tiles(tokens: int, tile_tokens: int) -> None:
    """Experts of one to many tiles beside each other; loads of one to three digits of the sort."""
    skewed = (torch.rand(tokens, 16, device="cuda") ** 4 * 200).int()
    got = routing.dispatch(skewed, 200, tile_tokens=tile_tokens)
    for result, expected in zip(_parts(got), reference.dispatch(skewed, 0, 200, None, tile_tokens), strict=True):
        assert_equal("dispatch", result, expected)


def _parts(d: routing.Dispatch) -> tuple[torch.Tensor, ...]:
    return d.counts, d.offsets, d.pairs, d.tiles, d.num_tiles


def test_one_graph_serves_fewer_tokens() -> None:
    """Captured for 32 tokens, replayed for 17: padding rows change no expert's count."""
    logits, bias = torch.randn(32, 896, device="cuda"), torch.zeros(896, device="cuda")
    counts, num_tokens = torch.zeros(897, dtype=torch.int32, device="cuda"), int32(32)

    def step() -> tuple[torch.Tensor, routing.Dispatch]:
        ids, weights = routing.topk(logits, bias, 16, num_tokens=num_tokens, counts=counts)
        return weights, routing.dispatch(ids, 896, num_tokens=num_tokens, counts=counts)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, work = step()
    for live in (17, 32, 0, 1):
        num_tokens.fill_(live)
        graph.replay()
        ids, want = reference.topk(logits, bias, 16, 1, 1, 1.0, int32(live), None)
        assert_close("weights", weights, want, atol=TOLERANCE)
        for name, got, expected in zip(
            ("counts", "offsets", "pairs"), _parts(work), reference.dispatch(ids, 0, 896, None), strict=False
        ):
            assert_equal(name, got, expected)
        assert counts.eq(0).all()


def test_wrong_arguments_name_the_argument() -> None:
    logits, bias = torch.zeros(2, 896, device="cuda"), torch.zeros(896, device="cuda")
    for match, wrong in (
        ("logits: expected dtype float32", lambda: routing.topk(logits.half(), bias, 16)),
        ("bias: expected shape", lambda: routing.topk(logits, bias[:5], 16)),
        ("k must be 1 to 16", lambda: routing.topk(logits, bias, 17)),
        ("num_groups must divide", lambda: routing.topk(logits, bias, 4, num_groups=5)),
        ("bias: expected a CUDA device", lambda: routing.topk(logits, bias.cpu(), 16)),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
