"""How many MLA blocks and KDA slots there are, and their tensors."""

from __future__ import annotations

import dataclasses
import logging
import math
import os

import numpy as np
import torch

from engine.config import ModelConfig
from engine.engine_config import EngineConfig
from engine.model.context import ModelState
from engine.types import ParameterError

logger = logging.getLogger(__name__)

CPU_BUDGET = 4 << 30  # bytes; pages of the pools that no request ever used cost nothing
STATE_SHARE = 0.5  # of the budget that state slots may take when their number is not given


def slot_bytes(config: ModelConfig, conv_itemsize: int) -> int:
    """Bytes of one sequence's KDA state over all layers: the fp32 matrices and the last three convolution inputs."""
    matrices = config.kda_num_heads * config.kda_head_dim**2 * 4
    conv = (config.conv_kernel_size - 1) * 3 * config.kda_dim * conv_itemsize
    return len(config.kda_layers) * (matrices + conv)


def token_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one token in the MLA cache over all layers."""
    return len(config.mla_layers) * (config.kv_lora_rank + config.qk_rope_head_dim) * itemsize


def activation_bytes(config: ModelConfig, num_tokens: int, itemsize: int) -> int:
    """An upper estimate of what one forward pass allocates: AttnRes rows and the widest layer's intermediates."""
    widest = max(6 * config.kda_dim, 2 * config.intermediate_size, 4 * config.num_attention_heads * 192)
    per_token = (config.num_attn_res_blocks + 8) * config.hidden_size + 2 * widest
    return num_tokens * per_token * itemsize + 4 * 256 * config.vocab_size


def memory_budget(config: ModelConfig, engine: EngineConfig, device: torch.device, itemsize: int) -> int:
    """Bytes that blocks and slots may take together, after the weights are loaded."""
    if device.type == "cpu":
        return min(CPU_BUDGET, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    free, total = torch.cuda.mem_get_info(device)
    reserve = activation_bytes(config, engine.max_num_batched_tokens, itemsize)
    return max(0, int(free - (1 - engine.gpu_memory_utilization) * total) - reserve)


def resolve(config: ModelConfig, engine: EngineConfig, budget: int, itemsize: int) -> EngineConfig:
    """Fill in num_blocks, num_slots and max_model_len so that both memories fit ``budget`` bytes.

    Slots come first: one for each of ``max_num_seqs``, or as many as half the budget holds (``max_num_seqs`` is then
    lowered to it and a warning says so). Blocks take the rest, up to what all slots could use. Numbers that were given
    are kept. Raises ParameterError when the given limits cannot be met.
    """
    limit = config.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > limit:
        raise ParameterError(
            "max_model_len", f"max_model_len must be at most the model's {limit}, got {engine.max_model_len}"
        )
    per_slot, per_block = slot_bytes(config, itemsize), token_bytes(config, itemsize) * engine.block_size
    slots = engine.num_slots
    if slots is None:
        fit = int(budget * STATE_SHARE) // per_slot if per_slot else engine.max_num_seqs
        slots = min(engine.max_num_seqs, fit)
        if slots < 1:
            raise ParameterError("num_slots", f"no memory for one state slot of {per_slot} bytes in {budget} bytes")
        if slots < engine.max_num_seqs:
            logger.warning("max_num_seqs lowered from %d to %d: so many states fit", engine.max_num_seqs, slots)
            engine = dataclasses.replace(engine, max_num_seqs=slots)
    most = slots * -(-(engine.max_model_len or limit) // engine.block_size)
    blocks = engine.num_blocks
    if blocks is None:
        blocks = min(most, (budget - slots * per_slot) // per_block) if per_block else most
    capacity = max(0, blocks) * engine.block_size
    if capacity < (engine.max_model_len or 2):
        raise ParameterError(
            "max_model_len",
            f"the MLA cache holds {capacity} tokens (num_blocks {blocks} of {engine.block_size}), "
            f"fewer than max_model_len {engine.max_model_len or 2}",
        )
    return engine.resolved(
        max_model_len=engine.max_model_len or min(limit, capacity), num_blocks=blocks, num_slots=slots
    )


def allocate(config: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype) -> ModelState:
    """The pools of a resolved ``engine``: the usable slots and blocks, and number 0 of each, where padding points."""
    slots, blocks, kda_layers = (engine.num_slots or 0) + 1, (engine.num_blocks or 0) + 1, len(config.kda_layers)
    heads, dim = config.kda_num_heads, config.kda_head_dim
    row = config.kv_lora_rank + config.qk_rope_head_dim
    conv_rows = config.conv_kernel_size - 1
    return ModelState(
        kda_state=_zeros((slots, kda_layers, heads, dim, dim), torch.float32, device),
        conv_state=_zeros((slots, kda_layers, conv_rows, 3 * config.kda_dim), dtype, device),
        mla_cache=_zeros((len(config.mla_layers), blocks, engine.block_size, row), dtype, device),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU from numpy, which leaves pages untouched until they are used (torch.zeros writes them all)."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
