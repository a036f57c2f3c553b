"""The compiled module. Arrays are torch CUDA tensors or cupy arrays; outputs are written, nothing is returned."""

from typing import Any

Array = Any

def build_info() -> dict[str, Any]: ...
def describe(tensor: Array) -> dict[str, Any]: ...
def norm_rms(x: Array, weight: Array, out: Array | None, q: Array | None, scale: Array | None, eps: float) -> None: ...
def kda_decode(
    q: Array,
    k: Array,
    v: Array,
    f: Array,
    beta: Array,
    gate: Array,
    conv_weight: Array,
    a_log: Array,
    dt_bias: Array,
    o_norm: Array,
    state: Array,
    conv_state: Array,
    slots: Array,
    fresh: Array | None,
    num_tokens: Array | None,
    records: Array | None,
    accepted: Array | None,
    out: Array,
    lower_bound: float,
    eps: float,
) -> None: ...
def kda_verify(
    q: Array,
    k: Array,
    v: Array,
    f: Array,
    beta: Array,
    gate: Array,
    conv_weight: Array,
    a_log: Array,
    dt_bias: Array,
    o_norm: Array,
    state: Array,
    conv_state: Array,
    slots: Array,
    cu_seqlens: Array,
    fresh: Array | None,
    num_tokens: Array | None,
    records: Array,
    accepted: Array | None,
    out: Array,
    lower_bound: float,
    eps: float,
) -> None: ...
def kda_commit(state: Array, conv_state: Array, records: Array, slots: Array, accepted: Array) -> None: ...
def kda_zero(state: Array, conv_state: Array, slots: Array) -> None: ...
def kda_copy(state: Array, conv_state: Array, src: Array, dst: Array) -> None: ...
