"""The step's metadata against a plain loop over the sequences; on the CPU and, marked gpu, by the kernel."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

from kimi_kernels import meta
from kimi_kernels.testing.compare import assert_equal

BLOCK = 16


def poisoned(shape: tuple[int, int, int], device: str) -> meta.StepBuffers:
    out = meta.buffers(*shape, device)
    for field in fields(out):
        getattr(out, field.name).fill_(-7)
    return out


def a_step(decodes: int, prefills: int, seed: int) -> dict:
    rng = random.Random(seed)
    new = [1] * decodes + [rng.choice([1, 2, 15, 16, 17, 33]) for _ in range(prefills)]
    done = [rng.randrange(1, 90) for _ in range(decodes)] + [rng.choice([0, 0, 1, 31, 32]) for _ in range(prefills)]
    tables = [
        [rng.randrange(1, 1000) for _ in range(-(-(a + b) // BLOCK) + rng.randrange(2))]
        for a, b in zip(new, done, strict=True)
    ]
    return {
        "new_tokens": new,
        "num_computed": done,
        "slots": [rng.randrange(1, 50) for _ in new],
        "block_tables": tables,
        "token_ids": [rng.randrange(163840) for _ in range(sum(new))],
        "num_decodes": decodes,
        "block_size": BLOCK,
    }


def expected(s: dict, shape: tuple[int, int, int]) -> dict[str, list]:
    """By the definition, sequence by sequence and token by token."""
    max_seqs, max_tokens, max_blocks = shape
    cu, mapping = [0], []
    for new, done, table in zip(s["new_tokens"], s["num_computed"], s["block_tables"], strict=True):
        cu.append(cu[-1] + new)
        mapping += [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(done, done + new)]
    prefill = [c - cu[s["num_decodes"]] for c in cu[s["num_decodes"] :]]
    rows = [t + [0] * (max_blocks - len(t)) for t in s["block_tables"]]

    def pad(values: list, size: int, fill: object) -> list:
        return values + [fill] * (size - len(values))

    return {
        "token_ids": pad(s["token_ids"], max_tokens, 0),
        "cu_seqlens": pad(cu, max_seqs + 1, cu[-1]),
        "prefill_cu_seqlens": pad(prefill, max_seqs + 1, prefill[-1]),
        "context_lens": pad([a + b for a, b in zip(s["new_tokens"], s["num_computed"], strict=True)], max_seqs, 0),
        "slots": pad(s["slots"], max_seqs, 0),
        "fresh": pad([done == 0 for done in s["num_computed"]], max_seqs, False),
        "block_table": pad(rows, max_seqs, [0] * max_blocks),
        "slot_mapping": pad(mapping, max_tokens, -1),
        "num_tokens": [cu[-1]],
    }


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("decodes", "prefills"), [(0, 0), (1, 0), (0, 1), (7, 0), (0, 5), (9, 4), (200, 3)])
def test_a_step(device: str, decodes: int, prefills: int) -> None:
    s = a_step(decodes, prefills, seed=decodes + prefills)
    for shape in ((decodes + prefills, sum(s["new_tokens"]), 8), (256, 512, 9)):
        out = meta.step(meta.pack(**s).to(device), poisoned(shape, device), block_size=BLOCK)
        for name, values in expected(s, shape).items():
            buffer = getattr(out, name)
            assert_equal(name, buffer, torch.tensor(values, dtype=buffer.dtype, device=device).view(buffer.shape))


@pytest.mark.parametrize("device", DEVICES)
def test_seventy_thousand_sequences_of_one_token(device: str) -> None:
    n = 70_000
    s = {"new_tokens": [1] * n, "num_computed": [0] * n, "slots": list(range(1, n + 1)), "token_ids": list(range(n))}
    packed = meta.pack(**s, block_tables=[[i] for i in range(1, n + 1)], num_decodes=0, block_size=BLOCK)
    out = meta.step(packed.to(device), poisoned((n, n, 1), device), block_size=BLOCK)
    first = torch.arange(1, n + 1, device=device)
    assert_equal("slot_mapping", out.slot_mapping, first * BLOCK)
    assert_equal("block_table", out.block_table[:, 0], first.int())
    assert_equal("prefill_cu_seqlens", out.prefill_cu_seqlens, torch.arange(n + 1, dtype=torch.int32, device=device))
    assert bool(out.fresh.all())


@pytest.mark.gpu
def test_one_graph_serves_steps_of_other_sizes() -> None:
    shape = (64, 256, 8)
    packed = torch.zeros(meta.packed_words(*shape), dtype=torch.int32, device="cuda")
    out = poisoned(shape, "cuda")
    meta.step(packed, out, block_size=BLOCK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        meta.step(packed, out, block_size=BLOCK)
    for decodes, prefills in ((40, 0), (3, 2), (0, 1)):
        s = a_step(decodes, prefills, seed=5)
        words = meta.pack(**s)
        packed[: len(words)].copy_(words)
        graph.replay()
        for name, values in expected(s, shape).items():
            buffer = getattr(out, name)
            assert_equal(name, buffer, torch.tensor(values, dtype=buffer.dtype, device="cuda").view(buffer.shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [1]}, "slots: expected 3 entries, got 1"),
        ({"token_ids": [1]}, "token_ids: expected .* entries, got 1"),
        ({"new_tokens": [1, 0, 3]}, "token_ids|new_tokens: expected at least 1 each"),
        ({"num_decodes": 3}, "new_tokens: expected 1 for each decode"),
        ({"block_tables": [[1], [], [1]]}, "block_tables: expected .* blocks for"),
        ({"out": torch.zeros(5, dtype=torch.int32)}, "out: expected at least"),
    ],
)
def test_lists_that_contradict_each_other_are_named(change: dict, message: str) -> None:
    s = {"new_tokens": [1, 2, 3], "num_computed": [4, 0, 0], "slots": [1, 2, 3], "block_tables": [[1], [2], [3]]}
    s |= {"token_ids": [5] * 6, "num_decodes": 1, "block_size": BLOCK}
    meta.pack(**s)
    with pytest.raises(ValueError, match=message):
        meta.pack(**(s | change))


def test_a_step_beyond_the_buffers_is_refused_on_the_cpu() -> None:
    s = a_step(2, 1, seed=1)
    with pytest.raises(ValueError, match="packed: expected at most"):
        meta.step(meta.pack(**s), meta.buffers(2, 100, 8, "cpu"), block_size=BLOCK)


def test_the_pinned_buffer_is_long_enough() -> None:
    s = a_step(4, 2, seed=3)
    out = torch.full((meta.packed_words(6, sum(s["new_tokens"]), 8),), -1, dtype=torch.int32)
    words = meta.pack(**s, out=out)
    assert words.data_ptr() == out.data_ptr()
    assert_equal("words", words, meta.pack(**s))
