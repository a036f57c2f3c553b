"""The metadata of a step: the host packs what it knows into one buffer, one launch writes what the operations read.

The buffers are static, so a CUDA graph captured over them serves every step that fits: beyond the step's own sizes
they hold padding (slot 0, context 0, slot_mapping -1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain

import torch

from kimi_kernels import _check as check
from kimi_kernels import _ops
from kimi_kernels._dispatch import use_reference
from kimi_kernels.reference import meta as reference

_ops.define(
    "meta_step(Tensor packed, Tensor(a!) token_ids, Tensor(b!) cu_seqlens, Tensor(c!) prefill_cu_seqlens, "
    "Tensor(d!) context_lens, Tensor(e!) slots, Tensor(f!) fresh, Tensor(g!) block_table, Tensor(h!) slot_mapping, "
    "Tensor(i!) num_tokens, int block_size) -> ()"
)


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """What the operations of a step read. The first ``num_decodes`` sequences have one token each."""

    token_ids: torch.Tensor  # [max_tokens] int64
    cu_seqlens: torch.Tensor  # [max_seqs + 1] int32; T beyond the last sequence
    prefill_cu_seqlens: torch.Tensor  # [max_seqs + 1] int32, over the prefill slice, starts at 0
    context_lens: torch.Tensor  # [max_seqs] int32, this step's tokens included
    slots: torch.Tensor  # [max_seqs] int32; 0 = padding
    fresh: torch.Tensor  # [max_seqs] bool: nothing was computed before
    block_table: torch.Tensor  # [max_seqs, max_blocks] int32; 0 beyond a sequence's blocks
    slot_mapping: torch.Tensor  # [max_tokens] int64: block * block_size + row; -1 = padding
    num_tokens: torch.Tensor  # [1] int32

    @property
    def shape(self) -> tuple[int, int, int]:
        """(max_seqs, max_tokens, max_blocks)."""
        return self.block_table.shape[0], self.token_ids.shape[0], self.block_table.shape[1]


def buffers(max_seqs: int, max_tokens: int, max_blocks: int, device: torch.device | str) -> StepBuffers:
    """Uninitialised buffers for steps of up to so many sequences, tokens, and blocks a sequence."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return StepBuffers(
        token_ids=empty(max_tokens, dtype=torch.int64),
        cu_seqlens=empty(max_seqs + 1),
        prefill_cu_seqlens=empty(max_seqs + 1),
        context_lens=empty(max_seqs),
        slots=empty(max_seqs),
        fresh=empty(max_seqs, dtype=torch.bool),
        block_table=empty(max_seqs, max_blocks),
        slot_mapping=empty(max_tokens, dtype=torch.int64),
        num_tokens=empty(1),
    )


def packed_words(max_seqs: int, max_tokens: int, max_blocks: int) -> int:
    """int32 words that ``pack`` needs at most."""
    return reference.HEADER + 4 * max_seqs + 2 + max_seqs * max_blocks + max_tokens


def pack(
    new_tokens: Sequence[int],
    num_computed: Sequence[int],
    slots: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    token_ids: Sequence[int],
    *,
    num_decodes: int,
    block_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The step of n sequences as int32 words on the CPU, for ``step``.

    new_tokens, num_computed, slots, block_tables: one entry a sequence, decodes first; token_ids: the new tokens of all
    of them. ``out`` (int32, CPU, best pinned, at least as long) is written from its start and its used part returned.
    Raises ValueError when the lists contradict each other or ``out`` is too short.
    """
    n, cu = len(new_tokens), [0, *accumulate(new_tokens)]
    check.require(len(num_computed) == n, "num_computed", f"{n} entries", len(num_computed))
    check.require(len(slots) == n, "slots", f"{n} entries", len(slots))
    check.require(len(block_tables) == n, "block_tables", f"{n} entries", len(block_tables))
    check.require(len(token_ids) == cu[-1], "token_ids", f"{cu[-1]} entries", len(token_ids))
    check.require(0 <= num_decodes <= n, "num_decodes", f"0 to {n}", num_decodes)
    check.require(min(new_tokens, default=1) >= 1, "new_tokens", "at least 1 each", min(new_tokens, default=1))
    most = max(new_tokens[:num_decodes], default=1)
    check.require(most == 1, "new_tokens", "1 for each decode", most)
    for new, done, table in zip(new_tokens, num_computed, block_tables, strict=True):
        needed = -(-(new + done) // block_size)
        check.require(len(table) >= needed, "block_tables", f"{needed} blocks for {new + done} tokens", len(table))
    first_block = [0, *accumulate(map(len, block_tables))]
    header = (n, num_decodes, cu[-1], first_block[-1])
    words = [*header, *cu, *num_computed, *slots, *first_block, *chain.from_iterable(block_tables), *token_ids]
    values = torch.tensor(words, dtype=torch.int32)
    if out is None:
        return values
    check.tensor("out", out, (None,), check.INT32)
    check.require(len(out) >= len(words), "out", f"at least {len(words)} words", len(out))
    return out[: len(words)].copy_(values)


def step(packed: torch.Tensor, out: StepBuffers, *, block_size: int) -> StepBuffers:
    """Write all buffers of the step that ``pack`` described; ``packed`` [words] int32 is on their device.

    One launch, no host sync; the sizes are read on the device. A step larger than the buffers is cut to them on CUDA
    (it never writes outside) and raises ValueError on the CPU: check on the host before packing. ``out`` is returned.
    Raises ValueError or TypeError naming the argument at fault.
    """
    if not use_reference("meta.step", packed):
        _ops.call("meta_step", packed, *[getattr(out, field.name) for field in fields(out)], block_size)
        return out
    check.tensor("packed", packed, (None,), check.INT32)
    check.require(block_size > 0, "block_size", "at least 1", block_size)
    n, tokens = packed[0].item(), packed[2].item()
    max_seqs, max_tokens, max_blocks = out.shape
    check.require(n <= max_seqs and tokens <= max_tokens, "packed", f"at most {out.shape}", (n, tokens))
    for name, values in reference.step(packed, block_size, max_seqs, max_tokens, max_blocks).items():
        getattr(out, name).copy_(values)
    return out
