"""From a step's plan to the tensors of one forward pass."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from engine.model.context import ForwardContext
from engine.types import StepPlan


def prepare(plan: StepPlan, block_size: int, device: torch.device) -> tuple[torch.Tensor, ForwardContext]:
    """(token ids [T] int64, context). Raises ValueError when the plan contradicts itself."""
    scheduled = plan.scheduled
    n = len(scheduled)
    new = np.fromiter((s.num_new_tokens for s in scheduled), np.int64, n)
    done = np.fromiter((s.num_computed_tokens for s in scheduled), np.int64, n)
    slots = np.fromiter((s.request.slot for s in scheduled), np.int32, n)
    context = done + new
    num_tokens = int(new.sum())
    decode = np.fromiter((s.is_decode for s in scheduled), bool, n)
    if num_tokens != plan.num_tokens or n == 0 or new.min() < 1:
        raise ValueError(f"the plan says {plan.num_tokens} tokens, its requests have {new.tolist()}")
    if decode[: plan.num_decodes].sum() != plan.num_decodes or decode[plan.num_decodes :].any():
        raise ValueError(f"the plan must start with its {plan.num_decodes} decodes, got {decode.tolist()}")

    needed = -(-context // block_size)
    owned = np.fromiter((len(s.request.block_table) for s in scheduled), np.int64, n)
    if slots.min() < 1 or (owned < needed).any():
        short = [
            s.request.request_id
            for s, o, k in zip(scheduled, owned, needed, strict=True)
            if o < k or s.request.slot < 1
        ]
        raise ValueError(f"requests without a slot or with too few blocks: {short}")
    table = np.zeros((n, int(needed.max())), np.int32)
    blocks = chain.from_iterable(s.request.block_table[:k] for s, k in zip(scheduled, needed.tolist(), strict=True))
    table[np.arange(table.shape[1]) < needed[:, None]] = np.fromiter(blocks, np.int32, int(needed.sum()))

    cu = np.zeros(n + 1, np.int64)
    np.cumsum(new, out=cu[1:])
    sequence = np.repeat(np.arange(n), new)  # of each token
    position = np.arange(num_tokens) - np.repeat(cu[:-1] - done, new)
    slot_mapping = table[sequence, position // block_size].astype(np.int64) * block_size + position % block_size
    spans = zip(scheduled, done.tolist(), context.tolist(), strict=True)
    ids = np.fromiter(chain.from_iterable(s.request.tokens(a, b) for s, a, b in spans), np.int64, num_tokens)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    d = plan.num_decodes
    return put(ids), ForwardContext(
        num_tokens=num_tokens,
        num_decodes=d,
        cu_seqlens=put(cu.astype(np.int32)),
        slots=put(slots),
        fresh=put(done == 0),
        block_table=put(table),
        context_lens=put(context.astype(np.int32)),
        slot_mapping=put(slot_mapping),
        prefill_cu_seqlens=put((cu[d:] - cu[d]).astype(np.int32)),
        query_lens=new.tolist(),
        context_lens_host=context.tolist(),
    )
