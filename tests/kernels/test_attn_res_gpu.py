"""The attention-residual mix on the GPU, in all three layouts of the kernel (few tokens, many, wide).

Tolerance: the result is rounded to bf16 once (2^-9 relative); fp32 sums in another order move a value over a rounding
border now and then, one bf16 step.
"""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import attn_res
from kimi_kernels.reference import attn_res as reference
from kimi_kernels.testing.compare import assert_close, assert_equal
from tests.kernels.arrays import call, with_cupy

pytestmark = pytest.mark.gpu

BF16_STEP = 2.0**-7


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(13)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def weights(hidden: int) -> tuple[torch.Tensor, ...]:
    return (1 + 0.1 * bf16(hidden), 0.05 * bf16(hidden), 1 + 0.1 * bf16(hidden))


def check(
    blocks: torch.Tensor,
    partial: torch.Tensor,
    delta: torch.Tensor | None,
    w: tuple[torch.Tensor, ...],
    library: str = "torch",
) -> None:
    out = torch.full_like(partial, float("nan")) if delta is not None else None
    x_out = torch.full_like(partial, float("nan"))
    total, x = call(library, attn_res.mix, blocks, partial, delta, *w, partial_out=out, x_out=x_out)
    want = partial if delta is None else partial + delta
    assert_equal("partial + delta", total, want)
    assert_close("x", x, reference.mix(blocks, want, *w, 1e-5), atol=2e-3, rtol=BF16_STEP, cosine=2e-6)
    assert x.data_ptr() == x_out.data_ptr()
    assert_equal("x again", call(library, attn_res.mix, blocks, partial, delta, *w)[1], x)


@pytest.mark.parametrize(("library", "tokens"), with_cupy([0, 1, 3, 17, 66, 132, 133, 257, 1000]))
@pytest.mark.parametrize("num_blocks", [0, 1, 4, 8])
@pytest.mark.parametrize("with_delta", [True, False])
def test_k3_width(library: str, tokens: int, num_blocks: int, with_delta: bool) -> None:
    delta = bf16(tokens, 7168) if with_delta else None
    check(bf16(num_blocks, tokens, 7168) * 2, bf16(tokens, 7168), delta, weights(7168), library)


@pytest.mark.parametrize("num_blocks", range(16))
def test_every_number_of_blocks(num_blocks: int) -> None:
    for tokens in (5, 300):
        check(bf16(num_blocks, tokens, 1024), bf16(tokens, 1024), bf16(tokens, 1024), weights(1024))


@pytest.mark.parametrize("hidden", [32, 64, 96, 480, 1056, 4096, 7680, 8192, 10240])
@pytest.mark.parametrize("tokens", [2, 140])
def test_widths(hidden: int, tokens: int) -> None:
    check(bf16(3, tokens, hidden), bf16(tokens, hidden), bf16(tokens, hidden), weights(hidden))


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_float_weights_and_strided_rows(library: str) -> None:
    for tokens in (4, 200):
        wide = bf16(5, tokens, 4 * 512)
        w = tuple(t.float() for t in weights(512))
        check(wide[::2, :, 512:1024], wide[1, :, 1024:1536], wide[3, :, :512], w, library)


@pytest.mark.parametrize("tokens", [7, 300])
def test_the_sum_may_become_the_next_block(tokens: int) -> None:
    buffer = bf16(5, tokens, 1024)
    delta, w = bf16(tokens, 1024), weights(1024)
    before = buffer.clone()
    total, x = attn_res.mix(buffer[:3], buffer[4], delta, *w, partial_out=buffer[3])
    want = before[4] + delta
    assert_equal("row 3", buffer[3], want)
    assert_close("x", x, reference.mix(before[:3], want, *w, 1e-5), atol=2e-3, rtol=BF16_STEP)
    in_place = before[4].clone()
    attn_res.mix(before[:3], in_place, delta, *w, partial_out=in_place)
    assert_equal("in place", in_place, want)
    assert total.data_ptr() == buffer[3].data_ptr()


def test_many_tokens() -> None:
    tokens = 8192
    check(bf16(8, tokens, 7168), bf16(tokens, 7168), bf16(tokens, 7168), weights(7168))


def test_rows_do_not_depend_on_the_batch() -> None:
    """A token's result in a large batch equals the one in a batch of its own layout."""
    blocks, partial, delta, w = bf16(8, 400, 7168), bf16(400, 7168), bf16(400, 7168), weights(7168)
    _, x = attn_res.mix(blocks, partial, delta, *w)
    _, part = attn_res.mix(blocks[:, 100:300], partial[100:300], delta[100:300], *w)
    assert_equal("x", part, x[100:300])
