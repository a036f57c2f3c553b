"""torch's own check of every registered operation: schema, fake implementation, tracing with symbolic shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

import kimi_kernels
from kimi_kernels import _moe_cuda, kda, meta, routing
from tests.kernels import kda_gpu_cases as kda_cases
from tests.kernels import moe_gpu_cases as moe_cases
from tests.kernels.rows_gpu_cases import bf16

pytestmark = pytest.mark.gpu

for family in kimi_kernels.FAMILIES:
    getattr(kimi_kernels, family)  # importing it registers its operations


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def fp8(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=torch.float8_e4m3fn)


def floats(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


def norm_rms() -> tuple:
    return bf16(5, 256), bf16(256), bf16(5, 256), fp8(5, 256), floats(5, 2), 1e-5


def norm_rms_gated() -> tuple:
    return bf16(5, 256), bf16(5, 256), bf16(128), bf16(5, 256), 1e-5


def attn_res_mix() -> tuple:
    rows, weights = (bf16(5, 256) for _ in range(2)), (bf16(256) for _ in range(3))
    return bf16(2, 5, 256), *rows, *weights, bf16(5, 256), bf16(5, 256), 1e-5


def quant_fp8_per_token_group() -> tuple:
    return bf16(5, 256), fp8(5, 256), floats(5, 2), 128


def quant_mxfp8() -> tuple:
    return bf16(5, 256), fp8(5, 256), zeros(5, 8, dtype=torch.uint8)


def moe_finalize() -> tuple:
    return bf16(5, 256), zeros(5, 4), floats(5, 4), bf16(256), bf16(5, 256), 1e-5


def meta_step() -> tuple:
    step = meta.pack([1], [3], [1], [[1]], [7], num_decodes=1, block_size=16).cuda()
    buffers = meta.buffers(2, 4, 2, "cuda")
    return step, *(getattr(buffers, field.name) for field in fields(buffers)), 16


def routing_topk() -> tuple:
    return floats(5, 8), floats(8), kda_cases.int32(5), zeros(5, 4), floats(5, 4), zeros(9), 1, 1, 1.0


def routing_dispatch() -> tuple:
    work = zeros(8), zeros(9), zeros(20), zeros(8, 3), zeros(1)  # counts, offsets, pairs, tiles, num_tiles
    return zeros(5, 4), None, zeros(9), *work, None, 0, 192


def kda_tokens(heads: int, count: int) -> tuple[torch.Tensor, ...]:
    """q to conv_state of three slots."""
    pool = kda_cases.pools(3, heads)
    states = (x.contiguous() for x in pool.args())
    tokens = (x.contiguous() for x in kda_cases.tokens(count, heads).args())
    return *tokens, *kda_cases.weights(heads).args(), *states


def kda_records(heads: int, run: int) -> torch.Tensor:
    return floats(3, *kda.record_shape(heads, run))


def kda_decode() -> tuple:
    """Slot 1 starts, slot 2 takes one token of its last run first."""
    slots, fresh = kda_cases.int32(1, 2), torch.tensor([True, False], device="cuda")
    rest = fresh, kda_cases.int32(2), kda_records(2, 3), kda_cases.int32(0, 1), bf16(2, 256)
    return *kda_tokens(2, 2), slots, *rest, -5.0, 1e-5


def kda_verify() -> tuple:
    slots, fresh = kda_cases.int32(1, 2), torch.tensor([True, False], device="cuda")
    rest = fresh, kda_cases.int32(5), kda_records(2, 3), kda_cases.int32(0, 1), bf16(5, 256)
    return *kda_tokens(2, 5), slots, kda_cases.int32(0, 2, 5), *rest, -5.0, 1e-5


def kda_commit() -> tuple:
    state, conv_state = kda_tokens(2, 1)[-2:]
    return state, conv_state, kda_records(2, 3), kda_cases.int32(1, 2), kda_cases.int32(3, 1)


def kda_zero() -> tuple:
    return *kda_tokens(2, 1)[-2:], kda_cases.int32(2)


def kda_copy() -> tuple:
    return *kda_tokens(2, 1)[-2:], kda_cases.int32(1), kda_cases.int32(2)


def moe_experts() -> tuple:
    tokens, top_k, width, inner, num_experts = 5, 2, 128, 64, 4
    experts = moe_cases.Experts("mxfp4", num_experts, inner, width)
    ids = moe_cases.uniform(tokens, num_experts, top_k)
    plan = _moe_cuda.plan(tokens, top_k, num_experts, num_experts, width, inner, "mxfp4", "fp8")
    work = routing.dispatch(ids, num_experts, tile_tokens=plan["piece_rows"])
    packed = (w.data for w in experts.packed)
    lists, raw = (work.pairs, work.tiles, work.num_tiles), bf16(tokens * top_k, 2 * inner)
    memory = raw, bf16(tokens, width), zeros(plan["workspace_bytes"], dtype=torch.uint8)
    sizes = inner, 0, num_experts, num_experts, 0
    return (
        *(bf16(tokens, width), ids, floats(tokens, top_k), *packed, bf16(width), *lists, *memory),
        *("mxfp4", "fp8", *sizes, 4.0, 25.0, 1e-5),
    )


CALLS: list[Callable[[], tuple]] = [
    norm_rms,
    norm_rms_gated,
    attn_res_mix,
    quant_fp8_per_token_group,
    quant_mxfp8,
    moe_finalize,
    meta_step,
    routing_topk,
    routing_dispatch,
    kda_decode,
    kda_verify,
    kda_commit,
    kda_zero,
    kda_copy,
    moe_experts,
]


def test_every_registered_operation_is_checked() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("kimi_kernels::")}
    assert {f"kimi_kernels::{call.__name__}" for call in CALLS} == registered


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_opcheck(call: Callable[[], tuple]) -> None:
    op, args = getattr(torch.ops.kimi_kernels, call.__name__).default, call()
    if any(isinstance(a, torch.Tensor) and a.dtype is torch.float8_e4m3fn for a in args):
        # opcheck compares by allclose, which torch does not have for FP8 on CUDA: the schema is checked here by bytes
        torch.library.opcheck(op, args, test_utils=("test_autograd_registration", "test_faketensor"))
        assert_only_writes_what_it_says(op, args)
    elif call is moe_experts:
        # tracing compares two runs by all they wrote, but what fills the workspace up to whole tiles is anything
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, args, test_utils=checks)
        assert_only_writes_what_it_says(op, args)
    else:
        torch.library.opcheck(op, args)


def assert_only_writes_what_it_says(op: torch._ops.OpOverload, args: tuple) -> None:
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    op(*args)
    for argument, old, new in zip(op._schema.arguments, before, args, strict=True):
        if isinstance(new, torch.Tensor) and not (argument.alias_info and argument.alias_info.is_write):
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), f"{argument.name} was changed"
