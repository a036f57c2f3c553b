"""Switches and options: each is declared, typed, checked."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path

import pytest

from engine import env
from engine.cli import main
from engine.engine_config import EngineConfig, add_engine_arguments, parse_size
from engine.types import ParameterError
from kimi_kernels import _env as kernels_env
from kimi_kernels._sources import ALL_ARCHS

ROOT = Path(__file__).resolve().parents[2]


def test_every_switch_that_code_reads_is_declared_and_the_other_way_round() -> None:
    files = [ROOT / "setup.py", *(p for d in ("engine", "kimi_kernels", "csrc") for p in (ROOT / d).rglob("*"))]
    used: set[str] = set()
    declare = {"env.py", "_env.py"}
    for path in files:
        if path.suffix in {".py", ".cu", ".cuh", ".h", ".cpp"} and path.name not in declare and path.is_file():
            used |= set(re.findall(r"KIMI_(?:ENGINE|KERNELS)_[A-Z][A-Z_]*", path.read_text(encoding="utf-8")))
    assert used == set(env.SWITCHES)


def test_the_kernels_read_their_switches_with_the_declared_types_and_defaults() -> None:
    declared = {name: s.default for name, s in env.SWITCHES.items() if name.startswith("KIMI_KERNELS_")}
    assert declared == kernels_env.DEFAULTS
    assert all(type(default) is env.SWITCHES[name].type for name, default in kernels_env.DEFAULTS.items())
    assert env.SWITCHES["KIMI_KERNELS_ARCHS"].members == ALL_ARCHS


@pytest.mark.parametrize("name", sorted(n for n, default in kernels_env.DEFAULTS.items() if isinstance(default, bool)))
def test_flags_are_read_alike_by_engine_and_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "0", "1", " 1 "):
        monkeypatch.setenv(name, text)
        assert kernels_env.flag(name) is env.get(name)
    for text in ("yes", "2", "true"):
        monkeypatch.setenv(name, text)
        for read in (kernels_env.flag, env.get):
            with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got '{text}'"):
                read(name)


def test_archs_come_in_the_order_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_KERNELS_ARCHS", "sm_103f, sm_90a")
    assert kernels_env.items("KIMI_KERNELS_ARCHS", ALL_ARCHS) == ("sm_90a", "sm_103f")
    assert env.get("KIMI_KERNELS_ARCHS") == "sm_103f,sm_90a"
    for text in ("sm_90", "sm_90a,", ","):
        monkeypatch.setenv("KIMI_KERNELS_ARCHS", text)
        for read in (env.get, lambda name: kernels_env.items(name, ALL_ARCHS)):
            with pytest.raises(ValueError, match="comma list of sm_90a, sm_100f, sm_103f"):
                read("KIMI_KERNELS_ARCHS")
    monkeypatch.delenv("KIMI_KERNELS_ARCHS")
    assert kernels_env.items("KIMI_KERNELS_ARCHS", ALL_ARCHS) == ()


def test_values_are_typed_and_defaults_hold() -> None:
    assert env.get("KIMI_ENGINE_LOG_STATS_INTERVAL", {}) == 10.0
    assert env.get("KIMI_ENGINE_LOG_STATS_INTERVAL", {"KIMI_ENGINE_LOG_STATS_INTERVAL": "2.5"}) == 2.5
    assert env.get("KIMI_KERNELS_PDL", {"KIMI_KERNELS_PDL": "0"}) is False
    assert env.get("KIMI_ENGINE_LOGGING_LEVEL", {"KIMI_ENGINE_LOGGING_LEVEL": "debug"}) == "DEBUG"
    with pytest.raises(KeyError):
        env.get("KIMI_ENGINE_UNDECLARED")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KIMI_KERNELS_PDL", "yes", "must be 0 or 1, got 'yes'"),
        ("KIMI_KERNELS_ARCHS", "sm_90a,sm_80", "comma list of sm_90a, sm_100f, sm_103f, got 'sm_90a,sm_80'"),
        ("KIMI_ENGINE_LOG_STATS_INTERVAL", "soon", "must be a number, got 'soon'"),
        ("KIMI_ENGINE_LOG_STATS_INTERVAL", "-1", "at least 0"),
        ("KIMI_ENGINE_READY_TIMEOUT_S", "nan", "at least 1"),
        ("KIMI_ENGINE_LOGGING_LEVEL", "loud", "one of DEBUG, INFO"),
    ],
)
def test_a_bad_value_is_an_error(name: str, value: str, message: str) -> None:
    with pytest.raises(env.EnvError, match=message):
        env.check({name: value})


def test_an_unknown_name_warns_and_hints(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warnings = env.check({"KIMI_ENGINE_LOGING_LEVEL": "INFO", "OTHER": "x"})
    assert warnings == [
        "unknown environment variable KIMI_ENGINE_LOGING_LEVEL has no effect; did you mean KIMI_ENGINE_LOGGING_LEVEL?"
    ]
    assert warnings[0] in caplog.text


def test_a_bad_switch_stops_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIMI_ENGINE_LOGGING_LEVEL", "loud")
    assert main(["doctor"]) == 1
    assert "kimi-engine: error: KIMI_ENGINE_LOGGING_LEVEL must be one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 2.5}, "block_size"),
        ({"num_blocks": True}, "num_blocks"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"moe_weights": "int4"}, "moe_weights"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
    ],
)
def test_bad_options_name_the_field(options: dict, param: str) -> None:
    with pytest.raises(ParameterError, match=param) as error:
        EngineConfig(**options)
    assert error.value.param == param


def test_every_option_has_an_argument_with_the_same_default() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    args = parser.parse_args([])
    assert EngineConfig.from_args(args) == EngineConfig()
    assert set(vars(args)) == set(EngineConfig.__dataclass_fields__)
    args = parser.parse_args(["--max-model-len", "32k", "--max-num-seqs", "3", "--check-invariants"])
    assert EngineConfig.from_args(args) == EngineConfig(max_model_len=32_000, max_num_seqs=3, check_invariants=True)


@pytest.mark.parametrize(
    ("options", "seqs", "tokens", "warns"),
    [
        (["--max-num-batched-tokens", "100"], 100, 100, True),
        (["--max-num-seqs", "20000"], 20000, 20000, True),
        (["--max-num-batched-tokens", "4096"], 256, 4096, False),
        (["--max-num-seqs", "5"], 5, 16384, False),
        (["--max-num-seqs", "5", "--max-num-batched-tokens", "7"], 5, 7, False),
    ],
)
def test_the_limit_that_was_left_out_fits_the_one_given(options, seqs, tokens, warns, caplog) -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    config = EngineConfig.from_args(parser.parse_args(options))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)
    assert bool(caplog.records) == warns


def test_limits_that_contradict_each_other_are_refused() -> None:
    for options in ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, {"max_num_batched_tokens": 0}):
        with pytest.raises(ParameterError) as error:
            EngineConfig.from_options(options)
        assert error.value.param == "max_num_batched_tokens"


def test_sizes_are_read_as_vllm_does() -> None:
    assert [parse_size(t) for t in ("4096", "32k", "32K", "1m", "1M", "1.5k")] == [
        4096, 32_000, 32_768, 1_000_000, 1_048_576, 1500,
    ]  # fmt: skip
    for wrong in ("", "k", "1.5", "1g", "infk"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_size(wrong)
