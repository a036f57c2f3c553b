"""Per-step metadata in plain torch: what the model's operations read of a step, from what the host packed."""

from __future__ import annotations

import torch

HEADER = 4  # words: sequences n, decodes among them, tokens T, block ids B


def unpack(packed: torch.Tensor) -> tuple[int, int, list[torch.Tensor]]:
    """n, decodes, [cu_seqlens [n+1], computed [n], slots [n], first_block [n+1], blocks [B], token_ids [T]]."""
    n, decodes, tokens, blocks = packed[:HEADER].tolist()
    sizes = [n + 1, n, n, n + 1, blocks, tokens]
    return n, decodes, list(packed[HEADER : HEADER + sum(sizes)].split(sizes))


def step(
    packed: torch.Tensor, block_size: int, max_seqs: int, max_tokens: int, max_blocks: int
) -> dict[str, torch.Tensor]:
    """Every buffer of kimi_kernels.meta.StepBuffers by name, padded."""
    n, decodes, (cu, computed, slots, first_block, blocks, ids) = unpack(packed)
    lengths, owned = cu.diff(), first_block.diff()
    sequence = torch.repeat_interleave(torch.arange(n, device=packed.device), lengths)
    position = computed[sequence] + torch.arange(len(ids), device=packed.device) - cu[sequence]
    table = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=packed.device)
    table[:n][torch.arange(max_blocks, device=packed.device) < owned[:, None]] = blocks
    block = table[sequence, position // block_size].long()

    def padded(values: torch.Tensor, size: int, fill: int | torch.Tensor = 0) -> torch.Tensor:
        out = values.new_empty(size)
        out[: len(values)] = values
        out[len(values) :] = fill
        return out

    prefill = cu[decodes:] - cu[decodes]
    return {
        "token_ids": padded(ids.long(), max_tokens),
        "cu_seqlens": padded(cu, max_seqs + 1, cu[-1]),
        "prefill_cu_seqlens": padded(prefill, max_seqs + 1, prefill[-1]),
        "context_lens": padded(computed + lengths, max_seqs),
        "slots": padded(slots, max_seqs),
        "fresh": padded(computed == 0, max_seqs),
        "block_table": table,
        "slot_mapping": padded(block * block_size + position % block_size, max_tokens, -1),
        "num_tokens": cu[-1:].clone(),
    }
