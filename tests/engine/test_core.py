"""EngineCore on a fake runner: ends, limits, errors that stay with their owner, and random churn."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import CacheAccountingError
from engine.core import MAX_FAILED_STEPS, EngineCore
from engine.engine_config import EngineConfig
from engine.types import (
    EngineDeadError,
    FinishReason,
    ParameterError,
    Request,
    RequestUpdate,
    SamplingParams,
    StepOutput,
    StepPlan,
)
from tests.engine.fake_runner import VOCAB, FakeRunner, next_token, solo_tokens
from tests.engine.test_scheduler import collect, make_core, request, run


def start(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
    assert not core.has_work
    scheduler = core.scheduler
    kept = {**scheduler._requests, **scheduler._ranks, **scheduler._prompt_logprobs}
    assert kept == {}, "something is kept of requests that have ended"
    core.check()


def only(core: EngineCore, prompt: list[int], **sampling: object) -> list[RequestUpdate]:
    core.add(Request("r", prompt, SamplingParams(**sampling)))  # type: ignore[arg-type]
    updates: list[RequestUpdate] = []
    while core.has_work:
        updates += core.step()
    start(core)
    return updates


def ids(updates: list[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def test_length_ends_with_exactly_max_tokens() -> None:
    core, runner = make_core()
    updates = only(core, [5, 6, 7], max_tokens=9, ignore_eos=True)
    assert ids(updates) == solo_tokens([5, 6, 7], 9)
    assert [u.finish_reason for u in updates] == [None] * 8 + [FinishReason.LENGTH]
    assert runner.forgotten == ["r"]


def test_end_token_stop_id_and_ignore_eos() -> None:
    prompt = [5, 6, 7]
    tokens = solo_tokens(prompt, 6)
    for name, sampling, reason, stop_reason, count in (
        ("eos", {}, FinishReason.STOP, None, 4),
        ("ignored", {"ignore_eos": True}, FinishReason.LENGTH, None, 6),
        ("stop id", {"ignore_eos": True, "stop_token_ids": (tokens[2],)}, FinishReason.STOP, tokens[2], 3),
        ("min_tokens", {"min_tokens": 5}, FinishReason.LENGTH, None, 6),
        ("reached", {"min_tokens": 3}, FinishReason.STOP, None, 4),
        ("not yet reached", {"min_tokens": 4}, FinishReason.LENGTH, None, 6),
    ):
        core, runner = make_core()
        runner.eos_token_ids = frozenset({tokens[3]})
        updates = only(core, prompt, max_tokens=6, **sampling)
        assert ids(updates) == tokens[:count], name
        assert (updates[-1].finish_reason, updates[-1].stop_reason) == (reason, stop_reason), name


def test_thousand_requests_that_end_in_their_own_prefill() -> None:
    """F094: max_tokens=1, and an end token as the first one, in mixed chunk batches."""
    core, runner = make_core(chunk_size=16)
    first = {next_token([i % VOCAB] * (1 + i % 40)) for i in range(0, 1000, 3)}
    runner.eos_token_ids = frozenset(first)
    for i in range(1000):
        sampling = SamplingParams(max_tokens=1 if i % 2 else 30)
        core.add(Request(f"r{i}", [i % VOCAB] * (1 + i % 40), sampling))
    tokens = run(core)
    assert len(tokens) == 1000
    assert sum(len(t) == 1 for t in tokens.values()) > 600
    start(core)


@pytest.mark.parametrize(("prompt", "options"), [(12, {"max_model_len": 15}), (12, {"num_blocks": 4, "block_size": 4})])
def test_prompt_and_max_tokens_over_the_limit_are_clamped(prompt: int, options: dict[str, int]) -> None:
    core, _ = make_core(**options)
    updates = only(core, [3] * prompt, max_tokens=100, ignore_eos=True)
    assert len(ids(updates)) == core.max_num_tokens - prompt
    assert updates[-1].finish_reason is FinishReason.LENGTH
    updates = only(core, [3] * prompt, max_tokens=None, ignore_eos=True)
    assert len(ids(updates)) == core.max_num_tokens - prompt


def test_prompt_without_room_for_one_token_is_refused_with_both_numbers() -> None:
    core, _ = make_core(max_model_len=15)
    with pytest.raises(ParameterError, match=r"15 tokens.*at most 15 tokens.*max_model_len") as error:
        core.add(request("r", 15))
    assert error.value.param == "prompt"
    core, _ = make_core(num_blocks=3, block_size=4)
    with pytest.raises(ParameterError, match=r"40 tokens.*at most 12 tokens.*num_blocks"):
        core.add(request("r", 40))
    start(core)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([1, 2, VOCAB], rf"in \[0, {VOCAB}\), got {VOCAB}"),
        ([1, -1], "got -1"),
        ([1, 2.5], "integer token ids"),
        ([True], "integer token ids"),
    ],
)
def test_bad_prompts_are_refused(prompt: list, message: str) -> None:
    core, _ = make_core()
    with pytest.raises(ParameterError, match=message) as error:
        core.add(Request("r", prompt, SamplingParams()))
    assert error.value.param == "prompt"
    assert not core.has_work


def test_id_in_use_is_refused_and_free_again_afterwards() -> None:
    core, _ = make_core()
    core.add(request("r", 3))
    with pytest.raises(ParameterError, match="'r' is already in use"):
        core.add(request("r", 3))
    run(core)
    core.add(request("r", 3))
    run(core)


def test_no_token_asked_needs_prompt_logprobs_and_ends_after_the_prompt() -> None:
    core, _ = make_core(chunk_size=3)
    with pytest.raises(ParameterError, match="max_tokens must be at least 1") as error:
        core.add(Request("r", [1, 2], SamplingParams(max_tokens=0)))
    assert error.value.param == "max_tokens"
    (update,) = only(core, [9, 8, 7, 6, 5, 4, 3, 2], max_tokens=0, prompt_logprobs=1)
    assert update.token_ids == []
    assert update.finish_reason is FinishReason.LENGTH
    assert [entry.token_id for entry in update.prompt_logprobs] == [8, 7, 6, 5, 4, 3, 2]
    assert core.stats().prompt_tokens == 8


def test_prompt_of_the_whole_limit_is_served_when_no_token_is_asked() -> None:
    core, _ = make_core(max_model_len=8)
    (update,) = only(core, [9, 8, 7, 6, 5, 4, 3, 2], max_tokens=0, prompt_logprobs=0)
    assert len(update.prompt_logprobs) == 7


def test_prompt_logprobs_come_once_even_after_preemption() -> None:
    core, _ = make_core(num_blocks=22, chunk_size=2)
    core.add(request("a", 8, max_tokens=60))
    prompt = [(3 * i) % VOCAB for i in range(40)]
    b = Request("b", prompt, SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=0))
    core.add(b)
    got = []
    while core.has_work:
        got += [e.token_id for u in core.step() if u.request_id == "b" for e in u.prompt_logprobs]
    assert b.num_preemptions > 0
    assert got == prompt[1:]
    assert core.stats().prompt_tokens == 48


def test_step_that_raises_ends_its_requests_and_nothing_else() -> None:
    """F091: an allocation error in step 5 of a mixed batch."""
    core, runner = make_core(max_num_seqs=3, max_num_batched_tokens=16)
    calls = 0

    def fail_fifth(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise MemoryError("no memory for 1 GiB")

    runner.before_step = fail_fifth
    lengths = {"a": 4, "b": 4, "c": 90, "d": 7, "e": 7}
    for name, length in lengths.items():
        core.add(request(name, length, max_tokens=12))
    tokens: dict[str, list[int]] = {}
    ended: dict[str, RequestUpdate] = {}
    while core.has_work:
        updates = core.step()
        collect(tokens, updates)
        ended |= {u.request_id: u for u in updates if u.finish_reason}
    errors = sorted(name for name, u in ended.items() if u.finish_reason is FinishReason.ERROR)
    assert errors == ["a", "b", "c"], "the failed step was a mixed one of these three"
    assert ended["a"].error == "MemoryError: no memory for 1 GiB"
    for name in "de":
        assert tokens[name] == solo_tokens(request(name, 7).prompt_token_ids, 12)
    start(core)
    assert ids(only(core, [1, 2, 3], max_tokens=3, ignore_eos=True)) == solo_tokens([1, 2, 3], 3)


def test_step_after_step_that_fails_ends_the_engine_but_one_success_forgives() -> None:
    core, runner = make_core()

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("illegal memory access")

    for _ in range(2):
        runner.before_step = fail
        for i in range(MAX_FAILED_STEPS - 1):
            updates = only(core, [1 + i], max_tokens=2)
            assert [u.finish_reason for u in updates] == [FinishReason.ERROR]
        runner.before_step = None
        assert ids(only(core, [1, 2, 3], max_tokens=3, ignore_eos=True)) == solo_tokens([1, 2, 3], 3)
    runner.before_step = fail
    for i in range(MAX_FAILED_STEPS - 1):
        only(core, [1 + i], max_tokens=2)
    with pytest.raises(EngineDeadError, match=rf"last {MAX_FAILED_STEPS} steps all failed.*illegal memory access"):
        only(core, [1], max_tokens=2)


def test_lost_device_is_told_at_once() -> None:
    core, runner = make_core()

    def lose(plan: StepPlan) -> None:
        raise EngineDeadError("the device is lost")

    runner.before_step = lose
    core.add(request("a", 5))
    with pytest.raises(EngineDeadError, match="the device is lost"):
        core.step()


@pytest.mark.parametrize("cut", range(1, 9))
def test_interrupted_step_is_recomputed_exactly(cut: int) -> None:
    """Ctrl-C inside a step leaves states that absorbed tokens nobody counted; the outputs must not show it."""
    core, runner = make_core(max_num_seqs=3, max_num_batched_tokens=16)
    whole, calls = runner.execute, 0

    def interrupted(plan: StepPlan) -> StepOutput:
        nonlocal calls
        calls += 1
        output = whole(plan)
        if calls == cut:
            raise KeyboardInterrupt
        return output

    runner.execute = interrupted  # type: ignore[method-assign]
    for name, length in (("a", 4), ("b", 30), ("c", 9)):
        core.add(request(name, length, max_tokens=12))
    tokens: dict[str, list[int]] = {}
    interrupts = 0
    while core.has_work:
        try:
            collect(tokens, core.step())
        except KeyboardInterrupt:
            interrupts += 1
            core.check()
    assert interrupts == 1
    for name, length in (("a", 4), ("b", 30), ("c", 9)):
        assert tokens[name] == solo_tokens(request(name, length).prompt_token_ids, 12), name
    start(core)


def test_error_of_one_request_stays_with_it_and_its_slot_is_clean() -> None:
    core, runner = make_core(num_slots=3, max_num_seqs=3)
    runner.request_errors["bad"] = "logits are not finite"
    for name in ("a", "bad", "c", "next"):
        core.add(request(name, 10, max_tokens=6))
    ended: dict[str, RequestUpdate] = {}
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        updates = core.step()
        collect(tokens, updates)
        ended |= {u.request_id: u for u in updates if u.finish_reason}
    assert ended["bad"].finish_reason is FinishReason.ERROR
    assert ended["bad"].error == "logits are not finite"
    assert tokens["bad"] == []
    for name in ("a", "c", "next"):
        assert tokens[name] == solo_tokens(request(name, 10).prompt_token_ids, 6)
    start(core)


def test_missing_token_is_an_error_not_a_hang() -> None:
    core, runner = make_core()
    real = runner.execute

    def lose(plan: StepPlan):
        output = real(plan)
        output.tokens.clear()
        return output

    runner.execute = lose  # type: ignore[method-assign]
    (update,) = only(core, [1, 2], max_tokens=3)
    assert update.finish_reason is FinishReason.ERROR
    assert "neither a token nor an error" in (update.error or "")


def test_invariant_check_sees_a_state_with_a_token_too_many() -> None:
    core, runner = make_core()
    core.add(request("r", 4))
    core.step()
    runner.num_absorbed_tokens[core.scheduler.running.first().slot] += 1
    with pytest.raises(CacheAccountingError, match="slot 1 holds 5 tokens, the scheduler counts 4"):
        core.check()


def test_abort_at_every_stage_returns_all_counts() -> None:
    """F092: queued, in the first and the last chunk, at the first token, in decode, in the step that ends it."""
    core, runner = make_core(num_slots=4, max_num_batched_tokens=16, chunk_size=8)
    shared = [5] * 24
    requests = [Request(f"r{i}", [*shared, i], SamplingParams(max_tokens=6, ignore_eos=True)) for i in range(40)]
    for r in requests:
        core.add(r)
    plans: dict[str, int] = {f"r{i}": i % 11 for i in range(30)}  # steps a request lives through before its abort
    seen: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    stages: set[str] = set()
    while core.has_work:
        for name, life in plans.items():
            if seen.get(name, 0) >= life and name in core.scheduler:
                r = requests[int(name[1:])]
                done, total = r.num_computed_tokens, len(r.prompt_token_ids)
                stages.add("queued" if not r.slot else "prefill" if done < total else f"token {r.num_tokens - total}")
                assert core.abort(name)
                assert not core.abort(name)
        collect(tokens, core.step())
        for name, _, _ in runner.plans[-1]:
            seen[name] = seen.get(name, 0) + 1
    assert {"queued", "prefill", "token 1", "token 3", "token 5"} <= stages
    for r in requests[30:]:
        assert tokens[r.request_id] == solo_tokens(r.prompt_token_ids, 6)
    start(core)
    assert set(runner.forgotten) == {r.request_id for r in requests}


def test_abort_of_an_unknown_request_says_so() -> None:
    core, _ = make_core()
    assert not core.abort("nobody")


def test_totals_count_prompts_and_tokens_once() -> None:
    core, _ = make_core(num_blocks=20, chunk_size=1)
    for i in range(6):
        core.add(request(f"r{i}", (3, 3, 40)[i % 3], max_tokens=36))
    run(core)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert (stats.prompt_tokens, stats.generation_tokens) == (2 * (3 + 3 + 40), 6 * 36)


def test_objects_do_not_pile_up() -> None:
    """F133: rounds of requests with preemptions and aborts leave the number of live objects where it was."""
    core, runner = make_core(num_blocks=24)
    runner.check = False
    counts = []
    for round_number in range(6):
        for i in range(60):
            core.add(request(f"{round_number}-{i}", 1 + 7 * i % 40, max_tokens=1 + i % 30))
        for i in range(0, 60, 5):
            core.abort(f"{round_number}-{i}")
        run(core)
        runner.forgotten.clear()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert core.stats().num_preemptions > 0
    assert max(counts[2:]) - min(counts[2:]) < 50, counts


def test_unresolved_options_are_refused() -> None:
    runner = FakeRunner(EngineConfig(max_model_len=8, num_blocks=4, num_slots=2))
    with pytest.raises(ValueError, match="filled in by the runner"):
        EngineCore(runner, EngineConfig())


def churn(seed: int, num_requests: int) -> dict[str, int]:
    """Random arrivals, aborts, failing steps and failing requests; every survivor must equal its solo run."""
    rng = random.Random(seed)
    core, runner = make_core(
        max_model_len=120,
        num_blocks=rng.choice([30, 32, 36, 60]),
        num_slots=rng.choice([3, 5, 8]),
        max_num_seqs=rng.choice([3, 6, 8]),
        max_num_batched_tokens=rng.choice([8, 17, 64]),
        chunk_size=rng.choice([None, 1, 3, 16]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
    )
    fail_rate = rng.choice([0, 0, 0.01])

    def maybe_fail(plan: StepPlan) -> None:
        if rng.random() < fail_rate:
            raise RuntimeError("injected")

    runner.before_step = maybe_fail
    waiting = []
    for i in range(num_requests):
        length = rng.choice([1, 2, 3, 4, 5, 21, 40, 60])
        sampling = SamplingParams(max_tokens=rng.choice([1, 9, 40, 40]), ignore_eos=True)
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        waiting.append(Request(f"r{i}", prompt, sampling, priority=rng.randrange(3)))
    requests = {r.request_id: r for r in waiting}
    for name in rng.sample(sorted(requests), num_requests // 20):
        runner.request_errors[name] = "injected"
    tokens: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    scheduled = steps = idle = 0
    while waiting or core.has_work:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
            core.add(waiting.pop())
        if rng.random() < 0.02 and (live := sorted(set(requests) - set(ended) - {r.request_id for r in waiting})):
            name = rng.choice(live)
            assert core.abort(name)
            ended[name] = FinishReason.ABORT
        before = (runner.num_tokens_computed, core.stats().num_steps)
        updates = core.step()
        collect(tokens, updates)
        for update in updates:
            assert update.request_id not in ended, "news of a request that has ended"
            if update.finish_reason is not None:
                ended[update.request_id] = update.finish_reason
        if core.stats().num_steps > before[1] and runner.num_tokens_computed > before[0]:
            scheduled += core.stats().last_step_tokens
        idle = idle + 1 if core.stats().num_steps == before[1] else 0
        assert idle < 200
        steps += 1
        assert steps < 200 * num_requests
    assert scheduled == runner.num_tokens_computed
    assert ended.keys() == requests.keys()
    for name, reason in ended.items():
        r = requests[name]
        expected = solo_tokens(r.prompt_token_ids, r.max_num_tokens - len(r.prompt_token_ids))
        got = tokens.get(name, [])
        assert got == (expected if reason is FinishReason.LENGTH else expected[: len(got)]), name
    start(core)
    survivors = sum(reason is FinishReason.LENGTH for reason in ended.values())
    return {"preemptions": core.stats().num_preemptions, "survivors": survivors}


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_churn_conserves_memory_and_every_survivor_equals_its_solo_run(seed: int) -> None:
    churn(seed, 40)


def test_churn_really_preempts_and_mostly_survives() -> None:
    results = [churn(seed, 40) for seed in range(12)]
    assert sum(r["preemptions"] for r in results) > 20
    assert sum(r["survivors"] for r in results) > 0.5 * 12 * 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_churn() -> None:
    for seed in range(300):
        churn(10_000 + seed, 200)
