"""MLA over a paged latent cache (K3 spec section 6): nothing rotates, all 576 dimensions of a cached row count."""

from __future__ import annotations

import itertools

import torch

from kimi_kernels.reference.norm import rms

LATENT = 512
ROWS_AT_ONCE = 1 << 16  # cached rows gathered for one padded group of sequences, bounds the scratch memory
QUERIES_AT_ONCE = 512


def store(
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_scale: torch.Tensor | float | None,
    eps: float,
) -> None:
    """latent [T, 576] raw: normalise the first 512, keep the last 64, write to the mapped rows of the cache."""
    token = (slot_mapping >= 0).nonzero().squeeze(1)
    rows = latent[token].float()
    rows = torch.cat([rms(rows[:, :LATENT], norm_weight, eps), rows[:, LATENT:]], dim=-1)
    if cache_scale is not None:
        rows = (rows / cache_scale).clamp(-448.0, 448.0)
    where = slot_mapping[token]
    block_size = cache.shape[1]
    cache[where // block_size, where % block_size] = rows.to(cache.dtype)


def gather(
    cache: torch.Tensor, block_table: torch.Tensor, length: int, cache_scale: torch.Tensor | float | None
) -> torch.Tensor:
    """cache [blocks, block, 576], block_table [n, max_blocks] -> f32 [n, length, 576]; no block beyond is read."""
    blocks = -(-length // cache.shape[1])
    rows = cache[block_table[:, :blocks].long()]  # [n, blocks, block, 576]
    rows = rows.flatten(1, 2)[:, :length].float()
    return rows if cache_scale is None else rows * cache_scale


def decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cache_scale: torch.Tensor | float | None,
    scale: float,
) -> torch.Tensor:
    """Absorbed form. q [T, heads, 576] -> f32 [T, heads, 512]. Sequences of like length run together, padded."""
    out = q.new_zeros((q.shape[0], q.shape[1], LATENT), dtype=torch.float32)
    contexts = context_lens.tolist()
    starts = list(range(len(contexts) + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    queries = [stop - start for start, stop in itertools.pairwise(starts)]
    order = sorted((i for i, c in enumerate(contexts) if c > 0 and queries[i] > 0), key=lambda i: -contexts[i])
    while order:
        longest = contexts[order[0]]
        size = max(1, ROWS_AT_ONCE // longest)
        group, order = order[:size], order[size:]
        _decode_group(out, q, cache, block_table, group, contexts, starts, queries, cache_scale, scale)
    return out


def _decode_group(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    group: list[int],
    contexts: list[int],
    starts: list[int],
    queries: list[int],
    cache_scale: torch.Tensor | float | None,
    scale: float,
) -> None:
    device, heads = q.device, q.shape[1]
    longest, width = contexts[group[0]], max(queries[i] for i in group)
    # Row r of sequence i is query r counted from its last one, so that its own position is contexts[i] - 1 - r.
    last = torch.tensor([starts[i] + queries[i] - 1 for i in group], device=device)
    seen = torch.tensor([contexts[i] for i in group], device=device)
    real = torch.tensor([queries[i] for i in group], device=device)
    back = torch.arange(width, device=device)
    index = (last[:, None] - back).clamp(min=0)  # [n, width]
    # Table entries beyond a context may hold anything; block 0 stands in for them.
    blocks = torch.arange(block_table.shape[1], device=device) * cache.shape[1]
    table = block_table[torch.tensor(group, device=device)].masked_fill(blocks >= seen[:, None], 0)
    rows = gather(cache, table, longest, cache_scale)  # [n, L, 576]
    scores = torch.matmul(q[index].float().flatten(1, 2), rows.transpose(1, 2)) * scale  # [n, width*heads, L]
    hidden = torch.arange(longest, device=device) >= (seen[:, None] - back)[:, :, None]  # [n, width, L]
    if bool(hidden.any()):
        scores.unflatten(1, (width, heads)).masked_fill_(hidden.unsqueeze(2), float("-inf"))
        # Rows beyond a context may hold anything; a weight of 0 does not silence a NaN.
        rows.masked_fill_((torch.arange(longest, device=device) >= seen[:, None]).unsqueeze(-1), 0.0)
    result = torch.matmul(scores.softmax(-1), rows[..., :LATENT]).unflatten(1, (width, heads))
    keep = back < real[:, None]  # [n, width]
    out[index[keep]] = result[keep]


def prefill(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cache_scale: torch.Tensor | float | None,
    scale: float,
) -> torch.Tensor:
    """Expanded form. q [T, heads, 192] -> f32 [T, heads, 128]; keys and values of one sequence at a time."""
    heads = q.shape[1]
    out = q.new_zeros((q.shape[0], heads, 128), dtype=torch.float32)
    contexts, starts = context_lens.tolist(), cu_seqlens.tolist()
    weight = kv_b.float()
    for i, context in enumerate(contexts):
        first, stop = starts[i], starts[i + 1]
        if stop <= first:
            continue
        rows = gather(cache, block_table[i : i + 1], context, cache_scale)[0]  # [L, 576]
        kv = (rows[:, :LATENT] @ weight.T).view(context, heads, 256)
        keys = torch.cat([kv[..., :128], rows[:, None, LATENT:].expand(-1, heads, -1)], -1).permute(1, 2, 0)
        values = kv[..., 128:].transpose(0, 1)  # [heads, L, 128]
        for begin in range(first, stop, QUERIES_AT_ONCE):
            end = min(begin + QUERIES_AT_ONCE, stop)
            seen = context - stop + end  # keys that the last query of this piece sees
            scores = torch.matmul(q[begin:end].float().transpose(0, 1), keys[..., :seen]) * scale  # [heads, m, seen]
            position = torch.arange(seen - (end - begin), seen, device=q.device)
            future = torch.arange(seen, device=q.device) > position[:, None]
            scores.masked_fill_(future, float("-inf"))
            out[begin:end] = torch.matmul(scores.softmax(-1), values[:, :seen]).transpose(0, 1)
    return out
