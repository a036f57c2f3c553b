"""Multi-head latent attention over a paged cache of 576 values a token: 512 normalised latent, 64 plain."""

from __future__ import annotations

from typing import Any

import torch

from kimi_kernels import _check as check
from kimi_kernels._dispatch import no_kernel, use_reference
from kimi_kernels.reference import mla as reference

SCALE = 192**-0.5
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def store_(
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
) -> None:
    """Normalise a token's latent and write it to the paged cache, in place (K3 spec section 6).

    latent [T, 576] row-strided, as projected: the first 512 get RMSNorm with norm_weight [512] and eps, the last 64 are
    stored as they are. cache [blocks, block, 576], bf16 (CPU: also float32) or float8_e4m3fn with ``cache_scale`` (the
    value is stored / scale, saturating). slot_mapping [T] int64 = block * block size + row; -1: not written. Rows must
    be distinct. Returns None. Raises ValueError naming the argument at fault.
    """
    if not use_reference("mla.store_", latent):
        raise no_kernel("mla.store_", latent)
    check.tensor("latent", latent, (None, 576), check.ACTIVATION, row=True)
    check.tensor("norm_weight", norm_weight, (512,), check.ACTIVATION, like=latent)
    _check_cache(cache, cache_scale, latent)
    check.tensor("slot_mapping", slot_mapping, (latent.shape[0],), check.INT64, like=latent)
    rows = cache.shape[0] * cache.shape[1]
    if latent.is_cpu and latent.shape[0]:  # free of a device sync only there
        low, high = (int(v) for v in slot_mapping.aminmax())
        check.require(low >= -1 and high < rows, "slot_mapping", f"-1 to {rows - 1}", f"{low} to {high}")
    reference.store(latent, norm_weight, cache, slot_mapping, cache_scale, eps)


def decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    plan: Any = None,
    cache_scale: torch.Tensor | float | None = None,
    workspace: torch.Tensor | None = None,
    scale: float = SCALE,
) -> torch.Tensor:
    """Absorbed attention of a few new tokens a sequence over the cache (K3 spec section 6, decode form).

    q [T, heads, 576]: per head 512 dims of ``q_n W_k`` and the 64 plain ones; cache [blocks, block, 576];
    block_table [n, max_blocks] int32; context_lens [n] int32, the new tokens included (already stored); 0 = padding.
    ``cu_seqlens`` [n+1] int32: sequence i owns rows cu_seqlens[i]..cu_seqlens[i+1]-1, its newest tokens, each seeing
    itself and what is before it; None: one row a sequence (T = n). Softmax in fp32 over ``score * scale``; the values
    are a row's first 512. Nothing beyond a context is read into the result.
    ``plan`` and ``workspace`` serve the kernels; the reference needs neither.

    Returns [T, heads, 512] of q's dtype; padding rows are 0. Raises ValueError naming the argument at fault.
    """
    if not use_reference("mla.decode", q):
        raise no_kernel("mla.decode", q)
    check.tensor("q", q, (None, None, 576), check.ACTIVATION, row=True)
    _check_cache(cache, cache_scale, q)
    count = _check_sequences(q, cache, block_table, context_lens, cu_seqlens)
    if cu_seqlens is None:
        check.require(count == q.shape[0], "context_lens", f"one a row of q ({q.shape[0]}) without cu_seqlens", count)
    return reference.decode(q, cache, block_table, context_lens, cu_seqlens, cache_scale, scale).to(q.dtype)


def prefill(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    plan: Any = None,
    cache_scale: torch.Tensor | float | None = None,
    workspace: torch.Tensor | None = None,
    scale: float = SCALE,
) -> torch.Tensor:
    """Causal attention of packed pieces of prompts over the cache, which holds the pieces already (K3 spec section 6).

    q [T, heads, 192] (128 + 64 plain dims); kv_b [heads*256, 512]: per head 128 key rows, then 128 value rows; cache,
    block_table, context_lens as in ``decode``; cu_seqlens [n+1] int32 over T. Sequence i has
    cu_seqlens[i+1] - cu_seqlens[i] new tokens, the last of its context_lens[i]. Softmax in fp32.
    ``plan`` and ``workspace`` serve the kernels; the reference needs neither.

    Returns [T, heads, 128] of q's dtype; rows beyond cu_seqlens[n] are 0. Raises ValueError naming the argument.
    """
    if not use_reference("mla.prefill", q):
        raise no_kernel("mla.prefill", q)
    check.tensor("q", q, (None, None, 192), check.ACTIVATION, row=True)
    check.tensor("kv_b", kv_b, (q.shape[1] * 256, 512), check.ACTIVATION, like=q, row=True)
    _check_cache(cache, cache_scale, q)
    check.tensor("cu_seqlens", cu_seqlens, (None,), check.INT32, like=q)
    _check_sequences(q, cache, block_table, context_lens, cu_seqlens)
    return reference.prefill(q, kv_b, cache, block_table, context_lens, cu_seqlens, cache_scale, scale).to(q.dtype)


def _check_cache(cache: torch.Tensor, cache_scale: torch.Tensor | float | None, like: torch.Tensor) -> None:
    check.tensor("cache", cache, (None, None, 576), CACHE_DTYPES, like=like, row=True)
    needs = cache.dtype == torch.float8_e4m3fn
    check.require((cache_scale is not None) == needs, "cache_scale", "a scale for an FP8 cache only", cache_scale)


def _check_sequences(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> int:
    check.tensor("block_table", block_table, (None, None), check.INT32, like=q)
    count, max_blocks = block_table.shape
    check.tensor("context_lens", context_lens, (count,), check.INT32, like=q)
    if cu_seqlens is not None:
        check.tensor("cu_seqlens", cu_seqlens, (count + 1,), check.INT32, like=q)
    if q.is_cpu and count:  # values: free of a device sync only there
        if cu_seqlens is not None:
            new = cu_seqlens.diff()
            ok = int(cu_seqlens[0]) == 0 and int(new.min()) >= 0 and int(cu_seqlens[-1]) <= q.shape[0]
            check.require(ok, "cu_seqlens", f"rising from 0 to at most {q.shape[0]}", cu_seqlens)
            check.require(bool((new <= context_lens).all()), "context_lens", "the new tokens included", context_lens)
        blocks = (context_lens + cache.shape[1] - 1) // cache.shape[1]
        most = int(blocks.max())
        check.require(most <= max_blocks, "block_table", f"at least {most} blocks a sequence", max_blocks)
        used = block_table[:, :most][torch.arange(most) < blocks[:, None]]
        low, high = (int(v) for v in used.aminmax()) if used.numel() else (0, 0)
        allowed = f"blocks 0 to {cache.shape[0] - 1} within the contexts"
        check.require(low >= 0 and high < cache.shape[0], "block_table", allowed, f"{low} to {high}")
    return count
