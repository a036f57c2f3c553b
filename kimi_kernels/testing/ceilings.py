"""What this card reaches, measured: memory rates, matrix rates, the cost of a graph node.

A floor is counted against these, never against a datasheet. Rates of memory count bytes read plus bytes written.
With Triton installed (it comes with a CUDA build of torch) its kernels compete with torch's own; the best counts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from kimi_kernels.testing.timing import Call, GraphTimer

HAVE_TRITON = importlib.util.find_spec("triton") is not None
if HAVE_TRITON:
    import triton
    import triton.language as tl
    # A thread that loads and stores does best with ONE 16-byte access and many warps; a thread that only loads wants
    # several in flight. Hence two kernels with the tile as a parameter, and a sweep.

    @triton.jit
    def _add_one(source, target, TILE: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(target + index, tl.load(source + index) + 1)

    @triton.jit
    def _fold(source, sums, TILE: tl.constexpr, TILES: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * (TILE * TILES) + tl.arange(0, TILE)
        total = tl.load(source + index)
        for i in tl.static_range(1, TILES):
            total += tl.load(source + index + i * TILE)
        tl.store(sums + tl.program_id(0), tl.sum(total, 0))

    @triton.jit
    def _empty(pointer):
        pass


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """read, copy, update in GB/s (`update`: read and written in place, as a recurrent state is); bf16, fp8 in dense
    TFLOP/s of a lasting 8192^3 product; node_us: an empty kernel in a graph."""

    read: float
    copy: float
    update: float
    bf16: float
    fp8: float
    node_us: float

    def floor_us(
        self, read_bytes: float, write_bytes: float, *, in_place: bool = False, flops: float = 0.0, matmul: str = "fp8"
    ) -> float:
        """The shortest time in us this card could need: the larger of the memory term and the arithmetic term.

        The balanced part of the traffic (as many bytes written as read) is held against the copy or the in-place
        rate, the rest against the read rate. `matmul` names the matrix rate: "bf16" or "fp8".
        """
        if matmul not in ("bf16", "fp8"):
            raise ValueError(f"matmul: expected 'bf16' or 'fp8', got {matmul!r}")
        balanced = min(read_bytes, write_bytes)
        rest = max(read_bytes, write_bytes) - balanced
        memory = 2 * balanced / (self.update if in_place else self.copy) + rest / self.read
        return max(memory / 1e3, flops / getattr(self, matmul) / 1e6)


def memory_trials(n: int) -> Iterator[tuple[str, str, Call, int]]:
    """(kind, what, call, bytes moved) of every candidate over arrays of n int32."""
    a = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    yield "copy", "torch add into another array", functools.partial(torch.add, a, 1, out=b), 8 * n
    yield "update", "torch add_ in place", functools.partial(a.add_, 1), 8 * n
    floats = a.view(torch.float32)[: n // 4096 * 4096].view(-1, 4096).nan_to_num_(1.0, 1.0, 1.0)
    sums = torch.empty(len(floats), device="cuda")
    yield "read", "torch row sums", functools.partial(torch.sum, floats, 1, out=sums), 4 * floats.numel()
    if not HAVE_TRITON:
        return
    folded = torch.empty(n // 4096, dtype=torch.int32, device="cuda")
    for tile, tiles, warps in ((4096, 16, 8), (8192, 8, 8), (4096, 16, 4), (2048, 16, 4)):
        launch: Any = _fold[(n // (tile * tiles),)]
        call = functools.partial(launch, a, folded, tile, tiles, num_warps=warps)
        yield "read", f"{tiles} tiles of {tile}, {warps} warps", call, 4 * n
    for kind, target in (("copy", b), ("update", a)):
        for tile, warps in ((1024, 8), (2048, 16), (2048, 8)):
            call = functools.partial(_add_one[(n // tile,)], a, target, tile, num_warps=warps)
            yield kind, f"tile {tile}, {warps} warps", call, 8 * n


def matmul_rate(fp8: bool, n: int = 8192, seconds: float = 0.6) -> float:
    """TFLOP/s of an n^3 product on random data after `seconds` of the same load (a burst after idle runs faster)."""
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    call: Call = functools.partial(torch.matmul, a, b)
    if fp8:
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device="cuda")
        call = functools.partial(
            torch._scaled_mm, a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    timer = GraphTimer([call], replay_us=20000)
    timer.warm_up(seconds)
    return 2 * n**3 / timer.run(seconds=0.2) / 1e6


def node_us() -> float:
    """Time of a graph node that does nothing (without Triton: of the smallest torch kernel)."""
    one = torch.zeros(1, device="cuda")
    call: Call = functools.partial(_empty[(1,)], one) if HAVE_TRITON else one.zero_
    return GraphTimer([call]).run()


def measure_ceilings(gib: float = 2.0, *, verbose: bool = False) -> Ceilings:
    """All ceilings of the current device, in about five seconds; two arrays of `gib` GiB are allocated meanwhile."""
    best = {"read": 0.0, "copy": 0.0, "update": 0.0}
    for kind, what, call, moved in memory_trials(int(gib * 2**28)):
        rate = moved / GraphTimer([call], replay_us=4000).run() / 1e3
        best[kind] = max(best[kind], rate)
        if verbose:
            print(f"  {kind:6} {rate:7.0f} GB/s  {what}", flush=True)
    torch.cuda.empty_cache()
    return Ceilings(**best, bf16=matmul_rate(False), fp8=matmul_rate(True), node_us=node_us())
