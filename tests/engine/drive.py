"""Steps a runner by hand: plans without a scheduler, so that model tests choose chunks and batch mates themselves."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.engine_config import EngineConfig
from engine.runner.runner import Runner
from engine.types import Request, SamplingParams, ScheduledRequest, StepOutput, StepPlan

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny-k3"
GREEDY = SamplingParams(temperature=0, max_tokens=None)
PROMPTS = (1, 7, 64, 200)


def tiny_runner(**options: object) -> Runner:
    defaults: dict = {"max_num_seqs": 8, "max_model_len": 320, "block_size": 16, "device": "cpu"}
    return Runner.from_dir(TINY, EngineConfig(**{**defaults, **options}), progress=False)


def expected() -> dict[str, torch.Tensor]:
    return load_file(TINY / "expected.safetensors")


def request(name: str, ids: list[int], slot: int, runner: Runner, sampling: SamplingParams = GREEDY) -> Request:
    """A request that owns ``slot`` and enough scattered blocks for max_model_len, apart from every other slot's."""
    r = Request(name, list(ids), sampling, eos_token_ids=runner.eos_token_ids)
    config = runner.engine_config
    each = -(-config.max_model_len // config.block_size)
    assert slot * each <= config.num_blocks
    r.slot, r.block_table = slot, list(range(slot * each, (slot - 1) * each, -1))  # descending: order is not assumed
    return r


def plan(work: list[tuple[Request, int]]) -> StepPlan:
    """The next ``count`` tokens of each request, decodes first; advances num_computed_tokens."""
    scheduled = []
    for r, count in work:
        scheduled.append(
            ScheduledRequest(r, r.num_computed_tokens, count, r.num_computed_tokens + count == r.num_tokens)
        )
        r.num_computed_tokens += count
    scheduled.sort(key=lambda s: not s.is_decode)
    return StepPlan(scheduled, sum(s.is_decode for s in scheduled), sum(s.num_new_tokens for s in scheduled))


def execute(runner: Runner, work: list[tuple[Request, int]]) -> StepOutput:
    """Run a step and append what was sampled."""
    output = runner.execute(plan(work))
    for r, _ in work:
        if r.request_id in output.tokens:
            r.output_token_ids.append(output.tokens[r.request_id].token_id)
    return output


def logits(runner: Runner, work: list[tuple[Request, int]]) -> dict[str, torch.Tensor]:
    """Run a step without sampling -> logits [count, vocab] by request id."""
    step = plan(work)
    rows = runner.logits(runner.forward(step)).split([s.num_new_tokens for s in step.scheduled])
    return {s.request.request_id: part for s, part in zip(step.scheduled, rows, strict=True)}


def prompt_logits(runner: Runner, r: Request, chunk: int) -> torch.Tensor:
    """All of the prompt in chunks -> [tokens, vocab]."""
    parts = []
    while r.num_computed_tokens < len(r.prompt_token_ids):
        parts.append(logits(runner, [(r, min(chunk, len(r.prompt_token_ids) - r.num_computed_tokens))])[r.request_id])
    return torch.cat(parts)


def greedy(runner: Runner, r: Request, count: int) -> list[int]:
    while len(r.output_token_ids) < count:
        output = execute(runner, [(r, r.num_tokens - r.num_computed_tokens)])
        assert not output.errors
    return r.output_token_ids
