"""Expert choice (K3 spec section 8) and the work list made from it."""

from __future__ import annotations

import torch


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
