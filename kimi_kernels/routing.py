"""Routing: which experts a token goes to, and the device-resident work list of the grouped GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kimi_kernels import _check as check
from kimi_kernels import _ops
from kimi_kernels._dispatch import use_reference
from kimi_kernels.reference import routing as reference

_ops.define(
    "routing_topk(Tensor logits, Tensor bias, Tensor? num_tokens, Tensor(a!) ids, Tensor(b!) weights, "
    "Tensor(c!)? counts, int num_groups, int topk_groups, float scale) -> ()"
)
_ops.define(
    "routing_dispatch(Tensor ids, Tensor? num_tokens, Tensor(a!)? clear, Tensor(b!) counts, Tensor(c!) offsets, "
    "Tensor(d!) pairs, Tensor(e!) tiles, Tensor(f!) num_tiles, Tensor(g!)? scratch, int first, int tile_tokens) -> ()"
)


def topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    num_tokens: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts a token (K3 spec section 8).

    ``s = sigmoid(logits)``; the k largest ``s + bias`` are chosen, best first, ties to the lower id; weights are
    ``s / (sum of the chosen s + 1e-20) * scale``: when every chosen s is 0 the weights are 0.

    logits [T, E] f32 row-strided, 1 <= E <= 1024; bias [E] f32 (for choosing only); 1 <= k <= min(16, E).
    With ``num_groups`` > 1 (divides E) only the ``topk_groups`` groups with the largest sum of their two best
    ``s + bias`` take part. ``num_tokens`` int32 [1]: rows beyond it get ids -1 and weights 0. A row in which a
    ``s + bias`` is NaN gets ids -1 and weights NaN; infinite logits are ordinary (s is 0 or 1).
    ``counts`` int32 [E+1], changed in place: entry e grows by the tokens that chose e, entry E by the NaN rows.

    Returns (ids [T, k] int32, weights [T, k] f32). Raises ValueError naming the argument at fault.
    """
    if not use_reference("routing.topk", logits):
        check.rank("logits", logits, 2)
        check.require(k >= 1, "k", "at least 1", k)
        ids = _ops.empty((logits.shape[0], k), torch.int32, logits)
        weights = _ops.empty((logits.shape[0], k), torch.float32, logits)
        _ops.call("routing_topk", logits, bias, num_tokens, ids, weights, counts, num_groups, topk_groups, float(scale))
        return ids, weights
    check.tensor("logits", logits, (None, None), check.F32, row=True)
    num_experts = logits.shape[1]
    check.require(1 <= num_experts <= 1024, "logits", "1 to 1024 experts (columns)", num_experts)
    check.tensor("bias", bias, (num_experts,), check.F32, like=logits)
    check.require(1 <= k <= min(16, num_experts), "k", f"1 to {min(16, num_experts)}", k)
    check.require(
        num_groups >= 1 and num_experts % num_groups == 0, "num_groups", f"a divisor of {num_experts}", num_groups
    )
    check.require(1 <= topk_groups <= num_groups, "topk_groups", f"1 to {num_groups}", topk_groups)
    in_groups = num_experts // num_groups * topk_groups
    check.require(k <= in_groups, "k", f"at most the {in_groups} experts of the chosen groups", k)
    check.num_tokens(num_tokens, logits)
    if counts is not None:
        check.tensor("counts", counts, (num_experts + 1,), check.INT32, like=logits)
    return reference.topk(logits, bias, k, num_groups, topk_groups, scale, num_tokens, counts)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Work list of the grouped GEMMs, resident on the device; all int32. E counts the experts of ``expert_range``."""

    counts: torch.Tensor  # [E] pairs of each expert
    offsets: torch.Tensor  # [E+1] where an expert's pairs start; the last is their total
    pairs: torch.Tensor  # [T*k] token * k + j in the order of experts, ascending within one; -1 beyond the total
    tiles: torch.Tensor  # [max_tiles, 3] (expert, first position in pairs, tokens), fullest experts first; -1 beyond
    num_tiles: torch.Tensor  # [1]
    expert_range: tuple[int, int]


def dispatch(
    ids: torch.Tensor,
    num_experts: int,
    *,
    expert_range: tuple[int, int] | None = None,
    num_tokens: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    tile_tokens: int = reference.TILE_TOKENS,
) -> Dispatch:
    """Sort (token, expert) pairs by expert and cut each expert's into tiles; nothing leaves the device.

    ids [T, k] int32 as ``topk`` gives them, below ``num_experts`` (1 to 1024); -1 takes no part, nor do ids outside
    ``expert_range`` (first, last+1) and rows beyond ``num_tokens`` int32 [1]. The order is stable: pairs of one expert
    ascend. ``counts`` int32 [num_experts+1] is the tensor that ``topk`` added to for these ids: it is set to 0, in
    place, for the next step. ``tile_tokens``, a multiple of 8, is the most tokens of a tile: the expert kernels take
    any work list, but one made for their own piece size fits best. On CUDA T * k is below 2^28.

    Returns a Dispatch. Raises ValueError naming the argument at fault.
    """
    check.require(tile_tokens > 0 and tile_tokens % 8 == 0, "tile_tokens", "a multiple of 8", tile_tokens)
    check.require(1 <= num_experts <= 1024, "num_experts", "1 to 1024", num_experts)
    if not use_reference("routing.dispatch", ids):
        return _dispatch_cuda(ids, num_experts, expert_range or (0, num_experts), num_tokens, counts, tile_tokens)
    check.tensor("ids", ids, (None, None), check.INT32)
    if ids.is_cpu and ids.numel():  # free of a device sync only there
        low, high = (int(v) for v in ids.aminmax())
        check.require(low >= -1 and high < num_experts, "ids", f"-1 to {num_experts - 1}", f"{low} to {high}")
    first, last = expert_range or (0, num_experts)
    check.require(
        0 <= first < last <= num_experts, "expert_range", f"0 <= first < last+1 <= {num_experts}", expert_range
    )
    check.num_tokens(num_tokens, ids)
    if counts is not None:
        check.tensor("counts", counts, (num_experts + 1,), check.INT32, like=ids)
    result = Dispatch(*reference.dispatch(ids, first, last, num_tokens, tile_tokens), expert_range=(first, last))
    if counts is not None:
        counts.zero_()
    return result


def _dispatch_cuda(
    ids: torch.Tensor,
    num_experts: int,
    expert_range: tuple[int, int],
    num_tokens: torch.Tensor | None,
    counts: torch.Tensor | None,
    tile_tokens: int,
) -> Dispatch:
    first, last = expert_range
    check.require(
        0 <= first < last <= num_experts, "expert_range", f"0 <= first < last+1 <= {num_experts}", expert_range
    )
    if counts is not None:
        check.require(tuple(counts.shape) == (num_experts + 1,), "counts", f"shape [{num_experts + 1}]", counts.shape)
    check.rank("ids", ids, 2)
    pairs, experts = ids.shape[0] * ids.shape[1], last - first
    scratch = _ops.module().routing_dispatch_scratch(pairs, experts)
    result = Dispatch(
        counts=_ops.empty((experts,), torch.int32, ids),
        offsets=_ops.empty((experts + 1,), torch.int32, ids),
        pairs=_ops.empty((pairs,), torch.int32, ids),
        tiles=_ops.empty((reference.max_tiles(pairs, experts, tile_tokens), 3), torch.int32, ids),
        num_tiles=_ops.empty((1,), torch.int32, ids),
        expert_range=expert_range,
    )
    _ops.call(
        "routing_dispatch",
        ids,
        num_tokens,
        counts,
        result.counts,
        result.offsets,
        result.pairs,
        result.tiles,
        result.num_tiles,
        _ops.empty((scratch,), torch.int32, ids) if scratch else None,
        first,
        tile_tokens,
    )
    return result
