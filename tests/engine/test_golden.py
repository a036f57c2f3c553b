"""The tiny golden checkpoint: logits and greedy tokens that another implementation computed (its README.md)."""

from __future__ import annotations

import pytest
import torch

from engine.runner.runner import Runner
from tests.engine.drive import PROMPTS, execute, expected, greedy, logits, plan, prompt_logits, request, tiny_runner

# The expected numbers carry fp32 rounding of their own (8e-5 against fp64); a mistake shows from 6e-1 on.
LOGIT_TOLERANCE = 5e-4
# Two chunkings differ by fp32 rounding alone, whose size is the same 8e-5.
CHUNKS = (1, 2, 3, 16, 33)


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return expected()


@pytest.fixture(scope="module")
def runner() -> Runner:
    return tiny_runner()


def ids(golden: dict[str, torch.Tensor], n: int) -> list[int]:
    return golden[f"prompt_{n}.ids"].tolist()


def assert_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < LOGIT_TOLERANCE  # False for NaN too


@pytest.mark.parametrize("n", PROMPTS)
def test_logits_and_greedy_continuation(runner: Runner, golden: dict[str, torch.Tensor], n: int) -> None:
    r = request("a", ids(golden, n), 1, runner)
    assert_logits(prompt_logits(runner, r, n), golden[f"prompt_{n}.logits"])
    r = request("b", ids(golden, n), 2, runner)
    assert greedy(runner, r, 16) == golden[f"prompt_{n}.greedy"].tolist()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("n", PROMPTS)
def test_chunked_prompt_gives_the_same(runner: Runner, golden: dict[str, torch.Tensor], n: int, chunk: int) -> None:
    r = request("a", ids(golden, n), 1, runner)
    assert_logits(prompt_logits(runner, r, chunk), golden[f"prompt_{n}.logits"])
    # the last token again, on the same state, would be the first generated one: check that the state is the right one
    best = int(golden[f"prompt_{n}.greedy"][0])
    r.output_token_ids.append(best)
    assert greedy(runner, r, 16) == golden[f"prompt_{n}.greedy"].tolist()


@pytest.mark.parametrize("cuts", [(1, 39), (2, 38), (3, 37), (39, 1), (38, 2), (18, 1, 21), (18, 2, 20), (18, 3, 19)])
def test_short_first_middle_and_last_chunks(
    runner: Runner, golden: dict[str, torch.Tensor], cuts: tuple[int, ...]
) -> None:
    r = request("a", ids(golden, 64)[:40], 1, runner)
    parts = [logits(runner, [(r, count)])["a"] for count in cuts]
    assert_logits(torch.cat(parts), golden["prompt_64.logits"][:40])


def test_all_prompts_side_by_side(runner: Runner, golden: dict[str, torch.Tensor]) -> None:
    """Four prompts in unequal chunks, the short ones decoding while the long ones are read, one forward per step."""
    requests = {n: request(str(n), ids(golden, n), slot, runner) for slot, n in enumerate(PROMPTS, start=1)}
    got: dict[int, list[torch.Tensor]] = {n: [] for n in PROMPTS}
    before, steps, mixed = runner.num_forwards, 0, 0
    while any(len(r.output_token_ids) < 16 for r in requests.values()):
        work = []
        for n, r in requests.items():
            if len(r.output_token_ids) < 16:
                work.append((r, min(5 + n % 7, r.num_tokens - r.num_computed_tokens)))
        step = plan(work)
        mixed += 0 < step.num_decodes < len(step.scheduled)
        hidden = runner.forward(step)
        steps += 1
        rows = runner.logits(hidden).split([s.num_new_tokens for s in step.scheduled])
        for s, part in zip(step.scheduled, rows, strict=True):
            n = int(s.request.request_id)
            got[n].append(part)
            if s.samples:
                s.request.output_token_ids.append(int(part[-1].argmax()))
    assert mixed > 5
    assert runner.num_forwards - before == steps
    for n, r in requests.items():
        assert r.output_token_ids == golden[f"prompt_{n}.greedy"].tolist()
        assert_logits(torch.cat(got[n])[:n], golden[f"prompt_{n}.logits"])


def test_former_content_of_slots_and_blocks_changes_nothing(golden: dict[str, torch.Tensor]) -> None:
    runner = tiny_runner()
    for tensor in (runner.state.kda_state, runner.state.conv_state, runner.state.mla_cache):
        tensor.fill_(float("nan"))
    pair = [request("a", ids(golden, 200), 1, runner), request("b", ids(golden, 7), 2, runner)]
    execute(runner, [(pair[0], 33), (pair[1], 7)])
    execute(runner, [(pair[0], 1), (pair[1], 1)])
    execute(runner, [(pair[0], 166), (pair[1], 1)])
    for r, n in zip(pair, (200, 7), strict=True):
        assert greedy(runner, r, 16) == golden[f"prompt_{n}.greedy"].tolist()
    # what nobody owns was not written either: padding and the idle slots are bit-identical
    assert runner.state.kda_state[0].isnan().all()
    assert runner.state.kda_state[3:].isnan().all()
    assert runner.state.mla_cache[:, 0].isnan().all()


def test_a_forward_is_deterministic(runner: Runner, golden: dict[str, torch.Tensor]) -> None:
    runs = [prompt_logits(runner, request("a", ids(golden, 64), 1, runner), 64) for _ in range(2)]
    assert torch.equal(runs[0], runs[1])


def test_ids_at_the_edges_of_the_vocabulary(runner: Runner) -> None:
    r = request("a", [0, runner.vocab_size - 1, 0, runner.vocab_size - 1], 1, runner)
    assert prompt_logits(runner, r, 4).isfinite().all()


def test_bfloat16_activations_stay_close(golden: dict[str, torch.Tensor]) -> None:
    """Bounds of data/tiny-k3/README.md for bf16: median relative error under 0.05, every position under 0.12."""
    runner = tiny_runner(dtype="bfloat16")
    for n in PROMPTS:
        want = golden[f"prompt_{n}.logits"]
        got = prompt_logits(runner, request("a", ids(golden, n), 1, runner), 64)
        error = (got - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.median() < 0.05
        assert error.max() < 0.12


def test_fp8_activations_in_the_experts_stay_close(golden: dict[str, torch.Tensor]) -> None:
    """The README's bounds for FP8: median 0.06, 90th percentile 0.09, every position 0.35; here over all positions."""
    runner = tiny_runner(dtype="bfloat16", moe_activation="fp8")
    errors = []
    for n in PROMPTS:
        want = golden[f"prompt_{n}.logits"]
        got = prompt_logits(runner, request("a", ids(golden, n), 1, runner), 64)
        errors.append((got - want).norm(dim=-1) / want.norm(dim=-1))
    error = torch.cat(errors)
    assert error.median() < 0.06
    assert error.quantile(0.9) < 0.09
    assert error.max() < 0.35
