"""Expert choice (K3 spec section 8) and the work list made from it."""

from __future__ import annotations

import torch

TILE_TOKENS = 192  # the most tokens of one expert in a tile of the grouped GEMMs


def topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    num_groups: int,
    topk_groups: int,
    scale: float,
    num_tokens: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E], bias [E] -> ids [T, k] int32 (best first, ties to the lower id), weights [T, k] f32."""
    scores = torch.sigmoid(logits)  # [T, E]
    biased = scores + bias
    bad = biased.isnan().any(-1)  # [T]
    if num_groups > 1 and topk_groups < num_groups:
        # A group's score is the sum of its two best biased scores; all but the best groups leave the choice.
        groups = biased.unflatten(-1, (num_groups, -1))  # [T, G, E/G]
        best_two = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)  # [T, G]
        chosen = _best(best_two, topk_groups)  # [T, topk_groups]
        keep = torch.zeros_like(best_two, dtype=torch.bool).scatter_(1, chosen, True)
        # Selection works on ranks, so that an excluded expert stays behind a kept one whose score is -inf.
        order = _best(biased, biased.shape[1])
        kept = keep.repeat_interleave(groups.shape[-1], dim=1).gather(1, order)
        ids = order.gather(1, _best(kept.int(), k))
    else:
        ids = _best(biased, k)
    weights = scores.gather(1, ids)  # [T, k]
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    ids = ids.int().masked_fill_(bad[:, None], -1)
    weights = weights.masked_fill_(bad[:, None], float("nan"))
    if num_tokens is not None:
        padding = torch.arange(logits.shape[0], device=logits.device) >= num_tokens
        ids.masked_fill_(padding[:, None], -1)
        weights.masked_fill_(padding[:, None], 0.0)
        bad = bad & ~padding
    if counts is not None:
        num_experts = logits.shape[1]
        counts += torch.bincount(ids[ids >= 0].long(), minlength=num_experts + 1).to(counts.dtype)
        counts[num_experts] += bad.sum().to(counts.dtype)
    return ids, weights


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest, largest first; a stable sort puts the lower index first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def dispatch(
    ids: torch.Tensor, first: int, last: int, num_tokens: torch.Tensor | None, tile_tokens: int = TILE_TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [T, k] -> int32 counts [E], offsets [E+1], pairs [T*k], tiles [max, 3], num_tiles [1]; E = last - first."""
    device, experts = ids.device, last - first
    flat = ids.flatten().long()
    live = (flat >= first) & (flat < last)
    if num_tokens is not None:
        live &= torch.arange(flat.numel(), device=device) < num_tokens * ids.shape[1]
    flat = torch.where(live, flat - first, experts)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    pairs = flat.argsort(stable=True)
    pairs = torch.where(torch.arange(flat.numel(), device=device) < offsets[-1], pairs, -1)
    tiles = torch.full((max_tiles(flat.numel(), experts, tile_tokens), 3), -1, dtype=torch.int32, device=device)
    rows = tile_rows(counts.tolist(), offsets.tolist(), tile_tokens)
    if rows:
        tiles[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device=device)
    num_tiles = torch.tensor([len(rows)], dtype=torch.int32, device=device)
    return counts.int(), offsets.int(), pairs.int(), tiles, num_tiles


def max_tiles(pairs: int, experts: int, tile_tokens: int = TILE_TOKENS) -> int:
    """The most tiles that ``pairs`` (token, expert) pairs can make, whatever the routing."""
    return min(pairs, experts) + pairs // tile_tokens


def tile_rows(counts: list[int], offsets: list[int], tile_tokens: int = TILE_TOKENS) -> list[tuple[int, int, int]]:
    """(expert, first position in pairs, tokens): equal pieces in multiples of 8, the fullest experts first."""
    rows = []
    for expert in sorted(range(len(counts)), key=lambda e: -counts[e]):
        left, at = counts[expert], offsets[expert]
        if left == 0:
            break
        pieces = -(-left // tile_tokens)
        each = -(-left // pieces)
        size = -(-each // 8) * 8
        while left > 0:
            rows.append((expert, at, min(size, left)))
            at, left = at + size, left - size
    return rows
