"""Kimi Delta Attention: convolution, gates, delta rule and gated norm on states that live in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kimi_kernels import _check as check
from kimi_kernels import _check_kda as check_kda
from kimi_kernels import _ops
from kimi_kernels._dispatch import no_kernel, use_reference
from kimi_kernels.reference import kda as reference
from kimi_kernels.reference import kda_prefill as reference_prefill
from kimi_kernels.reference.kda import DIM

MAX_RUN = 9  # tokens of a run that verify takes: one and up to 8 drafts

_TOKEN_ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor f, Tensor beta, Tensor gate, Tensor conv_weight, Tensor a_log, "
    "Tensor dt_bias, Tensor o_norm, Tensor(a!) state, Tensor(b!) conv_state, Tensor slots"
)
_ops.define(
    f"kda_decode({_TOKEN_ARGS}, Tensor? fresh, Tensor? num_tokens, Tensor? records, Tensor? accepted, Tensor(c!) out, "
    "float lower_bound, float eps) -> ()"
)
_ops.define(
    f"kda_verify({_TOKEN_ARGS}, Tensor cu_seqlens, Tensor? fresh, Tensor? num_tokens, Tensor(d!) records, "
    "Tensor? accepted, Tensor(c!) out, float lower_bound, float eps) -> ()"
)
_ops.define("kda_commit(Tensor(a!) state, Tensor(b!) conv_state, Tensor records, Tensor slots, Tensor accepted) -> ()")
_ops.define("kda_zero(Tensor(a!) state, Tensor(b!) conv_state, Tensor slots) -> ()")
_ops.define("kda_copy(Tensor(a!) state, Tensor(b!) conv_state, Tensor src, Tensor dst) -> ()")


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How a pack of pieces is cut, from lengths that the host knows; made by ``plan``."""

    heads: int
    lengths: tuple[int, ...]


def plan(heads: int, lengths: Sequence[int]) -> PrefillPlan:
    """Plan of a ``prefill_`` call: heads on this device, tokens of each sequence. ValueError on bad numbers."""
    check.require(heads >= 1, "heads", "at least 1", heads)
    check.require(all(n >= 0 for n in lengths), "lengths", "no negative length", list(lengths))
    return PrefillPlan(heads, tuple(int(n) for n in lengths))


def record_shape(heads: int, run: int) -> tuple[int, ...]:
    """Shape of one slot's records of a run of up to ``run`` tokens: a pool is f32 [slots, *record_shape(heads, run)].

    [heads, 6, run, 128]: decay, normalised k, beta-weighted error, and the raw q, k, v before the convolution.
    """
    check.require(heads >= 1, "heads", "at least 1", heads)
    check.require(1 <= run <= MAX_RUN, "run", f"1 to {MAX_RUN}", run)
    return (heads, reference.RECORD_ROWS, run, DIM)


def decode_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    *,
    fresh: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    eps: float = 1e-5,
    num_tokens: torch.Tensor | None = None,
    records: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token for each of T sequences, both states changed in place (K3 spec section 5).

    q, k, v (before the convolution), f (raw forget gate, before dt_bias), gate (raw output gate) [T, heads*128] and
    beta (raw) [T, heads]: row-strided, one dtype, bf16 (CPU: also float32). conv_weight [3*heads*128, 4] (q, k, v rows,
    last tap = this token), a_log [>= heads] (the first ``heads`` count), dt_bias [heads*128], o_norm [128]: f32.
    state f32 [slots, heads, 128 v, 128 k] and conv_state [slots, 3, 3*heads*128] (raw rows, oldest first; bf16, CPU:
    also float32) are views of slot-major pools: contiguous within a slot, any slot stride. On CUDA heads is at most 96,
    and states, their slot strides and conv_weight are at multiples of 16 bytes.
    slots [T] int32: row i works on slot slots[i]; distinct, but 0 = padding: nothing is read or written, output 0.
    ``fresh`` [T] bool: the sequence starts here; nothing of its slot is read. ``num_tokens`` int32 [1]: rows beyond it
    are padding. ``lower_bound`` < 0: g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)). ``eps``: the output norm's.
    ``records`` (see ``verify``) with ``accepted`` [T] int32: that many tokens of the slot's last run go in first.

    fp32 inside, convolution and its SiLU included; one rounding, of the output.
    Returns [T, heads*128] of q's dtype. Raises ValueError naming the argument at fault.
    """
    if not use_reference("kda.decode_", q):
        out = _ops.empty(tuple(q.shape), torch.bfloat16, q)
        tokens = (q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, state, conv_state, slots)
        _ops.call("kda_decode", *tokens, fresh, num_tokens, records, accepted, out, lower_bound, eps)
        return out
    x = check_kda.inputs(q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, lower_bound, eps)
    check_kda.states(x, state, conv_state)
    check_kda.sequences(q, state, slots, q.shape[0], fresh, num_tokens)
    check_kda.records(x.heads, state, records, accepted, slots)
    check.require((records is None) == (accepted is None), "accepted", "records and accepted together", "one alone")
    return reference.decode(x, state, conv_state, slots, fresh, num_tokens, records, accepted)


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    fresh: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    eps: float = 1e-5,
    num_tokens: torch.Tensor | None = None,
    records: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A run of 1 to 9 tokens for each of n sequences, without committing it (a token and its drafts).

    Arguments as ``decode_``, but slots, fresh, accepted are [n]; cu_seqlens int32 [n+1] says which rows are whose run.
    ``records`` f32 [slots, *record_shape(heads, run)], indexed by slot, receives what a commit of this run needs; None
    allocates. Without ``accepted`` both states stay as they are (a fresh slot's become 0). With it ([n] int32, 0 to the
    length of the slot's last run) that many tokens of the last run, as ``records`` holds it, go into both first.
    Committed states equal those of one-by-one ``decode_`` to the bit. On CUDA, rows of q, k, v, f and gate are read
    faster where they begin at multiples of 16 bytes.

    Returns (out [T, heads*128] of q's dtype, records). Raises ValueError naming the argument at fault.
    """
    if not use_reference("kda.verify", q):
        if records is None:
            check.require(accepted is None, "records", "the last run's records with accepted", None)
            check.rank("state", state, 4)
            records = _ops.empty((state.shape[0], *record_shape(state.shape[1], MAX_RUN)), torch.float32, q)
        out = _ops.empty(tuple(q.shape), torch.bfloat16, q)
        tokens = (q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, state, conv_state, slots, cu_seqlens)
        _ops.call("kda_verify", *tokens, fresh, num_tokens, records, accepted, out, lower_bound, eps)
        return out, records
    x = check_kda.inputs(q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, lower_bound, eps)
    check_kda.states(x, state, conv_state)
    check_kda.sequences(q, state, slots, None, fresh, num_tokens)
    lengths = check_kda.cu_seqlens(q, slots, cu_seqlens)
    check.require(records is not None or accepted is None, "records", "the last run's records with accepted", None)
    if records is None:
        records = torch.zeros((state.shape[0], *record_shape(x.heads, MAX_RUN)), device=q.device)
    check_kda.records(x.heads, state, records, accepted, slots)
    longest = max(lengths, default=0)
    held = records.shape[3]
    check.require(longest <= held, "cu_seqlens", f"runs of at most {held} tokens", longest)
    out = reference.verify(x, state, conv_state, slots, cu_seqlens, fresh, num_tokens, records, accepted)
    return out, records


def commit_(
    records: torch.Tensor, state: torch.Tensor, conv_state: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor
) -> None:
    """Commit the first accepted [n] int32 tokens of each slot's last run to both states, in place; 0 = none.

    records, state, conv_state, slots [n] as in ``verify``; slot 0 is skipped. To be run before a slot that has a run
    open is copied, exported or freed. Returns None. Raises ValueError naming the argument at fault.
    """
    if not use_reference("kda.commit_", state):
        _ops.call("kda_commit", state, conv_state, records, slots, accepted)
        return
    check_kda.pools(state, conv_state, layers=False)
    check.tensor("slots", slots, (None,), check.INT32, like=state)
    check_kda.records(state.shape[1], state, records, accepted, slots)
    reference.commit(records, state, conv_state, slots, accepted)


def prefill_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    fresh: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    eps: float = 1e-5,
    num_tokens: torch.Tensor | None = None,
    exports: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """Packed pieces of n sequences, any lengths from 0; both states go on in place (K3 spec section 5, chunk form).

    Arguments as ``decode_``, but slots and fresh are [n]; cu_seqlens int32 [n+1] says which rows are whose; a sequence
    without tokens is left alone. ``exports`` int32 [m, 3] rows (sequence, tokens done, slot): both states as they are
    after that many tokens of this call (0 = as found, zero when fresh) are written to that slot too; slot 0 is skipped.
    An exported slot must not belong to a sequence of the call. ``plan``: from ``plan(heads, lengths)``; None plans for
    the upper bound. Results do not depend on the other sequences of the pack. ``lower_bound`` is in [-5, 0).

    Returns [T, heads*128] of q's dtype; rows that belong to no sequence are 0. Raises ValueError naming the argument.
    """
    if not use_reference("kda.prefill_", q):
        raise no_kernel("kda.prefill_", q)
    x = check_kda.inputs(q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, lower_bound, eps)
    check_kda.states(x, state, conv_state)
    check_kda.sequences(q, state, slots, None, fresh, num_tokens)
    check.require(lower_bound >= reference_prefill.LOWEST_BOUND, "lower_bound", "at least -5", lower_bound)
    lengths = check_kda.cu_seqlens(q, slots, cu_seqlens)
    if plan is not None:
        given = (plan.heads, plan.lengths)
        check.require(given == (x.heads, tuple(lengths)), "plan", f"heads {x.heads}, lengths {lengths}", given)
    if exports is not None:
        check_kda.exports(exports, lengths, state)
    return reference_prefill.prefill(x, state, conv_state, slots, cu_seqlens, fresh, num_tokens, exports)


def zero_(state: torch.Tensor, conv_state: torch.Tensor, slots: torch.Tensor) -> None:
    """Set the two states of slots [n] int32 to 0 in place, NaN too; slot 0 is skipped.

    state f32 [slots, heads, 128, 128] and conv_state [slots, 3, channels], or the whole pools [slots, layers, ...] of
    both. Returns None. Raises ValueError naming the argument at fault.
    """
    if not use_reference("kda.zero_", state):
        _ops.call("kda_zero", state, conv_state, slots)
        return
    check_kda.pools(state, conv_state)
    check.tensor("slots", slots, (None,), check.INT32, like=state)
    reference.zero(state, conv_state, slots)


def copy_(state: torch.Tensor, conv_state: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy both states of slot src[i] to slot dst[i] in place, bit for bit; a pair with a 0 in it is skipped.

    Tensors as ``zero_``; src, dst [n] int32. A destination may not appear twice, nor as a source. Returns None.
    Raises ValueError naming the argument at fault.
    """
    if not use_reference("kda.copy_", state):
        _ops.call("kda_copy", state, conv_state, src, dst)
        return
    check_kda.pools(state, conv_state)
    check.tensor("src", src, (None,), check.INT32, like=state)
    check.tensor("dst", dst, src.shape, check.INT32, like=state)
    reference.copy(state, conv_state, src, dst)
