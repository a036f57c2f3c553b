"""From a checkpoint directory to a model that is ready to run.

Headers are compared with the table first, so that every fault of a checkpoint is told in one error before any weight
is read. Then the shards are streamed in natural order and each tensor is read into the place where it stays.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.model.kimi_k3 import KimiK3
from engine.model.layers.linear import Linear
from engine.model.layers.moe import MoE
from engine.weights.mapping import SKIPPED_PREFIXES, TensorSpec, checkpoint_tensors
from engine.weights.progress import Progress
from engine.weights.quant import ExpertBuffers
from engine.weights.shards import DTYPES, CheckpointError, Inventory, ShardReader, StoredTensor, read_inventory


def load_model(
    model_dir: Path, config: ModelConfig, device: torch.device, *, moe_activation: str = "bf16", progress: bool = True
) -> KimiK3:
    """Build the model of ``config`` and fill it. Raises CheckpointError listing all that is wrong."""
    problems: list[str] = []
    inventory = read_inventory(model_dir, problems)
    if problems and not inventory.tensors:
        raise CheckpointError(model_dir, problems)  # no file could be read: every tensor would be listed as missing
    work = match(config, inventory, problems)
    if problems:
        raise CheckpointError(model_dir, problems)
    order = {shard: at for at, shard in enumerate(inventory.shards)}
    work.sort(key=lambda item: (order[item[1].file], item[1].offset))

    with torch.device("meta"):
        model = KimiK3(config, moe_activation)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Linear):
            module.zero_padding()
    places: dict[str, torch.Tensor] = dict(model.named_parameters())
    experts: dict[int, ExpertBuffers] = {}
    reader = ShardReader()
    bar = Progress(sum(s.nbytes for _, s in work), len(inventory.shards), enabled=progress)
    try:
        for spec, stored in work:
            if spec.expert is None:
                reader.read_into(stored, _rows(places[spec.target], spec))
            else:
                layer = int(spec.target.split(".")[1])
                if layer not in experts:
                    experts[layer] = ExpertBuffers(config, device)
                reader.read_into(stored, experts[layer].place(spec))
                experts[layer].left -= 1
                if experts[layer].left == 0:
                    problems += _finish_layer(model, layer, experts.pop(layer), work)
            bar.add(stored.nbytes, stored.file)
    finally:
        reader.close()
        bar.close()
    if problems:
        raise CheckpointError(model_dir, problems)
    return model


def _rows(parameter: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The part of ``parameter`` that a tensor fills; [1, H] fills all of a vector [H]."""
    if parameter.dim() < len(spec.shape) and spec.shape[0] == 1:
        return parameter
    return parameter[spec.row : spec.row + spec.shape[0]]


def _finish_layer(
    model: KimiK3, layer: int, buffers: ExpertBuffers, work: list[tuple[TensorSpec, StoredTensor]]
) -> list[str]:
    """Pack a layer whose expert tensors have all been read -> problems found in it."""
    if buffers.has_bad_scale():
        specs = (s for s, _ in work if s.expert is not None and s.target.startswith(f"layers.{layer}."))
        names = buffers.bad_scales(specs)
        return [f"{name} holds the E8M0 scale byte 255, which is not a number" for name in names]
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, MoE)
    mlp.experts.w13, mlp.experts.w2 = buffers.pack()
    return []


def match(config: ModelConfig, inventory: Inventory, problems: list[str]) -> list[tuple[TensorSpec, StoredTensor]]:
    """Pair each tensor of the table with its stored one; everything that does not fit is appended to ``problems``."""
    work, expected = [], set()
    missing = []
    for spec in checkpoint_tensors(config):
        expected.add(spec.name)
        stored = inventory.tensors.get(spec.name)
        if stored is None:
            if spec.name not in inventory.unread:
                missing.append(f"missing tensor {spec.name} {list(spec.shape)} {_name(spec.dtype)}")
            continue
        if stored.shape != spec.shape:
            problems.append(f"{spec.name} must have shape {list(spec.shape)}, got {list(stored.shape)}")
        elif stored.dtype != _name(spec.dtype):
            problems.append(f"{spec.name} must have dtype {_name(spec.dtype)}, got {stored.dtype}")
        else:
            work.append((spec, stored))
    unexpected = [n for n in inventory.tensors if n not in expected and not n.startswith(SKIPPED_PREFIXES)]
    packed = any(n.endswith(".weight_packed") for n in unexpected)
    if packed and config.expert_format == "bf16":
        problems.append("the experts are stored packed, but config.json has no quantization_config that says how")
    if config.expert_format == "mxfp4" and any(".experts." in n and n.endswith(".weight") for n in unexpected):
        problems.append("config.json announces MXFP4 experts, but plain expert weights are stored")
    problems += missing
    problems += [f"unexpected tensor {n} {list(inventory.tensors[n].shape)}" for n in sorted(unexpected)]
    return work


def _name(dtype: torch.dtype) -> str:
    return next(name for name, d in DTYPES.items() if d == dtype)
