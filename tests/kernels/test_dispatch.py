"""Where an operation runs, what it says when it cannot, and that importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kimi_kernels
from kimi_kernels import _dispatch, _moe_cuda, _ops
from kimi_kernels.reference.expert_weights import ExpertWeights

ROOT = Path(__file__).resolve().parents[2]


class OnCuda:
    """Stands for a CUDA tensor: dispatch looks at nothing else."""

    is_cpu = False
    is_cuda = True
    device = "cuda:0"


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch):
    def set_to(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv(_dispatch.ENV_NAME, raising=False)
        else:
            monkeypatch.setenv(_dispatch.ENV_NAME, value)
        _dispatch.reference_operations.cache_clear()

    yield set_to
    monkeypatch.undo()
    _dispatch.reference_operations.cache_clear()


def test_cpu_tensor_runs_the_reference_whatever_the_switch(switch) -> None:
    switch(None)
    assert _dispatch.use_reference("moe.experts", torch.empty(0))
    switch("kda.decode_")
    assert _dispatch.use_reference("moe.experts", torch.empty(0))


def test_switch_names_single_operations_or_all(switch) -> None:
    switch(None)
    assert not _dispatch.use_reference("moe.experts", OnCuda())
    switch("moe.experts, kda.decode_")
    assert _dispatch.use_reference("moe.experts", OnCuda())
    assert _dispatch.use_reference("kda.decode_", OnCuda())
    assert not _dispatch.use_reference("mla.decode", OnCuda())
    switch("1")
    assert kimi_kernels.reference_operations() == _dispatch.OPERATIONS
    assert all(_dispatch.use_reference(name, OnCuda()) for name in _dispatch.OPERATIONS)


def test_unknown_operation_in_the_switch_is_an_error(switch) -> None:
    switch("moe.expert")
    with pytest.raises(ValueError, match=r"KIMI_KERNELS_REFERENCE.*moe\.experts.*unknown moe\.expert$"):
        kimi_kernels.reference_operations()


@pytest.mark.parametrize(
    ("value", "got"), [([1.0], "list"), (None, "NoneType"), (torch.empty(2, 2, device="meta"), "a tensor on meta")]
)
def test_no_tensor_is_an_error(value: object, got: str) -> None:
    with pytest.raises(TypeError, match=f"^norm.rms: expected a torch tensor on the CPU or CUDA.*, got {got}$"):
        kimi_kernels.norm.rms(value, torch.ones(2))


def test_missing_kernel_says_what_to_do() -> None:
    error = _dispatch.no_kernel("mla.decode", OnCuda())
    assert isinstance(error, kimi_kernels.KernelUnavailableError)
    assert "mla.decode" in str(error)
    assert "cuda:0" in str(error)
    assert "KIMI_KERNELS_REFERENCE=mla.decode" in str(error)


class CudaArray(OnCuda):
    """A CUDA tensor's shape, for the checks that come before anything is allocated."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.routing.topk(CudaArray(8), None, 2), r"logits: expected 2 dims, got shape \[8\]"),
        (lambda k: k.routing.topk(CudaArray(3, 8), None, -1), "k: expected at least 1, got -1"),
        (lambda k: k.routing.dispatch(CudaArray(8), 8), r"ids: expected 2 dims, got shape \[8\]"),
        (lambda k: k.routing.dispatch(CudaArray(3, 2), 2000), "num_experts: expected 1 to 1024, got 2000"),
        (lambda k: k.norm.rms_fp8(CudaArray(128), None), r"x: expected 2 dims, got shape \[128\]"),
        (lambda k: k.quant.fp8_per_token_group(CudaArray()), r"x: expected 2 dims, got shape \[\]"),
        (lambda k: k.quant.fp8_per_token_group(CudaArray(2, 128), group=0), "group: expected a multiple of 32, got 0"),
        (lambda k: k.quant.mxfp8(CudaArray(1, 2, 32)), r"x: expected 2 dims, got shape \[1, 2, 32\]"),
        (lambda k: k.moe.finalize(CudaArray(64), CudaArray(2, 2), None, None), r"rows: expected 2 dims"),
        (lambda k: k.moe.finalize(CudaArray(4, 64), CudaArray(2), None, None), r"row_index: expected 2 dims"),
        (lambda k: k.moe.experts(CudaArray(64), CudaArray(1, 2), None, None, None), r"x: expected 2 dims"),
        (lambda k: k.moe.experts(CudaArray(1, 64), CudaArray(2), None, None, None), r"topk_ids: expected 2 dims"),
    ],
)
def test_shapes_that_size_the_outputs_are_checked_before_a_kernel_is_called(switch, call, message: str) -> None:
    switch(None)
    with pytest.raises(ValueError, match=f"^{message}"):
        call(kimi_kernels)


def test_every_operation_of_the_switch_is_a_public_function() -> None:
    for name in _dispatch.OPERATIONS:
        family, operation = name.split(".")
        function = getattr(getattr(kimi_kernels, family), operation)
        assert function.__doc__, f"{name} has no docstring"


def test_import_touches_neither_cuda_nor_the_compiled_module() -> None:
    code = (
        "import sys, kimi_kernels; assert 'kimi_kernels.moe' not in sys.modules; "
        "import kimi_kernels.kda, kimi_kernels.moe, kimi_kernels.mla, kimi_kernels.norm, torch; "
        "assert not torch.cuda.is_initialized(); assert 'kimi_kernels._C' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def sm90_weights(cols: int = 64, layout: str = "sm90") -> tuple[ExpertWeights, ExpertWeights]:
    """Two experts of width 64 and inner width 32 by their numbers; no byte of them is looked at here."""
    data = torch.zeros(2, 128, dtype=torch.uint8)
    return (
        ExpertWeights("mxfp4", layout, data, None, 2, 64, cols),
        ExpertWeights("mxfp4", layout, data, None, 2, cols, 32),
    )


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (sm90_weights(96), ValueError, r"w13: expected 64 columns \(x has 64\), got 96"),
        (sm90_weights(layout="plain"), ValueError, "w13: expected layout \"sm90\", got 'plain'"),
        ((None, None), TypeError, "w13: expected ExpertWeights from a pack function, got NoneType"),
    ],
)
@pytest.mark.parametrize("tokens", [0, 3])
def test_packed_weights_are_checked_before_anything_runs(switch, weights, error, message: str, tokens: int) -> None:
    switch(None)
    with pytest.raises(error, match=f"^{message}"):
        kimi_kernels.moe.experts(CudaArray(tokens, 64), CudaArray(tokens, 2), None, *weights)


def test_without_tokens_the_compiled_checks_see_every_argument(switch, monkeypatch: pytest.MonkeyPatch) -> None:
    switch(None)
    calls = []
    monkeypatch.setattr(_ops, "call", lambda name, *args: calls.append((name, args)))
    monkeypatch.setattr(_ops, "empty", lambda shape, dtype, like: CudaArray(*shape))
    numbers = {"piece_rows": 8, "workspace_bytes": 512, "rows": 0}
    monkeypatch.setattr(_moe_cuda, "plan", lambda *shape: {"shape": shape} | numbers)
    monkeypatch.setattr(_ops, "module", lambda: SimpleNamespace(routing_dispatch_scratch=lambda pairs, experts: 0))
    x, ids, out, norm = CudaArray(0, 64), CudaArray(0, 2), CudaArray(0, 64), CudaArray(64)
    ids.dtype = torch.int32
    w13, w2 = sm90_weights()
    got = kimi_kernels.moe.experts(x, ids, topk_weights := CudaArray(0, 2), w13, w2, norm_weight=norm, out=out)
    assert got is out
    assert [name for name, _ in calls] == ["routing_dispatch", "moe_experts"]
    args = calls[1][1]
    assert args[:6] == (x, ids, topk_weights, w13.data, w2.data, norm)
    assert args[10] is out
    assert args[11].shape == (512,)
