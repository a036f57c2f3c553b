"""What a layer needs to know about the step, beside the hidden states. Filled by engine/runner/inputs.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardContext:
    """Metadata of one packed forward pass over T tokens of n sequences, ordered [decode | prefill].

    The first ``num_decodes`` sequences have one token each, so tokens [0, num_decodes) are the decode slice and
    [num_decodes, T) the prefill slice. Tensors are on the model's device; the host lists serve planning only.
    """

    num_tokens: int
    num_decodes: int
    cu_seqlens: torch.Tensor  # [n+1] int32, over all n sequences
    slots: torch.Tensor  # [n] int32 KDA slot; 0 = padding
    fresh: torch.Tensor  # [n] bool: the sequence starts here, its slot's content is ignored
    block_table: torch.Tensor  # [n, max_blocks] int32, padded with 0
    context_lens: torch.Tensor  # [n] int32, this step's tokens included
    slot_mapping: torch.Tensor  # [T] int64 = block * block_size + row of the MLA cache; -1: not written
    prefill_cu_seqlens: torch.Tensor  # [n - num_decodes + 1] int32, over the prefill slice, starts at 0
    query_lens: list[int]  # host copy: new tokens of each sequence
    context_lens_host: list[int]  # host copy of context_lens


@dataclass(slots=True)
class ModelState:
    """The two memories, for all layers. Slot 0 and block 0 are padding targets and never owned."""

    kda_state: torch.Tensor  # [slots, kda_layers, heads, 128 v, 128 k] f32
    conv_state: torch.Tensor  # [slots, kda_layers, 3, 3*heads*128] bf16 on CUDA, the activation dtype on the CPU
    mla_cache: torch.Tensor  # [mla_layers, blocks, block_size, 576] activation dtype
