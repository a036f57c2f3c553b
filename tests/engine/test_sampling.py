"""Sampling seen from outside (F120, F123, F126): mixed batches, log-probabilities, distributions, extreme logits."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engine.llm import LLM
from engine.runner.sampler import Sampler
from engine.types import FinishReason, ParameterError, Request, SamplingParams, ScheduledRequest, StepPlan
from tests.engine.real import drain, real_core, solo

CPU = torch.device("cpu")


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def sample(logits: torch.Tensor, sampling: SamplingParams, count: int, seed: int = 0) -> list[int]:
    """``count`` requests that draw from the same row of logits."""
    requests = [Request(str(i), [1, 2], sampling) for i in range(count)]
    scheduled = [ScheduledRequest(r, 1, 1, True) for r in requests]
    plan = StepPlan(scheduled, count, count)
    output = Sampler(logits.numel(), seed, CPU).sample(plan, logits.expand(count, -1), lambda rows: rows)
    assert not output.errors
    return [output.tokens[r.request_id].token_id for r in requests]


MIXED = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 11},
    "top": {"temperature": 1.2, "seed": 12, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "seed": 13, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    "repetition": {"temperature": 0, "repetition_penalty": 1.8},
    "logprobs": {"temperature": 0, "logprobs": 5, "prompt_logprobs": 2},
    "stop ids": {"temperature": 0, "stop_token_ids": tuple(range(0, 256, 3))},
    "min tokens": {"temperature": 0, "stop_token_ids": tuple(range(0, 256, 3)), "min_tokens": 6},
    "short": {"temperature": 1.0, "seed": 14, "max_tokens": 1},
}


def test_mixed_batch_equals_each_request_alone() -> None:
    """F120. Draws invert one uniform number, so only a near tie could differ; with these seeds none does."""
    core = real_core(max_num_seqs=9, num_slots=9, max_num_batched_tokens=40)
    for i, (name, members) in enumerate(MIXED.items()):
        core.add(Request(name, prompt(i, 5 + 3 * i), SamplingParams(**{"max_tokens": 12, **members})))
    together = drain(core)
    for i, (name, members) in enumerate(MIXED.items()):
        alone = solo(prompt(i, 5 + 3 * i), SamplingParams(**{"max_tokens": 12, **members}), name)
        assert together[name].token_ids == alone.token_ids, name
        assert together[name].finish_reason == alone.finish_reason, name
        for mine, theirs in zip(together[name].logprobs, alone.logprobs, strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=5e-4)
    ends = set(range(0, 256, 3)) | core.eos_token_ids
    assert together["stop ids"].finish_reason is FinishReason.STOP
    assert [i for i, token in enumerate(together["stop ids"].token_ids) if token in ends] == [
        len(together["stop ids"].token_ids) - 1
    ]
    assert not ends & set(together["min tokens"].token_ids[:6])
    assert len(set(together["repetition"].token_ids)) > 1


def test_n_sequences_equal_requests_with_their_seeds() -> None:
    core = real_core()
    llm = LLM.from_core(core, None)
    sampling = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=10, ignore_eos=True)
    (result,) = llm.generate(prompt(50, 9), sampling, use_tqdm=False)
    got = [output.token_ids for output in result.outputs]
    assert len({tuple(ids) for ids in got}) == 3
    for i, ids in enumerate(got):
        own = SamplingParams(seed=5 + i, temperature=1.0, max_tokens=10, ignore_eos=True)
        assert ids == solo(prompt(50, 9), own).token_ids


def test_fault_in_one_requests_sampling_fails_only_that_one() -> None:
    """F120, second half: its logits are made NaN where the sampler sees them."""
    core = real_core()
    runner = core.runner
    execute = runner.execute

    def poison(plan: StepPlan):
        output = execute(plan)
        if any(s.request.request_id == "bad" for s in plan.scheduled):
            output.tokens.pop("bad", None)
            output.errors["bad"] = "injected"
        return output

    runner.execute = poison  # type: ignore[method-assign]
    for i, name in enumerate(("a", "bad", "c")):
        core.add(Request(name, prompt(i, 6), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)))
    outcomes = drain(core)
    assert (outcomes["bad"].finish_reason, outcomes["bad"].error) == (FinishReason.ERROR, "injected")
    for i, name in ((0, "a"), (2, "c")):
        alone = solo(prompt(i, 6), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert outcomes[name].token_ids == alone.token_ids


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("members", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 0}, {"min_p": 1.0}])
def test_logprobs_are_finite_whatever_was_cut(count: int, members: dict) -> None:
    """F123: what a filter removes must not show as -inf; the reported values are the model's own."""
    sampling = SamplingParams(**{"max_tokens": 4, "logprobs": count, "prompt_logprobs": count, "seed": 3, **members})
    outcome = solo(prompt(60, 7), sampling)
    entries = outcome.logprobs + [e for u in outcome.updates for e in u.prompt_logprobs]
    assert len(outcome.logprobs) == 4
    assert len(entries) == 4 + 6
    for entry in entries:
        assert len(entry.top) == count
        values = dict(entry.top)
        assert all(math.isfinite(v) and v <= 0 for v in (entry.logprob, *values.values()))
        assert sum(map(math.exp, values.values())) <= 1 + 1e-5  # fp32 exp and log of 20 values
        assert entry.rank >= 1
        if entry.rank <= count:
            assert values[entry.token_id] == entry.logprob
    with pytest.raises(ParameterError, match="between 0 and 20, got 21"):
        SamplingParams(logprobs=21)


VOCAB = 163_840


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-3])
def test_cold_sampling_of_the_full_vocabulary_is_greedy(temperature: float) -> None:
    """F126: sharp logits; the best id has a lead of 1 at least, which a temperature of 1e-3 makes e^1000."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    logits[77_777] = logits.max() + 1
    sampling = SamplingParams(temperature=temperature, presence_penalty=0.5, frequency_penalty=0.5, seed=1)
    assert sample(logits, sampling, 3) == [77_777] * 3


def test_equal_and_extreme_logits() -> None:
    """All equal: greedy takes id 0, draws spread. +-1e4: finite, and the larger ones alone are drawn."""
    equal = torch.zeros(VOCAB)
    assert sample(equal, SamplingParams(temperature=0), 2) == [0, 0]
    drawn = sample(equal, SamplingParams(temperature=1.0), 64)
    assert len(set(drawn)) > 60
    assert max(drawn) > VOCAB // 2
    extreme = torch.full((VOCAB,), -1e4)
    extreme[[5, 163_839]] = 1e4
    assert set(sample(extreme, SamplingParams(temperature=1.0), 40)) == {5, 163_839}
    assert sample(extreme, SamplingParams(temperature=0), 1) == [5]


@pytest.mark.parametrize("value", [1e-30, 1e-46, 5e-324])
def test_members_too_small_for_fp32_are_small_not_zero(value: float) -> None:
    """A member that became 0 divided by it, or cut even the best id: the id drawn was then outside the vocabulary."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 4
    best = int(logits.argmax())
    for members in ({"temperature": value}, {"temperature": 1.0, "top_p": value}, {"temperature": value, "top_p": 0.5}):
        assert sample(logits, SamplingParams(**members), 8) == [best] * 8, members
    assert max(sample(logits, SamplingParams(temperature=1.0, min_p=value), 8)) < 300
    repeated = sample(logits, SamplingParams(temperature=1.0, repetition_penalty=value), 8)
    positive = [i for i in (1, 2) if logits[i] > 0]  # the prompt's ids
    assert positive
    assert set(repeated) <= set(positive)


@pytest.mark.parametrize(
    "members", [{}, {"top_k": 8}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.9, "min_p": 0.02}]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_twenty_thousand_draws_follow_the_distribution(members: dict, temperature: float) -> None:
    """F126, chi-square against probabilities computed here in double, in the sampler's order: min-p, top-k, top-p."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(4)) * 1.5
    p = (logits.double() / temperature).softmax(0)
    p[p < members.get("min_p", 0) * p.max()] = 0
    order = p.argsort(descending=True)
    p[order[members.get("top_k", 24) :]] = 0
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= members.get("top_p", 1.0)]] = 0
    p /= p.sum()

    draws = 20_000
    counts = torch.bincount(
        torch.tensor(sample(logits, SamplingParams(temperature=temperature, **members), draws)), minlength=24
    )
    assert int(counts[p == 0].sum()) == 0, "an id that was cut has been drawn"
    expected = (p * draws)[p > 0]
    chi2 = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    freedom = int((p > 0).sum()) - 1
    # Wilson-Hilferty: (chi2 / k)^(1/3) is normal with mean 1 - 2/9k and variance 2/9k; 4.5 sigma is 1 in 300,000.
    spread = 2 / (9 * freedom)
    assert (chi2 / freedom) ** (1 / 3) < 1 - spread + 4.5 * math.sqrt(spread)
