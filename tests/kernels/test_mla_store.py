"""MLA: what is written to the paged cache, also in FP8."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import mla
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.test_mla import CLOSE, NAN, int32, randn


def test_store_norms_the_latent_only_and_skips_minus_one() -> None:
    latent, weight = randn(5, 576) * 1e-2, randn(512, seed=1)  # small, so that eps shows
    cache = torch.full((3, 4, 576), NAN)
    mapping = torch.tensor([4, 11, -1, 0, 7])
    mla.store_(latent, weight, cache, mapping)
    flat = cache.view(-1, 576)
    for token, row in enumerate(mapping.tolist()):
        if row < 0:
            continue
        x = latent[token, :512].double()
        want = x / torch.sqrt(x.pow(2).mean() + 1e-6) * weight.double()
        assert_close(f"latent {token}", flat[row, :512], want, atol=1e-6, rtol=1e-5)
        assert_equal(f"plain {token}", flat[row, 512:], latent[token, 512:])
    untouched = [row for row in range(12) if row not in mapping.tolist()]
    assert flat[untouched].isnan().all()
    mla.store_(latent[:0], weight, cache, mapping[:0])


def test_store_into_one_layer_of_a_pool_from_strided_rows() -> None:
    wide, weight = randn(4, 576 + 7), randn(512, seed=1)
    pool = torch.full((3, 2, 8, 576), NAN)
    mapping = torch.tensor([9, 2, 3, 15])
    mla.store_(wide[:, 5:581], weight, pool[1], mapping)
    plain = torch.full((2, 8, 576), NAN)
    mla.store_(wide[:, 5:581].contiguous(), weight, plain, mapping)
    assert_equal("pool", pool[1], plain)
    assert pool[[0, 2]].isnan().all()


def test_fp8_cache_with_a_scale() -> None:
    latent, weight = randn(40, 576), torch.ones(512)
    exact, fp8 = torch.zeros(3, 16, 576), torch.zeros(3, 16, 576, dtype=torch.float8_e4m3fn)
    mapping, scale = torch.arange(40), torch.tensor([0.02])
    mla.store_(latent, weight, exact, mapping)
    mla.store_(latent, weight, fp8, mapping, cache_scale=scale)
    table, contexts, q = int32([[0, 1, 2]]), int32([40]), randn(1, 2, 576, seed=1)
    got = mla.decode(q, fp8, table, contexts, cache_scale=scale)
    assert_close("dequantised", got, mla.decode(q, fp8.float() * 0.02, table, contexts), **CLOSE)
    # E4M3 loses up to 2^-4 of a value; a mean over 40 rows with scores off by as much stays within 0.2 of size 1
    assert_close("exact", got, mla.decode(q, exact, table, contexts), atol=0.2)


def test_errors_name_the_argument() -> None:
    cache, weight = torch.zeros(2, 4, 576), torch.ones(512)
    with pytest.raises(ValueError, match="slot_mapping: expected -1 to 7, got 0 to 8"):
        mla.store_(torch.zeros(2, 576), weight, cache, torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="slot_mapping: expected dtype int64, got int32"):
        mla.store_(torch.zeros(1, 576), weight, cache, int32([0]))
    with pytest.raises(ValueError, match=r"latent: expected shape \[\*, 576\], got \[1, 512\]"):
        mla.store_(torch.zeros(1, 512), weight, cache, torch.tensor([0]))
