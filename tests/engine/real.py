"""Engines on the real runner and tests/data/tiny-k3: the weights are loaded once, each engine gets pools of its own."""

from __future__ import annotations

import functools

import torch

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.runner import memory
from engine.runner.runner import Runner
from engine.types import FinishReason, Request, RequestUpdate, SamplingParams
from tests.engine.drive import TINY, logits, request

# Greedy tokens may differ where the two best logits are closer than this: sums in another order (batch mates, chunk
# borders) move fp32 logits of this model by up to 8e-5 (the spread of independent implementations on the golden data).
TOP2_GAP = 1e-3


@functools.cache
def _loaded() -> Runner:
    return Runner.from_dir(TINY, EngineConfig(max_num_seqs=2, max_model_len=64, device="cpu"), progress=False)


def real_runner(**options: object) -> Runner:
    defaults: dict = {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16, "device": "cpu",
        "check_invariants": True,
    }  # fmt: skip
    config = EngineConfig(**{**defaults, **options})
    base = _loaded()
    itemsize = base.dtype.itemsize
    budget = memory.memory_budget(base.model_config, config, base.device, itemsize)
    config = memory.resolve(base.model_config, config, budget, itemsize)
    state = memory.allocate(base.model_config, config, base.device, base.dtype)
    return Runner(
        base.model, config, state, dtype=base.dtype, device=base.device, eos_token_ids=base.eos_token_ids
    )  # fmt: skip


def real_core(**options: object) -> EngineCore:
    return EngineCore(real_runner(**options))


class Outcome:
    """What became of a request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.updates: list[RequestUpdate] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    @property
    def logprobs(self) -> list:
        return [entry for update in self.updates for entry in update.logprobs]


def take(outcomes: dict[str, Outcome], updates: list[RequestUpdate]) -> None:
    for update in updates:
        outcome = outcomes.setdefault(update.request_id, Outcome())
        assert outcome.finish_reason is None, f"{update.request_id} got news after its end"
        outcome.token_ids += update.token_ids
        outcome.updates.append(update)
        outcome.finish_reason, outcome.error = update.finish_reason, update.error


def drain(core: EngineCore, outcomes: dict[str, Outcome] | None = None) -> dict[str, Outcome]:
    outcomes = {} if outcomes is None else outcomes
    while core.has_work:
        take(outcomes, core.step())
    assert_idle(core)
    return outcomes


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
    assert not core.runner._sampler.states, "the sampler keeps something of the dead"  # type: ignore[attr-defined]
    core.check()


def solo(prompt: list[int], sampling: SamplingParams, name: str = "r-0", **options: object) -> Outcome:
    """The request alone in an engine of its own."""
    core = real_core(**options)
    core.add(Request(name, list(prompt), sampling))
    return drain(core)[name]


def assert_greedy(prompt: list[int], token_ids: list[int]) -> None:
    """Each token is the solo run's greedy choice, up to a first difference at a top-2 gap under TOP2_GAP.

    The solo run is one forward pass over prompt and output: its logits at every position say what it would choose.
    """
    runner = real_runner(max_num_seqs=1, max_num_batched_tokens=4096)
    r = request("solo", prompt + token_ids[:-1], 1, runner)
    with torch.inference_mode():
        rows = logits(runner, [(r, r.num_tokens)])["solo"][len(prompt) - 1 :]
    best = rows.topk(2)
    for position, token in enumerate(token_ids):
        if best.indices[position, 0] != token:
            gap = float(best.values[position, 0] - best.values[position, 1])
            assert gap < TOP2_GAP, f"output {position}: {token}, solo {int(best.indices[position, 0])}, gap {gap:.2e}"
            return
