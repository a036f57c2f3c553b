"""What the compiled module says about wrong arguments, without a GPU: the checks end before a launch.

Only where the module was built ahead of time (``make kernels``); building it here would take minutes.
"""

from __future__ import annotations

import pytest

from kimi_kernels import _build, _moe_cuda, kda, moe
from kimi_kernels import _moe_sm90 as sm90
from kimi_kernels.reference.expert_weights import ExpertWeights
from kimi_kernels.routing import Dispatch
from tests.kernels.fake_cuda import FakeCuda

pytestmark = pytest.mark.skipif(
    _build.prebuilt_path() is None, reason="the compiled module was not built (make kernels)"
)

STATE, CONV = (5, 2, 128, 128), (5, 3, 768)
POOL_STATE, POOL_CONV = (5, 4, 2, 128, 128), (5, 4, 3, 768)


def state(*shape: int, dtype: str = "float32", **options) -> FakeCuda:
    return FakeCuda(*shape, dtype=dtype, **options)


def conv(*shape: int, dtype: str = "bfloat16", **options) -> FakeCuda:
    return FakeCuda(*shape, dtype=dtype, **options)


def slots(count: int = 0, dtype: str = "int32", **options) -> FakeCuda:
    return FakeCuda(count, dtype=dtype, **options)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ((state(5, 2, 128, 64), conv(*CONV)), r"state: expected shape \[any, any, 128, 128\], got \[5, 2, 128, 64\]"),
        ((state(5, 4, 2, 64, 128), conv(*POOL_CONV)), r"state: expected shape \[any, any, any, 128, 128\], got"),
        ((state(5, 128, 128), conv(*CONV)), r"state: expected \[slots, heads, 128, 128\] or the pool .*, got 3 dims"),
        ((state(*STATE), conv(5, 3, 767)), r"conv_state: expected shape \[5, 3, 768\], got \[5, 3, 767\]"),
        ((state(*STATE), conv(5, 4, 768)), r"conv_state: expected shape \[5, 3, 768\], got \[5, 4, 768\]"),
        ((state(*STATE), conv(4, 3, 768)), r"conv_state: expected shape \[5, 3, 768\], got \[4, 3, 768\]"),
        ((state(*STATE), conv(*POOL_CONV)), r"conv_state: expected shape \[5, 3, 768\], got \[5, 4, 3, 768\]"),
        (
            (state(*POOL_STATE), conv(5, 3, 3, 768)),
            r"conv_state: expected shape \[5, 4, 3, 768\], got \[5, 3, 3, 768\]",
        ),
        ((state(*STATE, dtype="bfloat16"), conv(*CONV)), "state: expected dtype float32, got bfloat16"),
        ((state(*STATE), conv(*CONV, dtype="float32")), "conv_state: expected dtype bfloat16, got float32"),
        ((state(*STATE), conv(*CONV, device=1)), "conv_state: expected device cuda:0, .*, got cuda:1"),
        (
            (state(*STATE, strides=(32768, 16384, 1, 128)), conv(*CONV)),
            r"state: expected its last 3 dimension\(s\) contiguous",
        ),
    ],
)
def test_zero_and_copy_name_the_pool_at_fault(pools: tuple[FakeCuda, FakeCuda], message: str) -> None:
    with pytest.raises(ValueError, match=f"^kda.zero_: {message}"):
        kda.zero_(*pools, slots())
    with pytest.raises(ValueError, match=f"^kda.copy_: {message}"):
        kda.copy_(*pools, slots(), slots())


def test_zero_and_copy_name_the_slots_at_fault() -> None:
    pools = state(*STATE), conv(*CONV)
    with pytest.raises(ValueError, match=r"^kda\.zero_: slots: expected dtype int32, got int64"):
        kda.zero_(*pools, slots(dtype="int64"))
    with pytest.raises(ValueError, match=r"^kda\.zero_: slots: expected device cuda:0, .*, got cuda:1"):
        kda.zero_(*pools, slots(device=1))
    with pytest.raises(ValueError, match=r"^kda\.copy_: dst: expected shape \[2\], got \[3\]"):
        kda.copy_(*pools, slots(2), slots(3))


@pytest.mark.parametrize(
    "pools",
    [
        (state(*STATE), conv(*CONV)),
        (state(*POOL_STATE), conv(*POOL_CONV)),
        (state(*STATE, strides=(131072, 16384, 128, 1)), conv(*CONV, strides=(9216, 768, 1))),  # a layer of a pool
    ],
)
def test_nothing_to_do_is_no_launch(pools: tuple[FakeCuda, FakeCuda]) -> None:
    kda.zero_(*pools, slots())
    kda.copy_(*pools, slots(), slots())


def test_pools_without_heads_are_no_launch() -> None:
    pools = state(5, 0, 128, 128), conv(5, 3, 0)
    kda.zero_(*pools, slots(2))
    kda.copy_(*pools, slots(2), slots(2))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (state(5, 3, 2, 6, 128), r"records: expected shape \[5, 2, 6, any, 128\], got \[5, 3, 2, 6, 128\]"),  # by token
        (state(4, 2, 6, 3, 128), r"records: expected shape \[5, 2, 6, any, 128\], got \[4, 2, 6, 3, 128\]"),
        (state(5, 2, 6, 10, 128), r"records must hold runs of 1 to 9 tokens, got 10"),
        (state(5, 2, 6, 3, 128, dtype="bfloat16"), "records: expected dtype float32, got bfloat16"),
        (
            state(5, 2, 6, 3, 128, strides=(9216, 4608, 768, 256, 1)),
            r"records: expected its last 4 dimension\(s\) contiguous",
        ),
        (state(5, 2, 6, 3, 128, strides=(4610, 2304, 384, 128, 1)), "records: expected .*16"),  # slots at 8 bytes
    ],
)
def test_commit_names_the_records_at_fault(records: FakeCuda, message: str) -> None:
    with pytest.raises(ValueError, match=f"^kda.commit_: {message}"):
        kda.commit_(records, state(*STATE), conv(*CONV), slots(), slots())


def test_commit_of_nothing_is_no_launch() -> None:
    """Records are a layer of a slot-major pool."""
    records = state(5, 2, 6, 3, 128, strides=(9216, 2304, 384, 128, 1))
    kda.commit_(records, state(*STATE), conv(*CONV), slots(), slots())


def experts(tokens: int = 0, **changed) -> object:
    """moe.experts on two experts 64 -> 32 with all outputs given, so that nothing is allocated."""
    bytes_of = {"w13": sm90.expert_bytes("mxfp4", 64, 64, 2), "w2": sm90.expert_bytes("mxfp4", 64, 32, 1)}
    data = {name: changed.pop(name, FakeCuda(2, count, dtype="uint8")) for name, count in bytes_of.items()}
    pairs = FakeCuda(2 * tokens, dtype="int32")
    lists = (FakeCuda(2, dtype="int32"), FakeCuda(3, dtype="int32"), pairs, FakeCuda(2 * tokens, 3, dtype="int32"))
    needed = _moe_cuda.plan(tokens, 2, 2, 2, 64, 32, "mxfp4", "fp8")["workspace_bytes"]
    arguments = {
        "x": FakeCuda(tokens, 64, dtype="bfloat16"),
        "topk_ids": FakeCuda(tokens, 2, dtype="int32"),
        "topk_weights": FakeCuda(tokens, 2),
        "w13": ExpertWeights("mxfp4", "sm90", data["w13"], None, 2, 64, 64),
        "w2": ExpertWeights("mxfp4", "sm90", data["w2"], None, 2, 64, 32),
        "dispatch": Dispatch(*lists, FakeCuda(1, dtype="int32"), expert_range=(0, 2)),
        "out": FakeCuda(tokens, 64, dtype="bfloat16"),
        "workspace": FakeCuda(needed, dtype="uint8"),
    }
    return moe.experts(**{**arguments, **changed})


def test_experts_without_tokens_pass_the_checks_and_launch_nothing() -> None:
    out = FakeCuda(0, 64, dtype="bfloat16")
    assert experts(out=out) is out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": FakeCuda(1, 64, dtype="bfloat16")}, r"out: expected shape \[0, 64\], got \[1, 64\]"),
        ({"out": FakeCuda(0, 64)}, "out: expected dtype bfloat16, got float32"),
        ({"out": FakeCuda(0, 64, dtype="bfloat16", device=1)}, "out: expected device cuda:0, .*, got cuda:1"),
        ({"x": FakeCuda(0, 64)}, "x: expected dtype bfloat16, got float32"),
        ({"topk_ids": FakeCuda(0, 2, dtype="int64")}, "topk_ids: expected dtype int32, got int64"),
        ({"topk_weights": FakeCuda(0, 3)}, r"topk_weights: expected shape \[0, 2\], got \[0, 3\]"),
        ({"w13": FakeCuda(2, 128, dtype="uint8")}, r"w13: expected shape \[any, \d+\], got \[2, 128\]"),
        ({"w2": FakeCuda(2, 128, dtype="uint8")}, r"w2: expected shape \[2, \d+\], got \[2, 128\]"),
        ({"w13": FakeCuda(2, 100)}, "w13: expected dtype uint8, got float32"),
        ({"norm_weight": FakeCuda(32)}, r"norm_weight: expected shape \[64\], got \[32\]"),
    ],
)
def test_experts_without_tokens_name_the_argument_at_fault(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^moe.experts: {message}"):
        experts(**changed)
