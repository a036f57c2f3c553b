"""LLM on a fake runner with a byte tokenizer: prompts in every form, n, stop strings, streams, errors."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main
from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.llm import LLM
from engine.text.output import OutputText
from engine.text.tokenizer import Tokenizer
from engine.tools import doctor
from engine.tools.doctor import kernel_state
from engine.types import (
    FinishReason,
    ParameterError,
    QueueFullError,
    SampledToken,
    SamplingParams,
    StepOutput,
    StepPlan,
)
from kimi_kernels import _dispatch
from tests.engine.fake_runner import FakeRunner, solo_tokens
from tests.engine.test_text import BYTES

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny-k3"


class Script(FakeRunner):
    """Says ``text`` after any prompt, then its end token."""

    def __init__(self, config: EngineConfig, text: bytes) -> None:
        super().__init__(config)
        self.text = [*text, 258]
        self.vocab_size = 512
        self.eos_token_ids = frozenset({258})
        self.ran: list[str] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        output = super().execute(plan)
        for s in plan.scheduled:
            if s.samples:
                self.ran.append(s.request.request_id)
                output.tokens[s.request.request_id] = SampledToken(self.text[len(s.request.output_token_ids)])
        return output


def make(text: bytes = b"", tokenizer: Tokenizer | None = BYTES, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "max_model_len": 200, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 400,
        "num_slots": 4, "check_invariants": True,
    }  # fmt: skip
    config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
    return LLM.from_core(EngineCore(Script(config, text) if text else FakeRunner(config)), tokenizer)


def test_prompts_in_every_form() -> None:
    llm = make(b"hi there")
    for prompts, count in (
        ("ab", 1),
        (["ab", "c"], 2),
        ([97, 98], 1),
        ([[97, 98], [99]], 2),
        ([], 0),
        (["a", [98]], 2),
    ):
        results = llm.generate(prompts, SamplingParams(max_tokens=50), use_tqdm=False)
        assert [r.outputs[0].text for r in results] == ["hi there"] * count
        assert all(r.finished for r in results)
    result = llm.generate("ab", SamplingParams(max_tokens=50), use_tqdm=False)[0]
    assert (result.prompt, result.prompt_token_ids) == ("ab", [97, 98])
    assert result.outputs[0].token_ids[-1] == 258
    assert result.outputs[0].finish_reason == "stop"
    assert result.first_token_time is not None
    assert result.finished_time >= result.first_token_time >= result.arrival_time


@pytest.mark.parametrize("prompts", [{"a": 1}, 5, [1, "a"], [1.5], [None], [True]])
def test_prompts_of_other_types_are_refused(prompts: object) -> None:
    with pytest.raises(ParameterError):
        make(b"x").generate(prompts, use_tqdm=False)  # type: ignore[arg-type]


def test_results_keep_the_order_of_the_prompts() -> None:
    llm = make(tokenizer=None)
    prompts = [[i + 1] * (1 + 7 * i % 11) for i in range(20)]
    params = [SamplingParams(max_tokens=1 + i % 5, ignore_eos=True) for i in range(20)]
    results = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, result in zip(prompts, params, results, strict=True):
        assert result.outputs[0].token_ids == solo_tokens(prompt, one.max_tokens)
        assert (result.prompt, result.outputs[0].text) == (None, "")


def test_one_bad_prompt_runs_nothing() -> None:
    llm = make(tokenizer=None)
    with pytest.raises(ParameterError, match="got 999"):
        llm.generate([[1, 2], [999]], use_tqdm=False)
    assert not llm.core.has_work
    with pytest.raises(ParameterError, match=r"one a prompt \(2\), got 3"):
        llm.generate([[1], [2]], [SamplingParams()] * 3, use_tqdm=False)
    llm = make(tokenizer=None, max_num_queued_reqs=0)
    with pytest.raises(QueueFullError):
        llm.generate([[1]] * 5, use_tqdm=False)
    assert not llm.core.has_work


def test_n_gives_sequences_of_their_own() -> None:
    llm = make(tokenizer=None)
    seen: list[tuple[str, SamplingParams]] = []
    add = llm.core.add
    llm.core.add = lambda r: (seen.append((r.request_id, r.sampling)), add(r))[1]  # type: ignore[method-assign]
    (result,) = llm.generate([5, 6], SamplingParams(n=3, seed=9, max_tokens=4, prompt_logprobs=1), use_tqdm=False)
    assert [name for name, _ in seen] == [f"{result.request_id}-{i}" for i in range(3)]
    assert [(s.n, s.seed, s.prompt_logprobs) for _, s in seen] == [(1, 9, 1), (1, 10, None), (1, 11, None)]
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert result.prompt_logprobs is not None
    assert [e and e.token_id for e in result.prompt_logprobs] == [None, 6]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_cuts_the_text_and_ends_the_request(include: bool) -> None:
    llm = make(b"one two three four")
    sampling = SamplingParams(max_tokens=50, stop=("three", "zzz"), include_stop_str_in_output=include)
    (result,) = llm.generate("p", sampling, use_tqdm=False)
    output = result.outputs[0]
    assert output.text == ("one two three" if include else "one two ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "three")
    assert bytes(output.token_ids) == b"one two three"
    assert llm.core.stats().slots_used == 0


def test_stop_strings_count_after_min_tokens() -> None:
    (result,) = make(b"ab ab ab").generate(
        "p", SamplingParams(max_tokens=50, stop=("ab",), min_tokens=3), use_tqdm=False
    )
    assert result.outputs[0].text == "ab "
    assert len(result.outputs[0].token_ids) == 5


def test_streamed_chunks_add_up_and_hold_whole_code_points() -> None:
    llm = make("né🎉 stop".encode())
    chunks = list(llm.stream(["a", "b"], SamplingParams(max_tokens=50, stop=("sto!",))))
    for index in (0, 1):
        mine = [c for c in chunks if c.prompt_index == index]
        assert "".join(c.text for c in mine) == "né🎉 stop"
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "stop"
        assert "\ufffd" not in "".join(c.text for c in mine)
        assert sum(len(c.token_ids) for c in mine) == len("né🎉 stop".encode()) + 1


def test_closing_a_stream_aborts_it_and_streams_may_interleave() -> None:
    llm = make(b"0123456789")
    first, second = llm.stream("a", SamplingParams(max_tokens=30)), llm.stream("b", SamplingParams(max_tokens=30))
    assert [next(first).text for _ in range(3)] == ["0", "1", "2"]
    assert next(second).text == "0"
    first.close()
    assert "".join(c.text for c in second) == "123456789"
    assert not llm.core.has_work
    assert llm.core.stats().slots_used == 0


def test_stream_that_nobody_reads_aborts_too() -> None:
    llm = make(b"0123456789")
    llm.stream("a").close()
    assert not llm.core.has_work
    llm.stream(["a", "b"])  # dropped at once
    assert not llm.core.has_work


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    llm = make(b"ab")
    runner = llm.core.runner
    runner.text[1:1] = [600, 512]  # type: ignore[attr-defined]
    runner.vocab_size = 640  # type: ignore[misc]
    llm = LLM.from_core(llm.core, BYTES)
    (result,) = llm.generate("x", SamplingParams(max_tokens=9, stop=("ab",)), use_tqdm=False)
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("", [97, 600, 512, 98])
    assert result.outputs[0].stop_reason == "ab"


def test_the_seeds_of_n_sequences_go_round_at_the_end_of_their_range() -> None:
    llm = make(tokenizer=None)
    seeds = []
    add = llm.core.add
    llm.core.add = lambda request: (seeds.append(request.sampling.seed), add(request))[1]  # type: ignore[method-assign]
    llm.generate([1], SamplingParams(n=3, seed=2**63 - 2, temperature=1.0, max_tokens=2), use_tqdm=False)
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_error_of_a_request_is_told_in_its_output() -> None:
    llm = make(tokenizer=None)
    llm.core.runner.request_errors["1-0"] = "not finite"  # type: ignore[attr-defined]
    results = llm.generate([[1], [2], [3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert [r.outputs[0].finish_reason for r in results] == ["length", "error", "length"]
    assert results[1].outputs[0].error == "not finite"


def test_without_a_tokenizer_text_is_refused_by_name() -> None:
    llm = make(tokenizer=None)
    with pytest.raises(ParameterError, match="prompt needs a tokenizer") as error:
        llm.generate("text", use_tqdm=False)
    assert error.value.param == "prompt"
    with pytest.raises(ParameterError, match="stop needs a tokenizer"):
        llm.generate([1], SamplingParams(stop=("x",)), use_tqdm=False)


def test_tokenizer_that_is_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"512 ids, the model's vocabulary 97"):
        make(tokenizer=BYTES)


def test_unknown_option_is_named() -> None:
    with pytest.raises(ParameterError, match="unknown option 'max_seqs'"):
        LLM(TINY, max_seqs=3)


def test_text_does_not_depend_on_how_ids_come() -> None:
    ids = list("é stop🎉 end".encode())
    for sampling in (
        SamplingParams(stop=("top🎉",)),
        SamplingParams(stop=("nd!",)),
        SamplingParams(min_tokens=4, stop=("s",)),
    ):
        results = set()
        for size in (1, 2, 3, 5, 100):
            text, count, out, stop = OutputText(BYTES, sampling), 0, "", None
            for at in range(0, len(ids), size):
                last = at + size >= len(ids)
                piece = text.feed(ids[at : at + size], FinishReason.LENGTH if last else None)
                out, count, stop = out + piece.text, count + piece.num_tokens, piece.stop
                if stop is not None:
                    assert text.feed([1, 2]) == ("", 0, stop)
                    break
            results.add((out, count, stop))
        assert len(results) == 1, results


def test_bytes_that_never_become_a_code_point_end_as_replacement() -> None:
    text = OutputText(BYTES, SamplingParams())
    assert text.feed([0xF0, 0x9F]).text == ""
    assert text.feed([0x8E], FinishReason.LENGTH).text == "\ufffd"


# ---- command line ----


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments], capture_output=True, text=True, cwd=TINY.parents[2], timeout=120
    )


def test_unknown_option_and_command_exit_2() -> None:
    for arguments in (["doctor", "--nonsense"], ["nonsense"], [], ["generate", "x", "--max-model-l", "5"]):
        done = cli(*arguments)
        assert done.returncode == 2, arguments
        assert "usage: kimi-engine" in done.stderr


def test_version_and_doctor_need_no_gpu() -> None:
    assert cli("--version").stdout.startswith("kimi-engine ")
    done = cli("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("torch", "nvcc", "architectures", "kda.decode_", "missing"):
        assert word in done.stdout


@pytest.mark.parametrize(("absent", "status"), [("fastapi", 0), ("numpy", 1)])
def test_doctor_fails_only_for_what_everything_needs(
    absent: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == absent else "1.0")
    assert doctor.run(argparse.Namespace(environment=False)) == status
    assert "missing:" in capsys.readouterr().out


def test_doctor_knows_the_compiled_function_of_each_operation() -> None:
    """Each operation either calls the function that doctor looks for, or says itself that it has no kernel."""
    source = "".join(p.read_text() for p in (TINY.parents[2] / "kimi_kernels").glob("*.py"))
    called = set(re.findall(r'_ops\.call\(\s*"(\w+)"', source))
    refused = set(re.findall(r'no_kernel\(\s*"([\w.]+)"', source))
    for operation in _dispatch.OPERATIONS:
        served = _dispatch.compiled_function(operation) in called or operation in _dispatch.LIBRARIES
        assert served or operation in refused, operation
    assert kernel_state("kda.decode_", {"kda_decode"}, False) == "kernel"
    assert kernel_state("kda.decode_", {"norm_rms"}, False) == "no kernel in this build"
    assert kernel_state("kda.decode_", set(), False) == "not built"
    assert "cuBLAS" in kernel_state("dense.linear", set(), False)
    assert kernel_state("kda.decode_", {"kda_decode"}, True).startswith("reference")


def test_generate_prints_ids_and_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    options = ["--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "2"]
    done = cli("generate", str(TINY), "--tokens", str(tmp_path / "ids.json"), "--max-tokens", "4", "--json", *options)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (4, "length")
    done = cli("generate", str(TINY), "--prompt", "text", *options)
    assert done.returncode == 2
    assert "kimi-engine: error: prompt needs a tokenizer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stream", [[], ["--stream"], ["--json"]])
def test_a_failed_request_of_generate_is_one_line_and_exit_1(
    stream: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "ids.json").write_text("[1, 2]")
    llm = make(tokenizer=None)
    llm.core.runner.request_errors["0-0"] = "the logits are not finite\nand more"
    monkeypatch.setattr("engine.llm.LLM", lambda *_, **__: llm)
    assert main(["generate", "model", "--tokens", str(tmp_path / "ids.json"), *stream]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "kimi-engine: error: request 0 failed: the logits are not finite"
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "ids.json", "--temperature", "5"], "temperature must be in [0, 2], got 5.0"),
        (["--tokens", "ids.json", "--chunk-size", "0"], "chunk_size must be an integer of at least 1, got 0"),
        (["--tokens", "absent.json"], "cannot read absent.json"),
        (["--tokens", "broken.json"], "broken.json is not JSON"),
        (["--tokens", "none.json"], "none.json must hold a JSON list of token ids"),
        ([], "one of --prompt, --tokens and --smoke is required"),
    ],
)
def test_wrong_options_of_generate_are_told_before_the_model_is_read(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("ids.json", "[1, 2]"), ("broken.json", "[1, 2"), ("none.json", "[]")):
        Path(name).write_text(text)
    assert main(["generate", "no-such-model", *arguments]) == 2
    assert f"kimi-engine: error: {message}" in capsys.readouterr().err
