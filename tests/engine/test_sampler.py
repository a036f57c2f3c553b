"""Sampling on given logits: distributions, limits, penalties, seeds, log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.runner.penalties import PenaltyCounts, apply_penalties
from engine.runner.sampler import Sampler, draw, uniform
from engine.types import Request, SamplingParams, ScheduledRequest, StepOutput, StepPlan
from tests.engine.drive import execute, expected, request, tiny_runner

VOCAB = 16
CPU = torch.device("cpu")


def make(name: str, output: list[int] | None = None, prompt: tuple[int, ...] = (1, 2), **params: object) -> Request:
    r = Request(name, list(prompt), SamplingParams(**{"max_tokens": None, **params}), eos_token_ids=frozenset({0}))
    r.output_token_ids = list(output or [])
    return r


def sample(sampler: Sampler, requests: list[Request], logits: torch.Tensor, *, hidden: bool = True) -> StepOutput:
    """One step in which each request has one token; its hidden state is its row of logits, or the row's number."""
    scheduled = [ScheduledRequest(r, r.num_tokens - 1, 1, True) for r in requests]
    plan = StepPlan(scheduled, len(scheduled), len(scheduled))
    if hidden:
        return sampler.sample(plan, logits, lambda rows: rows)
    return sampler.sample(
        plan, torch.arange(len(logits), dtype=torch.float32)[:, None], lambda x: logits[x[:, 0].long()]
    )


def tokens(requests: list[Request], logits: torch.Tensor, seed: int = 0) -> list[int]:
    output = sample(Sampler(logits.shape[1], seed, CPU), requests, logits)
    assert not output.errors
    return [output.tokens[r.request_id].token_id for r in requests]


def many(logits: torch.Tensor, count: int = 4000, **params: object) -> np.ndarray:
    """How often each id is drawn in ``count`` draws from the one row of logits."""
    requests = [make(str(i), **params) for i in range(count)]
    return np.bincount(tokens(requests, logits.expand(count, -1)), minlength=logits.shape[-1])


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 3.0, 1.5, 0.2, -0.3, 0.8, 2.5, -4.0, 1.1, 0.4, -0.9])


def within(counts: np.ndarray, probs: torch.Tensor) -> None:
    """Each frequency within five standard deviations of a binomial: one false alarm in 10^5 runs."""
    total = counts.sum()
    p = probs.double().numpy()
    assert (np.abs(counts - total * p) <= 5 * np.sqrt(total * p * (1 - p)) + 1e-9).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    within(many(LOGITS, temperature=temperature), (LOGITS / temperature).softmax(-1))


def test_top_k_top_p_and_min_p_cut_and_renormalise() -> None:
    probs = LOGITS.softmax(-1)
    order = probs.argsort(descending=True)

    def kept(ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(probs)
        out[ids] = probs[ids]
        return out / out.sum()

    within(many(LOGITS, top_k=3), kept(order[:3]))
    needed = int((probs[order].cumsum(0) < 0.7).sum()) + 1  # the smallest set that reaches 0.7
    within(many(LOGITS, top_p=0.7), kept(order[:needed]))
    within(many(LOGITS, min_p=0.2), kept((probs >= 0.2 * probs.max()).nonzero()[:, 0]))
    within(many(LOGITS, top_k=5, top_p=0.5), kept(order[:2]))  # 0.5 of the five that top-k leaves: two ids
    assert many(LOGITS, 50, top_p=1e-9)[6] == 50  # the best id always stays
    assert many(LOGITS, 50, top_k=1)[6] == 50
    assert many(LOGITS, 50, min_p=1.0)[6] == 50


def test_equal_logits_at_the_border_of_top_k_keep_the_lower_ids() -> None:
    counts = many(torch.zeros(VOCAB), 400, top_k=4)
    assert counts[:4].sum() == 400
    assert (counts[:4] > 0).all()


def test_top_p_keeps_no_id_beyond_the_one_that_reaches_it() -> None:
    counts = many(torch.zeros(4), 200, top_p=0.5)  # four times 0.25 exactly
    assert (counts > 0).tolist() == [True, True, False, False]


def test_a_tail_of_unlikely_ids_is_not_lost_to_rounding() -> None:
    """163,839 ids of 1e-8 beside one of 1: a running sum in fp32 would stand still at 1."""
    logits = torch.full((1, 163_840), math.log(1e-8))
    logits[0, 0] = 0
    tail = 163_839e-8 / (1 + 163_839e-8)
    assert draw(logits, [make("a")], np.array([1 - 1.01 * tail])).item() == 0
    assert draw(logits, [make("a")], np.array([1 - 0.5 * tail])).item() == pytest.approx(81_920, abs=100)


def test_greedy_takes_the_lower_of_equal_ids_and_ignores_the_seed() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [7, 3, 9]] = 2
    assert tokens([make("a", temperature=0), make("b", temperature=0, seed=5)], logits) == [3, 3]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    assert many(LOGITS * 30, 20, temperature=temperature)[6] == 20


def test_a_seeded_draw_does_not_depend_on_batch_mates() -> None:
    def request_(output: list[int]) -> Request:
        return make("x", output, seed=123, temperature=1.3, top_p=0.9)

    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)) * 2
    alone = [tokens([request_([5] * i)], rows[i : i + 1], seed=i)[0] for i in range(9)]
    kinds: list[dict] = [{"temperature": 0}, {"top_k": 2}, {"repetition_penalty": 1.5}, {"min_p": 0.1}, {"seed": 123}]
    beside = []
    for i in range(9):
        mates = [make(f"m{j}", **kinds[j % len(kinds)]) for j in range(7)]
        batch = [*mates[:3], request_([5] * i), *mates[3:]]
        logits = torch.cat([torch.randn(3, 64), rows[i : i + 1], torch.randn(4, 64)])
        beside.append(tokens(batch, logits)[3])
    assert beside == alone
    assert len(set(alone)) > 3  # it does draw


def test_seeds_and_streams_differ() -> None:
    flat = torch.zeros(200, 1000)
    assert len(set(tokens([make(str(i), seed=i) for i in range(200)], flat))) > 150
    unseeded = [make(str(i)) for i in range(200)]
    first, second = tokens(unseeded, flat, seed=0), tokens(unseeded, flat, seed=1)
    assert tokens(unseeded, flat, seed=0) == first  # the engine's seed fixes a run
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    by_position = [tokens([make("a", [1] * i, seed=9)], flat[:1])[0] for i in range(100)]
    assert len(set(by_position)) > 80


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    seeds, counts = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    u = uniform(seeds.ravel(), counts.ravel())
    assert u.min() >= 0
    assert u.max() < 1
    histogram = np.histogram(u, bins=50, range=(0, 1))[0]
    expected_count = len(u) / 50
    assert (np.abs(histogram - expected_count) < 5 * math.sqrt(expected_count)).all()  # five standard deviations
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(len(u))


def test_the_largest_uniform_number_never_leaves_the_vocabulary() -> None:
    probs = torch.tensor([[0.3, 0.7, 0.0, 0.0]])
    top = np.array([1 - 2.0**-52])
    assert draw(probs.log(), [make("a")], top).item() == 1
    assert draw(probs.log(), [make("a", top_p=0.999)], top).item() == 0  # sorted order: 0.7 first, then 0.3
    assert draw(probs.log(), [make("a")], np.array([0.0])).item() == 0


def test_penalties_follow_the_openai_and_huggingface_definitions() -> None:
    logits = LOGITS.expand(3, -1)
    batch = [
        make("r", [6, 6, 4], prompt=(11, 12), temperature=0, repetition_penalty=2.0),
        make("f", [6, 6, 11], temperature=0, frequency_penalty=0.4),
        make("p", [6], temperature=0, presence_penalty=1.0),
    ]
    got = apply_penalties(logits, batch, [PenaltyCounts(r, VOCAB, CPU) for r in batch])
    want = logits.clone()
    for t in (6, 4, 11, 12):  # output and prompt
        want[0, t] = LOGITS[t] / 2 if LOGITS[t] > 0 else LOGITS[t] * 2
    want[1, 6] -= 0.8
    want[1, 11] -= 0.4
    want[2, 6] -= 1.0
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)  # one or two fp32 roundings of numbers below 10
    assert tokens(batch, logits) == [0, 6, 11]


def test_penalty_counts_follow_the_output_step_by_step_and_are_forgotten() -> None:
    sampler = Sampler(VOCAB, 0, CPU)
    r = make("a", temperature=0, frequency_penalty=2.0)
    seen = []
    for _ in range(6):
        token = sample(sampler, [r], LOGITS[None]).tokens["a"].token_id
        r.output_token_ids.append(token)
        seen.append(token)
    assert seen == [6, 11, 0, 7, 13, 1]  # id 6 falls from 3.0 to 1.0, where id 1 equals it and is lower
    sampler.forget("a")
    assert not sampler.states
    assert sample(sampler, [r], LOGITS[None]).tokens["a"].token_id == tokens([r], LOGITS[None])[0]


def test_only_requests_with_penalties_keep_counts() -> None:
    sampler = Sampler(VOCAB, 0, CPU)
    sample(sampler, [make("a"), make("b", presence_penalty=1)], LOGITS.expand(2, -1))
    assert sampler.states["a"].counts is None
    assert sampler.states["b"].counts is not None


def test_min_tokens_bans_end_and_stop_ids_until_it_is_reached() -> None:
    logits = LOGITS.clone()
    logits[0] = 9  # the end id of make()
    logits[5], logits[6] = 8, 7

    def best(count: int, **params: object) -> int:
        return tokens(
            [make("a", [1] * count, temperature=0, min_tokens=3, stop_token_ids=(5, 999), **params)], logits[None]
        )[0]

    assert [best(n) for n in range(5)] == [6, 6, 6, 0, 0]
    assert best(0, top_k=1) == 6
    everything = make("b", min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    output = sample(Sampler(VOCAB, 0, CPU), [everything, make("c")], logits.expand(2, -1))
    assert output.errors.keys() == {"b"}
    assert output.tokens.keys() == {"c"}


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float, hidden: bool) -> None:
    """Whether it is seen in the hidden state already, or in the logits alone."""
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = bad
    batch = [make("a", seed=1), make("b", seed=1, logprobs=2), make("c", temperature=0, logprobs=2)]
    output = sample(Sampler(VOCAB, 0, CPU), batch, logits, hidden=hidden)
    assert output.errors.keys() == {"b"}
    assert output.tokens["a"].token_id == tokens([batch[0]], LOGITS[None])[0]
    assert output.tokens["c"].token_id == 6


def test_logprobs_are_of_the_raw_logits() -> None:
    r = make("a", [6], temperature=0, logprobs=3, frequency_penalty=2.0, top_k=1)
    (token,) = sample(Sampler(VOCAB, 0, CPU), [r], LOGITS[None]).tokens.values()
    want = LOGITS.log_softmax(-1)
    assert token.token_id == 11  # 6 was penalised
    assert token.logprobs is not None
    assert token.logprobs.token_id == 11
    assert token.logprobs.logprob == pytest.approx(want[11].item(), abs=1e-6)  # fp32 rounding
    assert token.logprobs.rank == 2
    assert [t for t, _ in token.logprobs.top] == [6, 11, 0]
    assert [p for _, p in token.logprobs.top] == pytest.approx([want[t].item() for t in (6, 11, 0)], abs=1e-6)
    none = sample(Sampler(VOCAB, 0, CPU), [make("b", logprobs=0), make("c")], LOGITS.expand(2, -1)).tokens
    assert none["b"].logprobs is not None
    assert none["b"].logprobs.top == []
    assert none["c"].logprobs is None


@pytest.mark.gpu
def test_sampling_on_the_gpu_gives_the_tokens_of_the_cpu() -> None:
    """Every option at once. fp32 sums may differ in the last bit, which moves a draw in one of 10^6 cases."""
    options: list[dict] = [
        {"temperature": 0, "logprobs": 2},
        {"seed": 1, "top_k": 5},
        {"seed": 2, "top_p": 0.8, "logprobs": 0},
        {"seed": 3, "min_p": 0.05},
        {"seed": 4, "temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"seed": 5, "min_tokens": 4, "stop_token_ids": (3,)},
    ]
    logits = torch.randn(len(options), 1000, generator=torch.Generator().manual_seed(3)) * 2
    got = []
    for device in ("cpu", "cuda"):
        batch = [make(str(i), [7, 7, 9], **option) for i, option in enumerate(options)]
        output = sample(Sampler(1000, 0, torch.device(device)), batch, logits.to(device))
        got.append([output.tokens[str(i)].token_id for i in range(len(options))])
    assert got[0] == got[1]


@pytest.mark.parametrize("chunks", [(64,), (1, 2, 3, 40, 18)])
def test_prompt_logprobs_in_any_chunks(chunks: tuple[int, ...]) -> None:
    golden = expected()
    ids = golden["prompt_64.ids"].tolist()
    runner = tiny_runner()
    r = request("a", ids, 1, runner, SamplingParams(temperature=0, prompt_logprobs=2))
    entries = [e for count in chunks for e in execute(runner, [(r, count)]).prompt_logprobs.get("a", [])]
    want = golden["prompt_64.logits"].log_softmax(-1)
    assert [e.token_id for e in entries] == ids[1:]
    for position, entry in enumerate(entries):
        row = want[position]
        assert entry.logprob == pytest.approx(row[ids[position + 1]].item(), abs=1e-3)  # twice the logit bound
        assert entry.rank == 1 + int((row > row[ids[position + 1]]).sum())
        assert len(entry.top) == 2
    # a preempted request computes its prompt again and reports nothing twice
    r.num_computed_tokens = 0
    assert not execute(runner, [(r, 30)]).prompt_logprobs
