"""h whose groups of 32 columns differ by up to 20 binades: what the kernel leaves is E4M3 with one scale a row."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels.testing.compare import relative_error
from tests.kernels.moe_gpu_cases import Call, Experts, single, situ64, tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 20, 300])
def test_groups_of_h_far_below_their_row(count: int) -> None:
    e = Experts("mxfp4", 2, 512, 256)
    column = torch.arange(512, device=e.raw[1].device)
    # a group of 32 is half of 64 columns; 0 .. 10 binades for gate and up each
    down = (column // 64 * 2 + column // 8 % 2) % 11
    for scale in (e.raw[1], e.raw[3]):
        scale.copy_((118 - down.to(torch.int16))[:, None].expand(scale.shape).to(torch.uint8))
    e.pack()
    call = Call(e, tokens(count, 256), single(count, 2, 1), "fp8")
    for piece in call.pieces():
        expert, row, n, padded = piece
        h, codes = call.hidden(piece)
        want = situ64(*call.first_product[row : row + n].double().chunk(2, 1))
        scale = call.workspace[call.plan["scales"] + 4 * padded :][: 4 * n].view(torch.float32).double()[:, None]
        assert (torch.frexp(scale).mantissa == 0.5).all(), "scales of h are powers of two"
        top = (codes & 0x7F).amax(-1)
        assert ((top >= 0x76) & (top <= 0x7E)).all(), "a row of h must pass 224"
        # E4M3 rounds to 2^-4 of a value, or twice to half of 2^-9 of the scale; 2^-6: first_product is rounded to bf16
        assert ((h - want).abs() <= (2.0**-4 + 2.0**-6) * want.abs() + 2.0**-9 * scale).all()
        small = want.abs() < 2.0**-3 * scale  # far below the row, not lost
        assert small.any()
        assert relative_error(h[small], want[small]) < 0.06
        rows = call.rows[call.dispatch.pairs[row : row + n].long()].double()
        assert relative_error(rows, h @ e.dense(1, expert).T) < 3.5e-3
