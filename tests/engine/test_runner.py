"""The runner's promises beside the numbers: one forward a step, isolation of faults, refusal of impossible plans."""

from __future__ import annotations

import json

import pytest
import torch

from engine.config import ConfigError, ModelConfig
from engine.engine_config import EngineConfig
from engine.runner import operations
from engine.runner.runner import Runner, choose_device
from engine.types import ParameterError, SamplingParams, StepPlan
from kimi_kernels import KernelUnavailableError
from kimi_kernels._dispatch import OPERATIONS
from tests.engine.drive import GREEDY, TINY, execute, expected, greedy, plan, request, tiny_runner


@pytest.fixture
def runner() -> Runner:
    return tiny_runner()


def ids(n: int) -> list[int]:
    return expected()[f"prompt_{n}.ids"].tolist()


def test_one_model_forward_per_step_whatever_the_number_of_requests(runner: Runner) -> None:
    calls: list[int] = []
    runner.model.register_forward_hook(lambda module, args, output: calls.append(args[0].shape[0]))
    requests = [request(str(i), ids(64)[: 3 + i], i, runner) for i in range(1, 9)]
    execute(runner, [(r, len(r.prompt_token_ids)) for r in requests])
    for _ in range(3):
        execute(runner, [(r, 1) for r in requests])
    assert calls == [sum(range(4, 12)), 8, 8, 8]
    assert runner.num_forwards == 4
    assert runner.num_tokens_computed == sum(calls)
    assert runner.num_absorbed_tokens == [0] + [len(r.prompt_token_ids) + 3 for r in requests]


@pytest.mark.parametrize("where", ["kda_state", "conv_state", "mla_cache"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_request_fails_alone(where: str, value: float) -> None:
    """NaN in what one request owns ends that request; the other goes on as if nothing had been there."""

    def run(poison: bool) -> tuple[list, Runner]:
        runner = tiny_runner()
        pair = [request("a", ids(64), 1, runner), request("b", ids(7), 2, runner)]
        execute(runner, [(pair[0], 64), (pair[1], 7)])
        if poison:
            if where == "mla_cache":
                runner.state.mla_cache[:, pair[1].block_table[0]] = value
            else:
                getattr(runner.state, where)[2] = value
        outputs = [execute(runner, [(r, 1) for r in pair])]
        outputs += [execute(runner, [(pair[0], 1)]) for _ in range(3)]
        return outputs, runner

    clean, first = run(False)
    dirty, second = run(True)
    assert [o.tokens["a"].token_id for o in dirty] == [o.tokens["a"].token_id for o in clean]
    before_experts = torch.equal(first.state.kda_state[1, :2], second.state.kda_state[1, :2])
    assert before_experts
    # Behind the first experts fp32 rounding may differ: they multiplied fewer rows, since a NaN token chooses none.
    torch.testing.assert_close(first.state.kda_state[1, 2], second.state.kda_state[1, 2], atol=1e-5, rtol=1e-4)
    assert not clean[0].errors
    assert "b" not in dirty[0].tokens
    assert "finite" in dirty[0].errors["b"]
    # the slot and its blocks serve the next tenant
    r = request("c", ids(7), 2, second)
    assert greedy(second, r, 16) == expected()["prompt_7.greedy"].tolist()


def test_a_poisoned_prompt_chunk_that_samples_nothing_is_reported(runner: Runner) -> None:
    r = request("a", ids(64), 1, runner)
    execute(runner, [(r, 10)])
    runner.state.kda_state[1] = float("nan")
    assert execute(runner, [(r, 10)]).errors.keys() == {"a"}


def test_logits_that_are_not_finite_are_an_error_not_a_token(runner: Runner) -> None:
    runner.model.lm_head.weight[5] = float("nan")
    pair = [request("a", ids(7), 1, runner), request("b", ids(7), 2, runner, SamplingParams())]
    output = execute(runner, [(r, 7) for r in pair])
    assert output.errors.keys() == {"a", "b"}
    assert not output.tokens


def test_plans_that_contradict_the_state_are_refused(runner: Runner) -> None:
    r = request("a", ids(64), 1, runner)
    execute(runner, [(r, 10)])
    r.num_computed_tokens = 12
    with pytest.raises(ValueError, match="slot 1 holds 10 tokens"):
        runner.execute(plan([(r, 1)]))
    r.num_computed_tokens = 10
    r.block_table = r.block_table[:1]
    with pytest.raises(ValueError, match="too few blocks"):
        runner.execute(plan([(r, 10)]))
    with pytest.raises(ValueError, match="says 3 tokens"):
        runner.execute(StepPlan([], 0, 3))


def test_decodes_must_come_first(runner: Runner) -> None:
    pair = [request("a", ids(64), 1, runner), request("b", ids(7), 2, runner)]
    execute(runner, [(pair[0], 10)])
    step = plan([(pair[0], 1), (pair[1], 7)])
    step.scheduled.reverse()
    with pytest.raises(ValueError, match="must start with its 1 decodes"):
        runner.forward(step)


def test_sizes_follow_from_the_options() -> None:
    config = tiny_runner(max_num_seqs=3, max_model_len=100, block_size=16).engine_config
    assert (config.num_slots, config.num_blocks, config.max_model_len) == (3, 3 * 7, 100)
    config = tiny_runner(num_blocks=5, num_slots=2, max_model_len=None).engine_config
    assert (config.num_slots, config.num_blocks, config.max_model_len) == (2, 5, 80)
    state = tiny_runner(num_blocks=5, num_slots=2, max_model_len=None).state
    assert state.kda_state.shape == (3, 3, 2, 128, 128)
    assert state.conv_state.shape == (3, 3, 3, 768)
    assert state.mla_cache.shape == (1, 6, 16, 576)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_model_len": 200, "num_blocks": 5}, "max_model_len"),
        ({"max_model_len": 2**20 + 1}, "max_model_len"),
        ({"moe_weights": "fp8"}, "moe_weights"),
        ({"moe_activation": "fp8"}, "moe_activation"),  # the CPU's float32 activations are never quantised
        ({"moe_activation": "int8"}, "moe_activation"),
    ],
)
def test_options_that_cannot_be_met_are_named(options: dict, param: str) -> None:
    with pytest.raises(ParameterError) as error:
        tiny_runner(**options)
    assert error.value.param == param


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_cuda_is_not_replaced_by_the_cpu_silently() -> None:
    with pytest.raises(ParameterError, match="no CUDA device"):
        choose_device("cuda")
    with pytest.raises(ParameterError, match="no CUDA device"):
        Runner.from_dir(TINY, EngineConfig(device="cuda"))


def test_end_tokens_come_from_both_configs(tmp_path) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [254, 253]}')
    assert Runner.from_dir(tmp_path, EngineConfig(device="cpu"), progress=False).eos_token_ids == {253, 254}
    assert tiny_runner().eos_token_ids == {254}


@pytest.mark.parametrize(
    "table",
    [[], {"254": "x"}, {"a": {"content": "[EOS]"}}, {"999": {"content": "[EOS]"}}, {"-1": {"content": "[EOS]"}}],
)
def test_a_tokenizer_config_with_nonsense_is_a_clear_error(tmp_path, table: object) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = {"eos_token": "[EOS]", "added_tokens_decoder": table}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"added_tokens_decoder|end token ids"):
        Runner.from_dir(tmp_path, EngineConfig(device="cpu"), progress=False)


def test_greedy_takes_the_lower_id_of_equals(runner: Runner) -> None:
    weight = runner.model.lm_head.weight
    best = expected()["prompt_7.greedy"][0].item()
    weight[3] = weight[best]
    weight[200] = weight[best]
    assert execute(runner, [(request("a", ids(7), 1, runner, GREEDY), 7)]).tokens["a"].token_id == 3


def test_auto_moe_activation_is_resolved_at_start() -> None:
    runner = tiny_runner()
    assert runner.engine_config.moe_activation == "bf16"
    runner = tiny_runner(dtype="bfloat16", moe_activation="fp8")
    assert {layer.mlp.experts.activation for layer in runner.model.layers if hasattr(layer.mlp, "experts")} == {"fp8"}


def test_missing_kernels_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dir(TINY)
    monkeypatch.setattr(
        operations, "kernel_operations", lambda: frozenset({"dense.linear", "norm.rms", "routing.topk"})
    )
    monkeypatch.setattr(operations, "reference_operations", lambda: frozenset({"mla.store_"}))
    assert operations.missing_operations(config) == [
        "attn_res.mix", "kda.decode_", "kda.prefill_", "mla.decode", "mla.prefill", "moe.experts",
    ]  # fmt: skip
    with pytest.raises(KernelUnavailableError, match=r"mla\.prefill, moe\.experts, which") as error:
        operations.require_operations(config)
    assert "KIMI_KERNELS_REFERENCE=attn_res.mix,kda.decode_" in str(error.value)
    assert "mla.store_" in str(error.value)  # what was asked for stays in the list that is offered


def test_the_reference_alone_needs_no_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "kernel_operations", lambda: pytest.fail("the compiled module was asked for"))
    monkeypatch.setattr(operations, "reference_operations", lambda: OPERATIONS)
    operations.require_operations(ModelConfig.from_dir(TINY))
