"""Checkpoint to model: the table, what is refused, and what the loaded bytes are."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.engine_config import EngineConfig
from engine.model.kimi_k3 import KimiK3
from engine.model.layers.linear import Linear
from engine.runner.runner import Runner
from engine.weights.loader import load_model
from engine.weights.mapping import PREFIX, SKIPPED_PREFIXES, checkpoint_tensors
from engine.weights.shards import DTYPES, CheckpointError, natural_key
from kimi_kernels import moe, quant
from tests.engine.drive import TINY, expected, prompt_logits, request, tiny_runner
from tests.engine.published import published_config

CPU = torch.device("cpu")
K3_WEIGHTS = Path(__file__).resolve().parent.parent / "data" / "k3-weights.json"
MOE1 = PREFIX + "model.layers.1.block_sparse_moe."


def test_the_table_covers_the_published_checkpoint_exactly() -> None:
    listing = json.loads(K3_WEIGHTS.read_text())
    want: dict[str, tuple[tuple[int, ...], str]] = {}
    for row in listing["rows"]:
        for layer in row.get("layers", [None]):
            for expert in range(row.get("experts") or 1):
                want[row["name"].format(layer=layer, expert=expert)] = (tuple(row["shape"]), row["dtype"])
    assert len(want) == listing["tensors"] == 497_220
    text = {name: value for name, value in want.items() if not name.startswith(SKIPPED_PREFIXES)}
    names = {dtype: name for name, dtype in DTYPES.items()}
    table = {s.name: (s.shape, names[s.dtype]) for s in checkpoint_tensors(ModelConfig.from_dict(published_config()))}
    assert table == text


@pytest.mark.parametrize("which", ["tiny", "published"])
def test_every_parameter_is_filled_exactly_once(which: str) -> None:
    """On the meta device: each parameter's rows are covered by the table's tensors without gap or overlap."""
    config = ModelConfig.from_dir(TINY) if which == "tiny" else ModelConfig.from_dict(published_config())
    with torch.device("meta"):
        model = KimiK3(config)
    spans: dict[str, list[tuple[int, int]]] = {}
    elements: dict[str, int] = {}
    parameters = dict(model.named_parameters())
    for spec in checkpoint_tensors(config):
        if spec.expert is not None:
            continue
        parameter = parameters[spec.target]
        assert parameter.dtype == spec.dtype
        rows = parameter.shape[0] if spec.shape[0] == 1 else spec.shape[0]
        spans.setdefault(spec.target, []).append((spec.row, spec.row + rows))
        elements[spec.target] = elements.get(spec.target, 0) + torch.Size(spec.shape).numel()
    assert spans.keys() == parameters.keys()
    for name, parameter in parameters.items():
        edges = sorted(spans[name])
        rows = parameter.shape[0]
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Linear):
            rows -= owner.num_pad_rows  # zeroed by the loader
        assert edges[0][0] == 0
        assert edges[-1][1] == rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
        assert elements[name] == parameter[:rows].numel()


def all_tensors() -> dict[str, torch.Tensor]:
    index = json.loads((TINY / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in set(index.values()):
        tensors |= load_file(TINY / file)
    return tensors


def test_loaded_bytes_equal_the_stored_ones() -> None:
    """Exact equality of every tensor, fp32 ones kept in fp32 and experts left packed."""
    stored = all_tensors()
    config = ModelConfig.from_dir(TINY)
    model = load_model(TINY, config, CPU, progress=False)
    parameters = dict(model.named_parameters())
    for spec in checkpoint_tensors(config):
        if spec.expert is None:
            got = parameters[spec.target][spec.row :].flatten()[: stored[spec.name].numel()]
        else:
            stack, field = spec.target.split(".experts.")[1].split(".")
            weights = getattr(model.layers[int(spec.target.split(".")[1])].mlp.experts, stack)
            got = getattr(weights, field)[spec.expert, spec.row : spec.row + spec.shape[0]].flatten()
        assert got.dtype == stored[spec.name].dtype
        assert torch.equal(got, stored[spec.name].flatten()), spec.name
    padded = model.layers[0].attn.in_proj
    assert padded.num_pad_rows == 62  # 4 * 256 + 128 + 2 rows, up to 1,216
    assert not padded.weight[-62:].any()
    experts = model.layers[1].mlp.experts
    parts = moe.unpack(experts.w13, experts.w2)
    for part, name in zip(parts, ("w1.weight_packed", "w1.weight_scale", "w3.weight_packed"), strict=False):
        assert torch.equal(part[5], stored[f"{MOE1}experts.5.{name}"])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for file in TINY.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Store the tensors anew, in one file without an index, after ``change``."""
    tensors = all_tensors()
    change(tensors)
    for file in checkpoint.glob("model*"):
        file.unlink()
    save_file(tensors, checkpoint / "model.safetensors")


def fail(checkpoint: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        load_model(checkpoint, ModelConfig.from_dir(checkpoint), CPU, progress=False)
    return error.value


def test_a_single_file_without_an_index(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: None)
    load_model(checkpoint, ModelConfig.from_dir(checkpoint), CPU, progress=False)


def test_all_faults_are_told_in_one_error(checkpoint: Path) -> None:
    q = PREFIX + "model.layers.0.self_attn.q_proj.weight"
    bias = MOE1 + "gate.e_score_correction_bias"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[PREFIX + "model.norm.weight"]
        del tensors[MOE1 + "experts.3.w2.weight_scale"]
        tensors["language_model.extra.weight"] = torch.zeros(2)
        tensors[q] = tensors[q][:-1].clone()
        tensors[bias] = tensors[bias].bfloat16()

    rewrite(checkpoint, change)
    error = fail(checkpoint)
    text = str(error)
    assert len(error.problems) == 5
    assert f"missing tensor {PREFIX}model.norm.weight [192] BF16" in text
    assert f"missing tensor {MOE1}experts.3.w2.weight_scale [128, 4] U8" in text
    assert "unexpected tensor language_model.extra.weight [2]" in text
    assert f"{q} must have shape [256, 192], got [255, 192]" in text
    assert f"{bias} must have dtype F32, got BF16" in text


def test_a_missing_shard_is_named_and_its_tensors_are_not_listed_too(checkpoint: Path) -> None:
    (checkpoint / "model-00002-of-000002.safetensors").unlink()
    assert fail(checkpoint).problems == ["model-00002-of-000002.safetensors: the shard file is missing"]


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_a_truncated_shard_is_named(checkpoint: Path, size: int) -> None:
    shard = checkpoint / "model-00001-of-000002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:size])
    (problem,) = fail(checkpoint).problems
    assert shard.name in problem
    assert "truncated" in problem


def test_a_shard_that_is_no_safetensors_file(checkpoint: Path) -> None:
    (checkpoint / "model-00001-of-000002.safetensors").write_bytes(
        b"\x10" + b"\0" * 7 + b"not json at all." + b"\0" * 100
    )
    assert "header cannot be read" in str(fail(checkpoint))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": []}, {"dtype": "F8_E8M0"}, {"shape": ["a"]}, {"shape": None}, {"shape": [-1, -2]},
        {"data_offsets": [-8, 4]}, {"data_offsets": [10, 2]}, {"data_offsets": ["a", "b"]}, {"data_offsets": []},
    ],
)  # fmt: skip
def test_a_header_with_nonsense_is_one_clear_error(checkpoint: Path, change: dict) -> None:
    shard = checkpoint / "model-00001-of-000002.safetensors"
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(n for n in header if n != "__metadata__")
    header[name].update(change)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    (problem,) = fail(checkpoint).problems
    assert name in problem or shard.name in problem


def test_an_index_without_a_weight_map(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (problem,) = fail(checkpoint).problems
    assert "no weight_map" in problem


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_model(tmp_path, ModelConfig.from_dir(TINY), CPU, progress=False)


def test_scale_byte_255_is_refused_by_name(checkpoint: Path) -> None:
    names = [MOE1 + "experts.3.w2.weight_scale", MOE1 + "experts.9.w1.weight_scale"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            tensors[name][-1, -1] = 255

    rewrite(checkpoint, change)
    error = fail(checkpoint)
    assert len(error.problems) == 2
    assert all(any(name in p for p in error.problems) for name in names)


def edit_config(checkpoint: Path, **changes: object) -> None:
    path = checkpoint / "config.json"
    data = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del data["text_config"][name]
        else:
            data["text_config"][name] = value
    path.write_text(json.dumps(data))


def test_config_against_weights(checkpoint: Path) -> None:
    edit_config(checkpoint, num_experts=17, intermediate_size=288)
    problems = fail(checkpoint).problems
    assert sum("experts.16." in p for p in problems) == 3 * 6  # three MoE layers
    assert sum("mlp.gate_proj.weight must have shape [288, 192], got [256, 192]" in p for p in problems) == 1


def test_packed_experts_without_a_quantization_config(checkpoint: Path) -> None:
    edit_config(checkpoint, quantization_config=None)
    assert fail(checkpoint).problems[0].startswith("the experts are stored packed, but config.json has no quantization")


def test_plain_bf16_experts_are_the_same_model(checkpoint: Path) -> None:
    """E2M1 times a power of two is exact in bf16, so the logits must not change by a bit."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(".weight_packed")]:
            packed, scale = tensors.pop(name), tensors.pop(name.replace("weight_packed", "weight_scale"))
            tensors[name.replace("weight_packed", "weight")] = quant.mxfp4_dequant(packed, scale).bfloat16()

    rewrite(checkpoint, change)
    assert any("announces MXFP4 experts" in p for p in fail(checkpoint).problems)
    edit_config(checkpoint, quantization_config=None)
    ids = expected()["prompt_64.ids"].tolist()
    plain = Runner.from_dir(checkpoint, EngineConfig(max_num_seqs=1, max_model_len=64, device="cpu"), progress=False)
    assert plain.model.layers[1].mlp.experts.w13.format == "bf16"
    packed = tiny_runner()
    got, want = (prompt_logits(r, request("a", ids, 1, r), 64) for r in (plain, packed))
    assert torch.equal(got, want)


def test_shards_are_read_in_natural_order() -> None:
    names = ["model-10.safetensors", "model-9.safetensors", "model-00001-of-96.safetensors"]
    assert sorted(names, key=natural_key) == [names[2], names[1], names[0]]


def test_progress_tells_shards_bytes_and_rate(capfd: pytest.CaptureFixture[str]) -> None:
    load_model(TINY, ModelConfig.from_dir(TINY), CPU, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "shard 2/2" in lines[0]
    assert "GB/s" in lines[0]
