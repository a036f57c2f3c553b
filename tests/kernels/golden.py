"""Expected numbers that other implementations made; see the README beside each file."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file

DATA = Path(__file__).resolve().parents[1] / "data"


@functools.cache
def mxfp4_golden() -> dict[str, torch.Tensor]:
    return load_file(DATA / "mxfp4" / "mxfp4.safetensors")


@functools.cache
def tiny_states() -> dict[str, torch.Tensor]:
    return load_file(DATA / "tiny-k3" / "states_prompt_7.safetensors")


@functools.cache
def tiny_weights() -> dict[str, torch.Tensor]:
    """All tensors of the tiny checkpoint, without the prefix of the text model."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted((DATA / "tiny-k3").glob("model-*.safetensors")):
        tensors.update(load_file(shard))
    return {name.removeprefix("language_model."): value for name, value in tensors.items()}
