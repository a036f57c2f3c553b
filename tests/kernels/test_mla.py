"""MLA over the paged cache: absorbed decode, expanded prefill; block sizes, padding, what must not be read."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import mla
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.golden import tiny_states, tiny_weights

NAN = float("nan")
# scores of size up to 10 carry some units of 2^-24, which the softmax turns into a relative error of the weights
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Paged:
    """Sequences of given lengths in a cache of shuffled blocks; everything that belongs to nobody is NaN."""

    def __init__(
        self, contexts: list[int], block_size: int, *, dtype: torch.dtype = torch.float32, spare: int = 2
    ) -> None:
        self.contexts, self.block_size = contexts, block_size
        need = [-(-c // block_size) for c in contexts]
        order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(1)) + 1
        self.cache = torch.full((sum(need) + 1, block_size, 576), NAN, dtype=dtype)
        self.table = torch.zeros(len(contexts), max([*need, 1]) + spare, dtype=torch.int32)
        self.rows = [randn(c, 576, seed=10 + i).to(dtype) for i, c in enumerate(contexts)]
        start = 0
        for i, count in enumerate(need):
            self.table[i, :count] = order[start : start + count]
            start += count
            for position, row in enumerate(self.rows[i]):
                self.cache[self.table[i, position // block_size], position % block_size] = row

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.cache, self.table, int32(self.contexts)


def attend64(q: torch.Tensor, rows: torch.Tensor, kv_b: torch.Tensor, scale: float) -> torch.Tensor:
    """K3 spec section 6, expanded, in fp64: q [m, heads, 192] are the newest of rows [L, 576] -> [m, heads, 128]."""
    heads, total = q.shape[1], rows.shape[0]
    weight = kv_b.double().view(heads, 256, 512)
    latent, plain = rows.double().split([512, 64], dim=1)
    out = torch.empty(q.shape[0], heads, 128, dtype=torch.float64)
    for j in range(q.shape[0]):
        seen = total - q.shape[0] + j + 1
        for h in range(heads):
            k = torch.cat([latent[:seen] @ weight[h, :128].T, plain[:seen]], dim=1)
            a = torch.softmax(k @ q[j, h].double() * scale, dim=0)
            out[j, h] = a @ (latent[:seen] @ weight[h, 128:].T)
    return out


def absorb(q: torch.Tensor, kv_b: torch.Tensor) -> torch.Tensor:
    """q [T, heads, 192] -> [T, heads, 576]."""
    w_k = kv_b.view(q.shape[1], 256, 512)[:, :128]
    return torch.cat([torch.einsum("thd,hdc->thc", q[..., :128], w_k), q[..., 128:]], dim=-1)


def expand(mixed: torch.Tensor, kv_b: torch.Tensor) -> torch.Tensor:
    """[T, heads, 512] -> [T, heads, 128]."""
    w_v = kv_b.view(mixed.shape[1], 256, 512)[:, 128:]
    return torch.einsum("thc,hdc->thd", mixed, w_v)


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_absorbed_and_expanded_agree_with_fp64(block_size: int, heads: int) -> None:
    contexts, queries = [1, 64, 65, 17, 130], [1, 3, 65, 1, 9]
    paged = Paged(contexts, block_size)
    q, kv_b = randn(sum(queries), heads, 192), randn(heads * 256, 512, seed=1) * 0.05
    cu = int32([0, 1, 4, 69, 70, 79])
    expanded = mla.prefill(q, kv_b, *paged.args, cu)
    absorbed = expand(mla.decode(absorb(q, kv_b), *paged.args, cu_seqlens=cu), kv_b)
    for i, rows in enumerate(paged.rows):
        part = slice(int(cu[i]), int(cu[i + 1]))
        want = attend64(q[part], rows, kv_b, 192**-0.5)
        assert_close(f"expanded {i}", expanded[part], want, **CLOSE)
        assert_close(f"absorbed {i}", absorbed[part], want, **CLOSE)


def test_decode_of_a_batch_equals_single_sequences_whatever_stands_behind() -> None:
    contexts = [5, 1, 200, 64, 63, 65]
    paged = Paged(contexts, 64)
    for i in range(6):  # the table's unused entries may hold anything
        paged.table[i, -(-contexts[i] // 64) :] = 999 if i % 2 else -1
    q = randn(6, 2, 576)
    together = mla.decode(q, *paged.args)
    for i in range(6):
        one = mla.decode(q[i : i + 1], paged.cache, paged.table[i : i + 1], int32(contexts[i : i + 1]))
        assert_close(f"sequence {i}", together[i : i + 1], one, atol=1e-6, rtol=1e-6)


def test_groups_of_bounded_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_kernels.reference import mla as reference

    paged = Paged([5, 40, 200, 64, 63, 65], 16)
    q, kv_b = randn(6, 2, 576), randn(512, 512, seed=1) * 0.05
    want = mla.decode(q, *paged.args)
    long, cu = randn(100, 2, 192, seed=2), int32([0, 5, 25, 85, 86, 90, 100])
    want_prefill = mla.prefill(long, kv_b, *paged.args, cu)
    monkeypatch.setattr(reference, "ROWS_AT_ONCE", 130)
    monkeypatch.setattr(reference, "QUERIES_AT_ONCE", 7)
    assert_close("decode", mla.decode(q, *paged.args), want, atol=1e-6, rtol=1e-6)
    assert_close("prefill", mla.prefill(long, kv_b, *paged.args, cu), want_prefill, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("cuts", [[1] * 20, [3, 17], [16, 4], [19, 1]])
def test_prefill_in_pieces_equals_the_whole(cuts: list[int]) -> None:
    paged = Paged([20], 16)
    q, kv_b = randn(20, 2, 192), randn(512, 512, seed=1) * 0.05
    want = mla.prefill(q, kv_b, *paged.args, int32([0, 20]))
    start = 0
    for length in cuts:
        stop = start + length
        got = mla.prefill(q[start:stop], kv_b, paged.cache, paged.table, int32([stop]), int32([0, length]))
        assert_close(f"{start}..{stop}", got, want[start:stop], **CLOSE)
        start = stop


def test_padding_and_zero_tokens() -> None:
    paged = Paged([7, 3], 16)
    q, kv_b = randn(4, 2, 576), randn(512, 512, seed=1)
    table = torch.cat([paged.table, torch.zeros_like(paged.table)])
    contexts = int32([7, 3, 0, 0])
    out = mla.decode(q, paged.cache, table, contexts)
    assert_equal("real rows", out[:2], mla.decode(q[:2], *paged.args))
    assert not out[2:].any()
    assert mla.decode(q[:0], paged.cache, table[:0], contexts[:0]).shape == (0, 2, 512)
    piece = mla.prefill(q[..., :192], kv_b, paged.cache, table, contexts, int32([0, 3, 3, 3, 3]))
    assert piece[:3].isfinite().all()
    assert not piece[3:].any()
    assert mla.prefill(q[:0, :, :192], kv_b, paged.cache, table[:0], contexts[:0], int32([0])).shape == (0, 2, 128)


def test_bf16_is_rounded_once() -> None:
    paged = Paged([33], 16, dtype=torch.bfloat16)
    q = randn(1, 2, 576).bfloat16()
    got = mla.decode(q, *paged.args)
    assert got.dtype == torch.bfloat16
    cache = paged.cache.float()
    want = mla.decode(q.float(), cache, *paged.args[1:])
    assert_equal("out", got, want.bfloat16())


def test_golden_layer() -> None:
    states, weights = tiny_states(), tiny_weights()
    name = "model.layers.2.self_attn."
    x = states["layer2.attn_mix"]
    x = (
        x
        * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        * weights["model.layers.2.input_layernorm.weight"].float()
    )
    proj = {
        part: weights[f"{name}{part}.weight"].float()
        for part in ("q_a_proj", "q_b_proj", "g_proj", "kv_b_proj", "o_proj")
    }
    cache, table = torch.full((3, 4, 576), NAN), int32([[2, 1]])
    mapping = torch.tensor([8, 9, 10, 11, 4, 5, 6])
    latent = x @ weights[name + "kv_a_proj_with_mqa.weight"].float().T
    mla.store_(latent, weights[name + "kv_a_layernorm.weight"], cache, mapping)
    rows = cache.view(-1, 576)[mapping]
    assert_close("latent", rows[:, :512], states["layer2.mla.cache_latent"], atol=2e-5)
    assert_close("k_pe", rows[:, 512:], states["layer2.mla.cache_k_pe"], atol=2e-5)
    q_a = x @ proj["q_a_proj"].T
    q_a = q_a * torch.rsqrt(q_a.square().mean(-1, keepdim=True) + 1e-6) * weights[name + "q_a_layernorm.weight"].float()
    q = (q_a @ proj["q_b_proj"].T).view(7, 2, 192)
    o = mla.prefill(q, proj["kv_b_proj"], cache, table, int32([7]), int32([0, 7])).flatten(1)
    got = (o * torch.sigmoid(x @ proj["g_proj"].T)) @ proj["o_proj"].T
    assert_close("attention output", got, states["layer2.attn_out"], atol=5e-5)


def decode_with(name: str, value) -> torch.Tensor:
    paged = Paged([7, 3], 16)
    arguments = {"q": randn(2, 2, 576), "cache": paged.cache, "block_table": paged.table, "context_lens": int32([7, 3])}
    arguments[name] = value
    return mla.decode(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(2, 2, 512), r"q: expected shape \[\*, \*, 576\], got \[2, 2, 512\]"),
        ("q", torch.zeros(3, 2, 576), r"context_lens: expected one a row of q \(3\) without cu_seqlens, got 2"),
        ("cache", torch.zeros(2, 16, 512), r"cache: expected shape \[\*, \*, 576\], got \[2, 16, 512\]"),
        (
            "cache",
            torch.zeros(2, 16, 576).to(torch.float8_e4m3fn),
            "cache_scale: expected a scale for an FP8 cache only",
        ),
        ("cache_scale", torch.ones(1), "cache_scale: expected a scale for an FP8 cache only"),
        ("block_table", torch.zeros(2, 3, dtype=torch.int64), "block_table: expected dtype int32, got int64"),
        ("context_lens", int32([7]), r"context_lens: expected shape \[2\], got \[1\]"),
        ("cu_seqlens", int32([0, 1]), r"cu_seqlens: expected shape \[3\], got \[2\]"),
        ("cu_seqlens", int32([0, 2, 1]), "cu_seqlens: expected rising from 0 to at most 2"),
        ("context_lens", int32([7, 65]), "block_table: expected at least 5 blocks a sequence, got 3"),
        ("block_table", int32([[1], [3]]), "block_table: expected blocks 0 to 2 within the contexts, got 1 to 3"),
        ("block_table", int32([[-1], [1]]), "block_table: expected blocks 0 to 2 within the contexts, got -1 to 1"),
    ],
)
def test_errors_name_the_argument(name: str, value, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_with(name, value)


def test_prefill_errors_name_the_argument() -> None:
    cache = torch.zeros(2, 4, 576)
    with pytest.raises(ValueError, match=r"kv_b: expected shape \[512, 512\], got \[256, 512\]"):
        mla.prefill(torch.zeros(1, 2, 192), torch.zeros(256, 512), cache, int32([[0]]), int32([1]), int32([0, 1]))
    with pytest.raises(ValueError, match="context_lens: expected the new tokens included"):
        mla.prefill(torch.zeros(2, 1, 192), torch.zeros(256, 512), cache, int32([[0]]), int32([1]), int32([0, 2]))
