"""The border between Python and the kernels: torch registration, streams, cupy arrays, graphs, wrong arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import fields

import pytest
import torch

from kimi_kernels import _build, attn_res, meta, moe, norm, quant, routing
from kimi_kernels.testing.compare import assert_equal

pytestmark = pytest.mark.gpu


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def calls() -> list[tuple[str, tuple]]:
    """One valid call, with every argument, of each registered operation but those of KDA and the experts."""
    i32 = {"dtype": torch.int32, "device": "cuda"}
    x, weight = bf16(5, 256), bf16(256)
    fp8, scale = torch.empty(5, 256, device="cuda", dtype=torch.float8_e4m3fn), torch.empty(5, 2, device="cuda")
    ids, weights = torch.zeros(5, 4, **i32), torch.rand(5, 4, device="cuda")
    step = meta.pack([1], [3], [1], [[1]], [7], num_decodes=1, block_size=16).cuda()
    buffers = meta.buffers(2, 4, 2, "cuda")
    return [
        ("norm_rms", (x, weight, torch.empty_like(x), fp8, scale, 1e-5)),
        ("norm_rms_gated", (x, x.clone(), bf16(128), torch.empty_like(x), 1e-5)),
        ("attn_res_mix", (bf16(2, 5, 256), x, x.clone(), weight, weight, weight, x.clone(), x.clone(), 1e-5)),
        ("quant_fp8_per_token_group", (x, fp8, scale, 128)),
        ("quant_mxfp8", (x, fp8, torch.empty(5, 8, device="cuda", dtype=torch.uint8))),
        ("moe_finalize", (x, ids, weights, weight, torch.empty_like(x), 1e-5)),
        ("meta_step", (step, *(getattr(buffers, field.name) for field in fields(buffers)), 16)),
        (
            "routing_topk",
            (
                torch.randn(5, 8, device="cuda"),
                torch.zeros(8, device="cuda"),
                torch.full((1,), 5, **i32),
                ids.clone(),
                weights.clone(),
                torch.zeros(9, **i32),
                1,
                1,
                1.0,
            ),
        ),
        (
            "routing_dispatch",
            (
                ids,
                None,
                torch.zeros(9, **i32),
                torch.zeros(8, **i32),
                torch.zeros(9, **i32),
                torch.zeros(20, **i32),
                torch.zeros(8, 3, **i32),
                torch.zeros(1, **i32),
                None,
                0,
                192,
            ),
        ),
    ]


@pytest.mark.parametrize(
    ("name", "args"), calls() if torch.cuda.is_available() else [], ids=lambda v: v if isinstance(v, str) else ""
)
def test_opcheck(name: str, args: tuple) -> None:
    op = getattr(torch.ops.kimi_kernels, name).default
    if not any(isinstance(a, torch.Tensor) and a.dtype is torch.float8_e4m3fn for a in args):
        torch.library.opcheck(op, args)
        return
    # opcheck compares by allclose, which torch does not have for FP8 on CUDA: the schema is checked here by bytes
    torch.library.opcheck(op, args, test_utils=("test_autograd_registration", "test_faketensor"))
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    op(*args)
    for argument, old, new in zip(op._schema.arguments, before, args, strict=True):
        if isinstance(new, torch.Tensor) and not (argument.alias_info and argument.alias_info.is_write):
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), f"{argument.name} was changed"


def test_launches_go_to_the_current_stream() -> None:
    x, weight = bf16(4096, 7168), bf16(7168)
    want = norm.rms(x, weight)
    source = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        source.copy_(x)
        got = norm.rms(source, weight)
    stream.synchronize()
    assert_equal("out", got, want)


def test_a_chain_in_a_graph_repeats_bit_by_bit() -> None:
    """mix -> topk -> dispatch -> finalise with dependent launches: 1,000 replays, all the same bits."""
    chain = Chain()
    chain.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain.run()
    graph.replay()
    first = [t.clone() for t in out]
    for _ in range(1000):
        graph.replay()
    for name, a, b in zip(["x", "ids", "weights", "pairs", "sum"], out, first, strict=True):
        assert_equal(name, a, b)


class Chain:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.blocks, self.partial, self.delta = bf16(8, 24, 7168), bf16(24, 7168), bf16(24, 7168)
        self.weights = (bf16(7168), bf16(7168) * 0.05, bf16(7168))
        self.bias = torch.randn(896, device="cuda") * 0.1
        self.latent_norm = bf16(3584)
        self.counts = torch.zeros(897, dtype=torch.int32, device="cuda")

    def run(self) -> list[torch.Tensor]:
        _, x = attn_res.mix(self.blocks, self.partial, self.delta, *self.weights)
        logits = x[:, :896].float()
        ids, weights = routing.topk(logits, self.bias, 16, counts=self.counts)
        work = routing.dispatch(ids, 896, counts=self.counts)
        rows = norm.rms(x.view(48, 3584), self.latent_norm)
        total = moe.finalize(rows, ids % 48, weights, self.latent_norm)
        return [x, ids, weights, work.pairs, total]


def chain_digest() -> str:
    chain = Chain()
    out = chain.run()
    for _ in range(50):
        out = chain.run()
    return " ".join(str(t.double().sum().item()) + f"/{t.view(torch.uint8).long().sum().item()}" for t in out)


@pytest.mark.slow
def test_results_do_not_depend_on_dependent_launch() -> None:
    """With the last block of every kernel 50 us late and dependent launch on: the bits of a run with it off."""
    code = "from tests.kernels.test_binding_gpu import chain_digest; print(chain_digest())"
    digests = []
    for env in ({"KIMI_KERNELS_PDL": "0"}, {"KIMI_KERNELS_NVCC_FLAGS": "-DKIMI_PDL_DELAY_NS=50000"}):
        run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        digests.append(run.stdout.strip())
    assert digests[0] == digests[1]


def test_cupy_arrays_in_and_out() -> None:
    cupy = pytest.importorskip("cupy")
    x, weight = bf16(7, 512), bf16(512)
    bits = cupy.from_dlpack(x.view(torch.int16)).view(cupy.uint16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        torch.cuda.synchronize()
        got = norm.rms(bits, cupy.from_dlpack(weight.view(torch.int16)).view(cupy.uint16))
        values, scale = quant.fp8_per_token_group(bits)
        logits = cupy.random.standard_normal((9, 896), dtype=cupy.float32)
        ids, weights = routing.topk(logits, cupy.zeros(896, cupy.float32), 16)
        work = routing.dispatch(ids, 896)
        stream.synchronize()
    assert isinstance(got, cupy.ndarray)
    assert_equal("rms", torch.from_dlpack(got.view(cupy.int16)).view(torch.bfloat16), norm.rms(x, weight))
    want_values, want_scale = quant.fp8_per_token_group(x)
    assert_equal("values", torch.from_dlpack(values), want_values.view(torch.uint8))
    assert_equal("scale", torch.from_dlpack(scale), want_scale)
    want_ids, want_weights = routing.topk(torch.from_dlpack(logits), torch.zeros(896, device="cuda"), 16)
    assert_equal("ids", torch.from_dlpack(ids), want_ids)
    assert_equal("weights", torch.from_dlpack(weights), want_weights)
    assert_equal("pairs", torch.from_dlpack(work.pairs), routing.dispatch(want_ids, 896).pairs)


def test_wrong_arguments_raise() -> None:
    x, weight = bf16(4, 256), bf16(256)
    for match, call in (
        ("weight: expected shape", lambda: norm.rms(x, weight[:5])),
        ("x: expected dtype bfloat16, got float16", lambda: norm.rms(x.half(), weight)),
        ("out: expected shape", lambda: norm.rms(x, weight, out=x[:2])),
        ("multiples of 16 bytes", lambda: norm.rms(bf16(4, 260)[:, 1:257], weight)),
        ("x: expected its last 1 dimension", lambda: norm.rms(bf16(256, 4).t(), weight)),
        ("weight: expected a CUDA device", lambda: norm.rms(x, weight.cpu())),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_a_call_costs_little() -> None:
    """Under 8 us for eight tensors, registration included; twice that is allowed for a busy machine."""
    blocks, x, w = bf16(2, 1, 256), bf16(1, 256), bf16(256)
    args = (blocks, x, x.clone(), w, w, w, x.clone(), x.clone(), 1e-5)
    op = torch.ops.kimi_kernels.attn_res_mix.default
    for _ in range(200):
        op(*args)
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            op(*args)
        times.append((time.perf_counter() - start) / 50)
        torch.cuda.synchronize()
    best = min(times) * 1e6
    print(f"attn_res.mix call: {best:.1f} us")
    assert best < 16


def test_build_info_names_the_device_arch() -> None:
    info = _build.load().build_info()
    major, minor = torch.cuda.get_device_capability()
    assert f"sm_{major}{minor}" in str(info["archs"])
