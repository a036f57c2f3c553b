"""Argument checks of the KDA operations on the reference path; see ``_check``."""

from __future__ import annotations

import itertools

import torch

from kimi_kernels import _check as check
from kimi_kernels.reference import kda as reference
from kimi_kernels.reference.kda import DIM


def inputs(
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
    lower_bound: float,
    eps: float,
) -> reference.Inputs:
    check.tensor("q", q, (None, None), check.ACTIVATION, row=True)
    tokens, width = q.shape
    heads = width // DIM
    check.require(heads >= 1 and width == heads * DIM, "q", "heads*128 columns", width)
    for name, x in (("k", k), ("v", v), ("f", f), ("gate", gate)):
        check.tensor(name, x, (tokens, width), (q.dtype,), like=q, row=True)
    check.tensor("beta", beta, (tokens, heads), (q.dtype,), like=q, row=True)
    check.tensor("conv_weight", conv_weight, (3 * width, reference.TAPS), check.F32, like=q)
    check.tensor("a_log", a_log, (None,), check.F32, like=q)
    check.require(a_log.shape[0] >= heads, "a_log", f"at least {heads} values", a_log.shape[0])
    check.tensor("dt_bias", dt_bias, (width,), check.F32, like=q)
    check.tensor("o_norm", o_norm, (DIM,), check.F32, like=q)
    check.require(lower_bound < 0, "lower_bound", "a negative number", lower_bound)
    return reference.Inputs(q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, lower_bound, eps)


def states(x: reference.Inputs, state: torch.Tensor, conv_state: torch.Tensor) -> None:
    check.tensor("state", state, (None, x.heads, DIM, DIM), check.F32, like=x.q)
    channels = 3 * x.heads * DIM
    check.tensor("conv_state", conv_state, (state.shape[0], 3, channels), check.ACTIVATION, like=x.q)
    inner = (state.stride()[1:], conv_state.stride()[1:])
    dense = ((DIM * DIM, DIM, 1), (channels, 1))
    for name, got, want in zip(("state", "conv_state"), inner, dense, strict=True):
        # The stride of a dimension of size 1 means nothing.
        same = got[-len(want) :] == want or (x.heads == 1 and got[1:] == want[1:])
        check.require(same, name, f"contiguous within a slot (strides {want})", got)


def sequences(
    q: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    count: int | None,
    fresh: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> None:
    """``count`` sequences; None: as many as ``slots`` says."""
    check.tensor("slots", slots, (count,), check.INT32, like=q)
    if slots.is_cpu and slots.numel():  # free of a device sync only there
        low, high = (int(v) for v in slots.aminmax())
        check.require(low >= 0 and high < state.shape[0], "slots", f"0 to {state.shape[0] - 1}", f"{low} to {high}")
    if fresh is not None:
        check.tensor("fresh", fresh, slots.shape, check.BOOL, like=q)
    check.num_tokens(num_tokens, q)


def cu_seqlens(q: torch.Tensor, slots: torch.Tensor, cu_seqlens: torch.Tensor) -> list[int]:
    check.tensor("cu_seqlens", cu_seqlens, (slots.shape[0] + 1,), check.INT32, like=q)
    borders = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(borders)]
    ok = borders[0] == 0 and borders[-1] <= q.shape[0] and min(lengths, default=0) >= 0
    check.require(ok, "cu_seqlens", f"rising from 0 to at most {q.shape[0]}", borders)
    return lengths


def records(
    heads: int,
    state: torch.Tensor,
    records: torch.Tensor | None,
    accepted: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    if records is not None:
        shape = (state.shape[0], heads, reference.RECORD_ROWS, None, DIM)
        check.tensor("records", records, shape, check.F32, like=state)
    if accepted is not None:
        check.tensor("accepted", accepted, slots.shape, check.INT32, like=state)


def exports(exports: torch.Tensor, lengths: list[int], state: torch.Tensor) -> None:
    check.tensor("exports", exports, (None, 3), check.INT32, like=state)
    for sequence, done, slot in exports.tolist():
        ok = 0 <= sequence < len(lengths) and 0 <= done <= lengths[sequence] and slot < state.shape[0]
        check.require(ok, "exports", "rows (sequence, 0 to its tokens, slot)", [sequence, done, slot])


def pools(state: torch.Tensor, conv_state: torch.Tensor, *, layers: bool = True) -> None:
    """``layers``: the whole pools of all layers are good, too."""
    check.tensor("state", state, None, check.F32)
    if layers:
        known = "[slots, heads, 128, 128] or the pool of 5 dims"
        check.require(state.ndim in (4, 5), "state", known, f"{state.ndim} dims")
    lead_dims = state.ndim - 2 if layers else 2
    check.tensor("state", state, (*(None,) * lead_dims, DIM, DIM))
    lead = state.shape[: state.ndim - 3]  # [slots] or [slots, layers]
    check.tensor("conv_state", conv_state, (*lead, 3, 3 * state.shape[-3] * DIM), check.ACTIVATION, like=state)
