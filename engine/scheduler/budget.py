"""How the tokens of one forward pass are split between decodes and prompts.

1. Decodes come first. With K tokens per decoding request, prompts may use ``max_num_batched_tokens - decoding * K``:
   what runs now counts, not ``max_num_seqs``, so a quiet engine prefills with nearly the whole pass.
2. The prompt that is first in rank (priority, then arrival) always advances: alone with all of the budget, beside
   others with half of it. So every prompt comes through, at half speed at worst once it is first.
3. The rest of the budget goes to the other prompts, within one priority the one with the fewest tokens left first.
   So a short prompt is never stuck behind long ones, however many and however long they are.
4. ``chunk_size`` bounds each prompt's share further. A chunk that would be cut to fewer than ``MIN_CHUNK`` tokens waits
   for the next step, since a short chunk costs nearly as much as a full one.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_CHUNK = 16


def prefill_budget(max_num_batched_tokens: int, num_decoding: int, tokens_per_decode: int = 1) -> int:
    """Prompt tokens that one pass may hold beside ``num_decoding`` requests of ``tokens_per_decode`` tokens each."""
    return max(0, max_num_batched_tokens - num_decoding * tokens_per_decode)


def split_prefill(prompts: Sequence[tuple[int, int]], budget: int, chunk_size: int | None = None) -> list[int]:
    """Tokens for each prompt of this pass; ``prompts`` are (priority class, tokens left to compute) in rank order."""
    chunks = [0] * len(prompts)
    if not prompts or budget <= 0:
        return chunks
    most = budget if chunk_size is None else min(chunk_size, budget)
    share = budget if len(prompts) == 1 else (budget + 1) // 2
    chunks[0] = min(prompts[0][1], most, share)
    left = budget - chunks[0]
    for index in sorted(range(1, len(prompts)), key=prompts.__getitem__):
        chunk = min(prompts[index][1], most, left)
        if chunk == left < MIN_CHUNK and chunk < prompts[index][1]:
            break
        chunks[index] = chunk
        left -= chunk
    if left > 0:  # what the others did not need
        chunks[0] = min(prompts[0][1], most, chunks[0] + left)
    return chunks
