"""The tiny golden checkpoint on CUDA: compiled kernels, and the reference for operations that have none yet.

Bounds of data/tiny-k3/README.md. bf16 activations: median relative L2 error a position under 0.05, every position under
0.12; FP8 activations in the experts add flips of single codes: median 0.06, 90th percentile 0.09, every position 0.35.
Tokens are teacher-forced: a near tie of two logits may go either way in bf16, and what follows would then differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.config import ModelConfig
from engine.runner.operations import missing_operations, needed_operations
from engine.runner.runner import Runner
from kimi_kernels import kernel_operations, reference_operations
from kimi_kernels._dispatch import ENV_NAME, LIBRARIES
from tests.engine.drive import PROMPTS, TINY, expected, logits, plan, prompt_logits, request, tiny_runner

pytestmark = pytest.mark.gpu
CLEAR_MARGIN = 0.5  # the README's: below it a greedy token may differ in bf16
# What a kernel's name must hold, for each operation that a decode step runs in a kernel of ours.
DECODE_KERNELS = {
    "attn_res.mix": "attn_res",
    "routing.topk": "routing",
    "kda.decode_": "kda",
    "norm.rms": "norm",
    "moe.experts": "moe",
}


@pytest.fixture(scope="module", autouse=True)
def missing() -> Iterator[list[str]]:
    """Send the operations without a kernel, and only those, to the reference while this module runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENV_NAME, raising=False)
        reference_operations.cache_clear()
        names = missing_operations(ModelConfig.from_dir(TINY))
        patch.setenv(ENV_NAME, ",".join(names))
        reference_operations.cache_clear()
        yield names
    reference_operations.cache_clear()


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return expected()


@pytest.fixture(scope="module")
def runner(missing: list[str]) -> Runner:
    return tiny_runner(device="cuda", moe_activation="bf16")


def ids(golden: dict[str, torch.Tensor], n: int) -> list[int]:
    return golden[f"prompt_{n}.ids"].tolist()


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    assert got.is_cuda
    assert got.dtype == torch.float32
    got = got.cpu()
    assert got.shape == want.shape
    assert got.isfinite().all()
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def assert_bf16(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = errors(got, want)
    print(f"{name}: median {error.median():.4f}, max {error.max():.4f}")
    assert error.median() < 0.05
    assert error.max() < 0.12


@pytest.mark.parametrize("n", PROMPTS)
def test_logits(runner: Runner, golden: dict[str, torch.Tensor], n: int) -> None:
    r = request("a", ids(golden, n), 1, runner)
    assert_bf16(f"prompt {n}", prompt_logits(runner, r, n), golden[f"prompt_{n}.logits"])


@pytest.mark.parametrize("chunk", [1, 2, 16, 33])
def test_chunked_prompt(runner: Runner, golden: dict[str, torch.Tensor], chunk: int) -> None:
    """A chunk of one token is a decode step, so chunk 1 takes the whole prompt through the decode kernels."""
    r = request("a", ids(golden, 64), 1, runner)
    assert_bf16(f"chunks of {chunk}", prompt_logits(runner, r, chunk), golden["prompt_64.logits"])


def test_prompts_side_by_side(runner: Runner, golden: dict[str, torch.Tensor]) -> None:
    """Four prompts in unequal chunks; the short ones decode their expected tokens while the long ones are read."""
    requests = {n: request(str(n), ids(golden, n), slot, runner) for slot, n in enumerate(PROMPTS, start=1)}
    for n, r in requests.items():
        r.output_token_ids = golden[f"prompt_{n}.greedy"].tolist()[:-1]
    got: dict[int, list[torch.Tensor]] = {n: [] for n in PROMPTS}
    mixed = 0
    while work := [
        (r, 1 if r.num_computed_tokens >= n else min(5 + n % 7, n - r.num_computed_tokens))
        for n, r in requests.items()
        if r.num_computed_tokens < r.num_tokens
    ]:
        step = plan(work)
        mixed += 0 < step.num_decodes < len(step.scheduled)
        rows = runner.logits(runner.forward(step)).split([s.num_new_tokens for s in step.scheduled])
        for s, part in zip(step.scheduled, rows, strict=True):
            got[int(s.request.request_id)].append(part)
    assert mixed > 5
    for n in PROMPTS:
        whole = torch.cat(got[n])
        assert_bf16(f"prompt {n} in a batch", whole[:n], golden[f"prompt_{n}.logits"])
        assert_greedy(whole[n - 1 :], golden, n)


def assert_greedy(rows: torch.Tensor, golden: dict[str, torch.Tensor], n: int) -> None:
    """rows [16, vocab]: the expected token is the best one wherever the golden logits leave no doubt."""
    clear = golden[f"prompt_{n}.greedy_margin"] >= CLEAR_MARGIN
    assert clear.sum() >= 4
    assert torch.equal(rows.argmax(-1).cpu()[clear], golden[f"prompt_{n}.greedy"].long()[clear])


@pytest.mark.parametrize("n", PROMPTS)
def test_greedy_decode_through_the_kda_kernel(runner: Runner, golden: dict[str, torch.Tensor], n: int) -> None:
    assert "kda.decode_" in kernel_operations() - reference_operations()
    r = request("a", ids(golden, n), 1, runner)
    rows = [prompt_logits(runner, r, n)[-1:]]
    for token in golden[f"prompt_{n}.greedy"].tolist()[:-1]:
        r.output_token_ids.append(token)
        rows.append(logits(runner, [(r, 1)])["a"])
    assert_greedy(torch.cat(rows), golden, n)


def test_former_content_of_slots_and_blocks_changes_nothing(golden: dict[str, torch.Tensor]) -> None:
    runner = tiny_runner(device="cuda")
    for tensor in (runner.state.kda_state, runner.state.conv_state, runner.state.mla_cache):
        tensor.fill_(float("nan"))
    r = request("a", ids(golden, 64), 2, runner)
    assert_bf16("after NaN", prompt_logits(runner, r, 33), golden["prompt_64.logits"])
    for untouched in (runner.state.kda_state[:2], runner.state.kda_state[3:], runner.state.mla_cache[:, 0]):
        assert untouched.isnan().all()


def test_a_forward_is_deterministic(runner: Runner, golden: dict[str, torch.Tensor]) -> None:
    runs = [prompt_logits(runner, request("a", ids(golden, 64), 1, runner), 33) for _ in range(2)]
    assert torch.equal(runs[0], runs[1])


def test_fp8_activations_in_the_experts(golden: dict[str, torch.Tensor]) -> None:
    """All positions of all prompts together: the percentiles mean little over a handful."""
    runner = tiny_runner(device="cuda", moe_activation="fp8")
    parts = []
    for n in PROMPTS:
        r = request("a", ids(golden, n), 1, runner)
        parts.append(errors(prompt_logits(runner, r, n), golden[f"prompt_{n}.logits"]))
    error = torch.cat(parts)
    print(f"fp8: median {error.median():.4f}, p90 {error.quantile(0.9):.4f}, max {error.max():.4f}")
    assert error.median() < 0.06
    assert error.quantile(0.9) < 0.09
    assert error.max() < 0.35


def test_a_decode_step_runs_the_kernels_that_it_names(
    runner: Runner, golden: dict[str, torch.Tensor], missing: list[str]
) -> None:
    """What is not on the reference shows up in a profile under its family's namespace."""
    r = request("a", ids(golden, 7), 1, runner)
    prompt_logits(runner, r, 7)
    r.output_token_ids.append(int(golden["prompt_7.greedy"][0]))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        logits(runner, [(r, 1)])
        torch.cuda.synchronize()
    names = {event.name for event in trace.events() if "kimi::" in event.name}
    for operation, part in DECODE_KERNELS.items():
        assert any(f"kimi::{part}::" in name for name in names) == (operation not in missing), (operation, names)


def test_without_the_variable_the_error_names_what_is_missing(missing: list[str]) -> None:
    if not missing:
        pytest.skip("every operation has a kernel")
    environment = {k: v for k, v in os.environ.items() if k != ENV_NAME}
    code = "from tests.engine.drive import tiny_runner; tiny_runner(device='cuda')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kimi_kernels._dispatch.KernelUnavailableError")
    assert all(name in last for name in [*missing, ENV_NAME])


def test_the_list_is_what_the_model_needs(missing: list[str]) -> None:
    needed = needed_operations(ModelConfig.from_dir(TINY))
    assert set(missing) == needed - kernel_operations()
    assert "dense.linear" in LIBRARIES
    assert {"kda.decode_", "attn_res.mix", "routing.topk", "norm.rms"} <= kernel_operations()
