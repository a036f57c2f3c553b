"""A chain of KDA kernels in which each reads what the one before wrote, replayed from a graph; prints a hash of it all.

Run by test_pdl_gpu.py in processes of their own, because the switches are read once: programmatic dependent launch
on or off, and kernels compiled with late last blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from kimi_kernels import kda
from tests.kernels.kda_gpu_cases import Tokens, decode, int32, pools, tokens, verify, weights


def chain_hash(heads: int, rows: int, replays: int) -> str:
    torch.manual_seed(9)
    w, pool = weights(heads), pools(3 * rows + 1, heads)
    x = [tokens(rows, heads) for _ in range(5)]
    runs = [tokens(3 * rows, heads, padding) for padding in (-heads % 8, 7)]
    first, second, third = (int32(*range(1 + i * rows, 1 + (i + 1) * rows)) for i in range(3))
    borders, accepted = int32(*range(0, 3 * rows + 1, 3)), int32(*(i % 4 for i in range(rows)))
    records = torch.zeros(3 * rows + 1, *kda.record_shape(heads, 3), device="cuda")

    def after(tokens_: Tokens, out: torch.Tensor) -> Tokens:
        return replace(tokens_, v=out)  # the values of the next kernel are the output of the last

    def chain() -> list[torch.Tensor]:
        one = decode(x[0], w, pool, first)
        kda.copy_(*pool.args(), first, second)
        two = decode(after(x[1], one), w, pool, second)
        run, _ = verify(replace(runs[0], v=two.repeat(3, 1)), w, pool, first, borders, records=records)
        three = decode(after(x[2], two), w, pool, first, records=records, accepted=accepted)
        run_two, _ = verify(replace(runs[1], v=run), w, pool, second, borders, records=records)
        kda.commit_(records, *pool.args(), second, accepted)
        kda.zero_(*pool.args(), third)
        four = decode(after(x[3], three), w, pool, third)
        five = decode(after(x[4], four), w, pool, second)
        return [one, two, three, four, five, run, run_two]

    chain()  # builds and loads outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    digest = hashlib.sha256()
    for tensor in (*outs, pool.states, pool.convs, records):
        assert tensor.isfinite().all()
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    # Decode in blocks of all four kinds, verify in half and in whole heads.
    small = [chain_hash(heads=12, rows=rows, replays=1000) for rows in (5, 6, 16)]
    print(*small, chain_hash(heads=96, rows=5, replays=1000), chain_hash(heads=96, rows=22, replays=100))
