"""The compiled module. Arrays are torch CUDA tensors or cupy arrays; outputs are written, nothing is returned."""

from typing import Any

Array = Any

def build_info() -> dict[str, Any]: ...
def describe(tensor: Array) -> dict[str, Any]: ...
def attn_res_mix(
    blocks: Array,
    partial: Array,
    delta: Array | None,
    norm_weight: Array,
    proj_weight: Array,
    out_norm_weight: Array,
    partial_out: Array | None,
    x_out: Array,
    eps: float,
) -> None: ...
def moe_finalize(
    rows: Array, row_index: Array, weights: Array, norm_weight: Array | None, out: Array, eps: float
) -> None: ...
def routing_topk(
    logits: Array,
    bias: Array,
    num_tokens: Array | None,
    ids: Array,
    weights: Array,
    counts: Array | None,
    num_groups: int,
    topk_groups: int,
    scale: float,
) -> None: ...
def routing_dispatch_scratch(pairs: int, experts: int) -> int: ...
def routing_dispatch(
    ids: Array,
    num_tokens: Array | None,
    clear: Array | None,
    counts: Array,
    offsets: Array,
    pairs: Array,
    tiles: Array,
    num_tiles: Array,
    scratch: Array | None,
    first: int,
    tile_tokens: int,
) -> None: ...
def meta_step(
    packed: Array,
    token_ids: Array,
    cu_seqlens: Array,
    prefill_cu_seqlens: Array,
    context_lens: Array,
    slots: Array,
    fresh: Array,
    block_table: Array,
    slot_mapping: Array,
    num_tokens: Array,
    block_size: int,
) -> None: ...
def quant_fp8_per_token_group(x: Array, values: Array, scale: Array, group: int) -> None: ...
def quant_mxfp8(x: Array, values: Array, scale: Array) -> None: ...
def norm_rms_gated(x: Array, gate: Array, weight: Array, out: Array, eps: float) -> None: ...
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
def moe_plan(
    tokens: int, top_k: int, experts: int, total_experts: int, width: int, inner: int, format: str, activation: str
) -> dict[str, Any]: ...
def moe_experts(
    x: Array,
    topk_ids: Array | None,
    topk_weights: Array | None,
    w13: Array,
    w2: Array,
    norm_weight: Array | None,
    pairs: Array,
    tiles: Array,
    num_tiles: Array,
    first_product: Array | None,
    out: Array | None,
    workspace: Array,
    format: str,
    activation: str,
    inner: int,
    first: int,
    last: int,
    total_experts: int,
    weight_offset: int,
    beta: float,
    linear_beta: float,
    eps: float,
) -> None: ...
