"""The border between Python and the kernels: torch registration, streams, cupy arrays, graphs, wrong arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from kimi_kernels import _build, attn_res, moe, norm, quant, routing
from kimi_kernels.testing.compare import assert_equal

pytestmark = pytest.mark.gpu


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


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
