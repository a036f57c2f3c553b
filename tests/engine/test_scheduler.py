"""The scheduler's promises: order, budget, fairness, admission, preemption. A fake runner checks every plan."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine_cpu import LIMIT_MS, step_times
from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.scheduler.budget import MIN_CHUNK, prefill_budget, split_prefill
from engine.types import FinishReason, QueueFullError, Request, RequestUpdate, SamplingParams
from tests.engine.fake_runner import FakeRunner, solo_tokens


def make_core(**options: object) -> tuple[EngineCore, FakeRunner]:
    defaults: dict[str, object] = {
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 4096,
        "num_slots": 8,
        "check_invariants": True,
    }
    config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
    runner = FakeRunner(config)
    return EngineCore(runner, config), runner


def request(name: str, length: int, max_tokens: int = 4, **members: object) -> Request:
    prompt = [(7 * i + len(name)) % 97 for i in range(length)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **members)  # type: ignore[arg-type]


def run(core: EngineCore, limit: int = 10_000) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    steps = 0
    while core.has_work:
        collect(tokens, core.step())
        steps += 1
        assert steps < limit, "the engine does not come to an end"
    return tokens


def collect(tokens: dict[str, list[int]], updates: list[RequestUpdate]) -> None:
    for update in updates:
        tokens.setdefault(update.request_id, []).extend(update.token_ids)


@pytest.mark.parametrize(("running", "expected"), [(1, 8186), (32, 8000), (128, 7424), (1024, 2048)])
def test_budget_reserves_for_what_runs(running: int, expected: int) -> None:
    assert prefill_budget(8192, running, tokens_per_decode=6) == expected


def test_budget_never_negative() -> None:
    assert prefill_budget(8, 9) == 0


@pytest.mark.parametrize(
    ("prompts", "budget", "chunk_size", "expected"),
    [
        ([(0, 1000)], 64, None, [64]),
        ([(0, 1000), (0, 1000)], 64, None, [32, 32]),
        ([(0, 1000), (0, 900), (0, 800), (0, 20)], 65, None, [45, 0, 0, 20]),  # 12 left: too few for a chunk
        ([(0, 1000), (0, 900), (0, 20)], 100, None, [50, 30, 20]),
        ([(0, 5), (0, 1000)], 64, None, [5, 59]),
        ([(0, 1000), (0, 1000)], 64, 7, [7, 7]),
        ([(0, 1000), (1, 10), (0, 500)], 64, None, [32, 0, 32]),  # priority before length
        ([(0, 1000)], MIN_CHUNK - 1, None, [MIN_CHUNK - 1]),  # the first one always advances
        ([(0, 2), (0, 3)], 5, None, [2, 3]),
        ([(0, 9), (0, 9)], 1, None, [1, 0]),
        ([(0, 9)], 0, None, [0]),
        ([], 64, None, []),
    ],
)
def test_split_of_the_prompt_budget(
    prompts: list[tuple[int, int]], budget: int, chunk_size: int | None, expected: list[int]
) -> None:
    assert split_prefill(prompts, budget, chunk_size) == expected


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), max_size=12),
    st.integers(0, 400),
    st.none() | st.integers(1, 64),
)
def test_split_never_exceeds_anything_and_the_first_always_advances(
    prompts: list[tuple[int, int]], budget: int, chunk_size: int | None
) -> None:
    chunks = split_prefill(prompts, budget, chunk_size)
    assert sum(chunks) <= budget
    assert all(0 <= c <= min(left, chunk_size or left) for c, (_, left) in zip(chunks, prompts, strict=True))
    if prompts and budget:
        assert chunks[0] >= min(prompts[0][1], (budget + 1) // 2, chunk_size or budget)
    if chunk_size is None:
        unused = min(budget, sum(left for _, left in prompts)) - sum(chunks)
        assert unused < MIN_CHUNK, "more of the pass stays empty than a chunk that is not worth it"


def test_mixed_batch_puts_decodes_first_and_stays_within_the_pass() -> None:
    core, runner = make_core()
    core.add(request("a", 3, max_tokens=30))
    core.step()
    core.add(request("b", 500))
    core.step()
    assert runner.plans[-1] == [("a", 3, 1), ("b", 0, 63)]
    run(core)


def test_one_token_first_chunk_is_prefill() -> None:
    core, runner = make_core()
    core.add(request("a", 9, max_tokens=9))
    core.step()
    core.add(request("b", 1))
    plan = core.scheduler.schedule()
    assert plan is not None
    assert [s.request.request_id for s in plan.scheduled] == ["a", "b"]
    assert plan.num_decodes == 1
    core.scheduler.update(plan, runner.execute(plan))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 16, 33])
def test_chunk_size_bounds_each_prompt(chunk_size: int) -> None:
    core, runner = make_core(chunk_size=chunk_size)
    core.add(request("a", 100, max_tokens=2))
    assert run(core)["a"] == solo_tokens(request("a", 100).prompt_token_ids, 2)
    assert [plan[0][2] for plan in runner.plans][: 100 // chunk_size] == [chunk_size] * (100 // chunk_size)


def test_middle_chunks_give_no_token_but_progress_alone_and_four_together() -> None:
    """F097: steps that yield nothing must not stop the engine; a short prompt beside four long ones is on time."""
    core, runner = make_core()
    core.add(request("long0", 640, max_tokens=1))
    for step in range(1, 10):
        assert core.step() == []
        assert core.stats().last_step_tokens == 64, f"step {step}"
    assert [u.request_id for u in core.step()] == ["long0"]

    for i in range(4):
        core.add(request(f"long{i + 1}", 640, max_tokens=1))
    core.step()
    core.add(request("short", 8, max_tokens=1))
    before = runner.num_forwards
    while not any(u.request_id == "short" for u in core.step()):
        assert core.stats().last_step_tokens > 0
    assert runner.num_forwards - before == 1, "a short prompt goes along with the first step it can be in"
    run(core)


def test_long_prompt_does_not_delay_a_short_one() -> None:
    core, runner = make_core()
    core.add(request("long", 2000, max_tokens=1))
    core.step()
    core.add(request("short", 20, max_tokens=1))
    assert [u.request_id for u in core.step()] == ["short"]
    assert runner.plans[-1] == [("long", 64, 44), ("short", 0, 20)]
    run(core)


def test_admission_waits_for_slots_and_for_blocks() -> None:
    core, _ = make_core(num_slots=2)
    for name in "abc":
        core.add(request(name, 4))
    core.step()
    assert (core.stats().num_running, core.stats().num_waiting, core.stats().slots_used) == (2, 1, 2)
    run(core)

    core, _ = make_core(num_blocks=8)
    core.add(request("a", 16))
    core.add(request("b", 16))  # 4 blocks are free, but a's next one must stay free
    core.add(request("c", 1))  # would fit: nothing overtakes the first in line
    core.step()
    assert (core.stats().num_running, core.stats().num_waiting, core.stats().blocks_used) == (1, 2, 4)
    run(core)
    assert core.stats().num_preemptions == 0


def test_fcfs_ignores_priority_and_priority_obeys_it() -> None:
    for policy, expected in (("fcfs", ["a", "b", "c"]), ("priority", ["c", "b", "a"])):
        core, runner = make_core(max_num_seqs=1, scheduling_policy=policy)
        for i, name in enumerate("abc"):
            core.add(request(name, 3, max_tokens=1, priority=-i))
        run(core)
        assert [plan[0][0] for plan in runner.plans] == expected


def test_the_arrival_counts_not_the_order_of_adding() -> None:
    core, runner = make_core(max_num_seqs=1)
    for name, arrival in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        one = request(name, 3, max_tokens=1)
        one.arrival_time = arrival
        core.add(one)
    run(core)
    assert [plan[0][0] for plan in runner.plans] == ["b", "c", "a"]


def test_victim_is_the_lowest_priority_then_the_latest() -> None:
    for policy, victim in (("fcfs", "c"), ("priority", "b")):
        core, _ = make_core(num_blocks=6, scheduling_policy=policy)
        requests = [
            request("a", 4, max_tokens=12, priority=0, arrival_time=1.0),
            request("b", 4, max_tokens=12, priority=5, arrival_time=2.0),
            request("c", 4, max_tokens=12, priority=0, arrival_time=3.0),
        ]
        for r in requests:
            core.add(r)
        expected = {r.request_id: solo_tokens(r.prompt_token_ids, 12) for r in requests}
        tokens: dict[str, list[int]] = {}
        while core.stats().num_preemptions == 0:
            collect(tokens, core.step())
        assert [r.request_id for r in requests if r.num_preemptions] == [victim]
        for name, more in run(core).items():
            tokens[name] += more
        assert tokens == expected


def test_preemption_in_prefill_and_twice_resumes_exactly() -> None:
    """F001 on exact ids: the fake slot would show state that survived or was lost."""
    core, runner = make_core(num_blocks=22, chunk_size=2)
    a, b = request("a", 8, max_tokens=60), request("b", 64, max_tokens=20)
    core.add(a)
    core.add(b)
    tokens = run(core)
    assert tokens["a"] == solo_tokens(a.prompt_token_ids, 60)
    assert tokens["b"] == solo_tokens(b.prompt_token_ids, 20)
    restarts = [row[1] for row, after in _pairs(runner, "b") if after == 0]
    assert restarts
    assert restarts[0] < 64, "b was to be preempted in the middle of its prefill"
    assert a.num_preemptions == 0


def _pairs(runner: FakeRunner, name: str) -> list[tuple[tuple[str, int, int], int]]:
    rows = [row for plan in runner.plans for row in plan if row[0] == name]
    return [(rows[i], rows[i + 1][1]) for i in range(len(rows) - 1)]


def test_preemption_happens_in_prefill_and_in_decode() -> None:
    core, _ = make_core(num_blocks=20, chunk_size=1)
    in_prefill = in_decode = 0
    requests = [request(f"r{i}", (3, 3, 40)[i % 3], max_tokens=36) for i in range(12)]
    for r in requests:
        core.add(r)
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        before = {r.request_id: (r.num_preemptions, r.num_computed_tokens) for r in requests}
        collect(tokens, core.step())
        for r in requests:
            count, computed = before[r.request_id]
            if r.num_preemptions > count:
                in_prefill += computed < len(r.prompt_token_ids)
                in_decode += computed >= len(r.prompt_token_ids)
    assert in_prefill > 0
    assert in_decode > 0
    for r in requests:
        assert tokens[r.request_id] == solo_tokens(r.prompt_token_ids, 36)


def test_queue_limit_counts_only_what_cannot_start() -> None:
    core, _ = make_core(max_num_seqs=2, max_num_queued_reqs=1)
    for name in "abc":
        core.add(request(name, 4))
    with pytest.raises(QueueFullError, match="limit max_num_queued_reqs is 1"):
        core.add(request("d", 4))
    core.step()
    with pytest.raises(QueueFullError):
        core.add(request("d", 4))
    run(core)
    core.add(request("d", 4))
    run(core)


def test_queue_limit_zero_still_serves() -> None:
    core, _ = make_core(max_num_seqs=1, max_num_queued_reqs=0)
    core.add(request("a", 4))
    with pytest.raises(QueueFullError):
        core.add(request("b", 4))
    assert len(run(core)["a"]) == 4


def test_tight_memories_end_every_request() -> None:
    """F088: tight in slots and wide in blocks, and the other way round."""
    for options in ({"num_slots": 2, "num_blocks": 4096}, {"num_slots": 8, "num_blocks": 30}):
        core, runner = make_core(max_model_len=112, **options)
        shared = [5] * 40
        expected = {}
        for i in range(200):
            prompt = shared + [i % 97] * (1 + i % 30)
            count = 1 + i % 37
            core.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=count, ignore_eos=True)))
            expected[f"r{i}"] = solo_tokens(prompt, min(count, 112 - len(prompt)))
        assert run(core) == expected
        stats = core.stats()
        assert (stats.blocks_used, stats.slots_used, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)
        assert runner.num_tokens_computed == sum(n for plan in runner.plans for _, _, n in plan)


def test_scheduling_and_bookkeeping_cost_at_256_running() -> None:
    """Under 1 ms a step beside the forward pass, as the bench measures it. The least of many steps is what a shared
    machine can promise, and a slow spell can outlast a few hundred of them, so it may take until the deadline.
    """
    deadline = time.monotonic() + 30
    best = step_times(256, steps=200)[0][0]
    while best >= LIMIT_MS and time.monotonic() < deadline:
        best = min(best, step_times(256, steps=200)[0][0])
    assert best < LIMIT_MS


def test_finish_reason_of_all_is_length_here() -> None:
    core, _ = make_core()
    done = request("a", 4, max_tokens=2)
    core.add(done)
    core.step()
    (update,) = core.step()
    assert update.finish_reason is FinishReason.LENGTH
    assert update.first_scheduled_time is not None
    assert done.first_token_time is not None
    assert done.arrival_time <= update.first_scheduled_time <= done.first_token_time
