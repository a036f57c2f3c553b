"""The tools logits, plan and make-tiny."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from engine.config import ModelConfig
from engine.engine_config import EngineConfig
from engine.runner.runner import Runner
from engine.tools import logits, make_tiny, plan
from engine.types import ParameterError
from tests.engine.drive import PROMPTS, TINY, expected, prompt_logits, request
from tests.engine.published import published_config


def call(tool: ModuleType, *args: object) -> int:
    parser = argparse.ArgumentParser()
    tool.add_arguments(parser)
    return tool.run(parser.parse_args([str(a) for a in args]))


@pytest.mark.parametrize("n", PROMPTS)
@pytest.mark.parametrize("chunk", [[], ["--chunk-size", 33]])
def test_logits_of_the_golden(tmp_path: Path, n: int, chunk: list) -> None:
    want = expected()
    tokens, out = tmp_path / "tokens.json", tmp_path / "out"
    tokens.write_text(json.dumps(want[f"prompt_{n}.ids"].tolist()))
    assert call(logits, TINY, "--tokens", tokens, "--out", out, "--device", "cpu", *chunk) == 0
    with np.load(out) as file:
        assert file.files == ["logits"]
        got = file["logits"]
    assert got.dtype == np.float32
    assert got.shape == (n, 256)
    assert np.abs(got - want[f"prompt_{n}.logits"].numpy()).max() < 5e-4  # the golden's own bound


@pytest.mark.parametrize("text", ["[]", "[256]", "[-1]", "[1.5]", "[true]", "[1099511627776]", "{}", "[", "null"])
def test_logits_refuses_bad_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(text)
    assert call(logits, TINY, "--tokens", tokens, "--out", tmp_path / "o", "--device", "cpu") == 2
    assert "tokens.json" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_logits_refuses_a_bad_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text("[1]")
    assert call(logits, tmp_path, "--tokens", tmp_path / "t.json", "--out", tmp_path / "o") == 2
    assert "config.json" in capsys.readouterr().err


def test_plan_agrees_with_the_published_sizes() -> None:
    """Bytes of the architecture page, section 10."""
    p = plan.make_plan(ModelConfig.from_dict(published_config()), gpu="b300", tp=1, context=1 << 20)
    layer = {part.name: part.total // part.layers for part in p.parts}
    assert layer == {
        "KDA attention": 887_800_832,
        "MLA attention": 464_392_192,
        "norms and AttnRes vectors": 86_016,
        "dense MLP": 1_453_326_336,
        "MoE without routed experts": 379_857_408,
        "routed experts": 15_722_348_544,
        "embedding, head and final vectors": 4_697_663_488,
    }
    assert {part.name: part.layers for part in p.parts}["KDA attention"] == 69
    assert p.weights == sum(part.total for part in p.parts) == 1_559_965_606_912
    assert p.state == 434_110_464 + 15_261_696
    assert p.cache_per_token == 27_648
    assert p.per_sequence - p.state == 27 << 30


@pytest.mark.parametrize(("gpu", "tp", "fits"), [("b300", 8, True), ("h200", 8, False), ("h200", 16, True)])
def test_plan_says_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, tp: int, fits: bool
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published_config()))
    assert call(plan, file, "--gpu", gpu, "--tp", tp, "--context", "32K") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("fits: " if fits else "does not fit: ")
    p = plan.make_plan(ModelConfig.from_dict(published_config()), gpu=gpu, tp=tp, context=32768)
    assert (p.num_sequences > 0) == fits
    # a rank holds at least its share of everything, and no more than that plus what is not split
    assert 1_559_965_606_912 / tp <= p.weights < 1_559_965_606_912 / tp + 12e9


@pytest.mark.parametrize(
    "options",
    [{"utilization": 7.0}, {"utilization": 0.0}, {"utilization": float("nan")}, {"batched_tokens": -5}, {"context": 0}],
)
def test_plan_refuses_numbers_that_no_engine_takes(options: dict) -> None:
    with pytest.raises(ParameterError, match=str(next(iter(options.values())))):
        plan.make_plan(
            ModelConfig.from_dict(published_config()), **{"gpu": "b300", "tp": 8, "context": 1024, **options}
        )


def test_plan_refuses_a_split_that_does_not_come_out_even() -> None:
    config = ModelConfig.from_dict(published_config())
    for tp in (0, 5, 9):
        with pytest.raises(ParameterError, match="--tp"):
            plan.make_plan(config, gpu="h200", tp=tp, context=1024)
    with pytest.raises(ParameterError, match="--context"):
        plan.make_plan(config, gpu="h200", tp=8, context=2 << 20)


def test_make_tiny_writes_a_model_that_runs(tmp_path: Path) -> None:
    assert call(make_tiny, tmp_path / "a") == 0
    assert call(make_tiny, tmp_path / "b", "--seed", 0) == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()  # the same seed, the same bytes
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2
    runner = Runner.from_dir(tmp_path / "a", EngineConfig(max_num_seqs=1, max_model_len=64, device="cpu"))
    assert runner.eos_token_ids == {257, 258}
    got = prompt_logits(runner, request("r", list(range(40)), 1, runner), 40)
    assert got.isfinite().all()
    assert 1 < got.std() < 3
    assert len(set(got.argmax(-1).tolist())) > 20  # positions differ: the model is not degenerate


def test_make_tiny_tokenizer_has_the_control_tokens(tmp_path: Path) -> None:
    make_tiny.make(tmp_path)
    lines = (tmp_path / "tiktoken.model").read_text().splitlines()
    assert lines[0] == "AA== 0"
    assert [int(line.split()[1]) for line in lines] == list(range(256))
    table = json.loads((tmp_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {table[str(256 + i)]["content"] for i in (2, 3, 4, 5)} == {
        "<|end_of_msg|>",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
    }
    assert [table[str(256 + i)]["special"] for i in (2, 3, 4, 5)] == [True, False, False, False]


def test_make_tiny_sizes_can_be_changed(tmp_path: Path) -> None:
    size = make_tiny.make(tmp_path, num_hidden_layers=2, num_experts=8)
    config = ModelConfig.from_dir(tmp_path)
    assert (config.num_hidden_layers, config.mla_layers, config.num_experts) == (2, (1,), 8)
    assert size < 12e6
    runner = Runner.from_dir(tmp_path, EngineConfig(max_num_seqs=1, max_model_len=64, device="cpu"))
    assert runner.model_config == config
