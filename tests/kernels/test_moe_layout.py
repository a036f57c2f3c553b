"""The sm_90a weight layout: invertible, within the size bound, and what the kernel's threads read are the weights.

The last part plays the kernel's side in numpy: addresses, byte look-up, scale folding and register order as
csrc/moe/sm90_fragment.cuh has them, the A layout of wgmma as the PTX manual has it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kimi_kernels import _moe_sm90 as layout
from kimi_kernels.reference import quant

SHAPES = [(2 * 64, 96, 2), (2 * 192, 256, 2), (2 * 96, 32, 2), (96, 64, 1), (256, 384, 1), (160, 160, 1)]


def random_mxfp4(experts: int, rows: int, cols: int, low: int, high: int):
    g = torch.Generator().manual_seed(rows * cols + high)
    data = torch.randint(0, 256, (experts, rows, cols // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, high, (experts, rows, cols // 32), dtype=torch.uint8, generator=g)
    return data, scale


def random_fp8(experts: int, rows: int, cols: int, parts: int):
    g = torch.Generator().manual_seed(rows * cols)
    data = (torch.randn(experts, rows, cols, generator=g) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand(experts, parts * -(-rows // parts // 128), -(-cols // 128), generator=g) + 0.5
    return data, scale


def pack(fmt: str, data: torch.Tensor, scale: torch.Tensor, parts: int) -> torch.Tensor:
    cols = data.shape[2] * (2 if fmt == "mxfp4" else 1)
    out = torch.full((data.shape[0], layout.expert_bytes(fmt, data.shape[1], cols, parts)), 0xA5, dtype=torch.uint8)
    (layout.pack_mxfp4 if fmt == "mxfp4" else layout.pack_fp8)(data, scale, parts, out)
    return out


@pytest.mark.parametrize(("rows", "cols", "parts"), SHAPES)
@pytest.mark.parametrize(("low", "high"), [(118, 121), (112, 127), (0, 255)])
def test_mxfp4_round_trip(rows, cols, parts, low, high):
    data, scale = random_mxfp4(3, rows, cols, low, high)
    got_data, got_scale = layout.unpack_mxfp4(pack("mxfp4", data, scale, parts), rows, cols, parts)
    assert torch.equal(got_data, data)
    assert torch.equal(got_scale, scale)


@pytest.mark.parametrize(("rows", "cols", "parts"), SHAPES)
def test_fp8_round_trip(rows, cols, parts):
    data, scale = random_fp8(2, rows, cols, parts)
    got_data, got_scale = layout.unpack_fp8(pack("fp8", data, scale, parts), rows, cols, parts)
    assert torch.equal(got_data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(got_scale, scale)


def test_k3_experts_stay_within_two_percent_of_the_checkpoint():
    for rows, cols, parts in ((6144, 3584, 2), (3584, 3072, 1)):
        assert layout.expert_bytes("mxfp4", rows, cols, parts) <= 1.02 * rows * cols * 17 / 32
        assert layout.expert_bytes("fp8", rows, cols, parts) <= 1.02 * rows * cols


# ---- the kernel's side --------------------------------------------------------------------------------------------


def e4m3(byte: np.ndarray) -> np.ndarray:
    return torch.from_numpy(byte.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()


def table() -> np.ndarray:
    """[16, 8] E4M3 bytes: E2M1(code) * 2^(r - 8); entry 15 is zero."""
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = values[None] * np.exp2(np.arange(16) - 8.0)[:, None]
    scaled[15] = 0
    as_fp8 = torch.from_numpy(scaled).float().to(torch.float8_e4m3fn)
    assert torch.equal(as_fp8.float()[:15], torch.from_numpy(scaled).float()[:15])  # exact over 14 binades
    return as_fp8.view(torch.uint8).numpy()


def stored_position(column: int) -> int:
    """Where a column of a block lies in the activations (FP8)."""
    half, c = divmod(column, 64)
    t, step, quad_half, n = c >> 4, (c >> 3) & 1, (c >> 2) & 1, c & 3
    return 64 * half + 32 * step + 16 * quad_half + 4 * t + n


def registers(block: np.ndarray, fmt: str, slab: int, warp: int, lane: int) -> np.ndarray:
    """[4 steps, 4 registers, 4 bytes] that a thread feeds to wgmma, as E4M3 bytes."""
    out = np.zeros((4, 4, 4), np.uint8)
    if fmt == "fp8":
        for step in range(4):
            at = slab * 8192 + step * 2048 + warp * 512 + lane * 16
            out[step] = block[at : at + 16].reshape(4, 4)
        return out
    group, quad, tab = lane >> 2, lane & 3, table()
    at = 8192 + 4 * (((slab * 4 + warp) * 8 + group) * 2 + (quad >> 1))
    scales = int(block[at : at + 4].view(np.uint32)[0])
    for q in range(2):
        at = slab * 4096 + q * 2048 + warp * 512 + lane * 16
        words = block[at : at + 16].view(np.uint32).tolist()
        for step in range(2):
            for row_half in range(2):
                word = words[2 * step + row_half]
                entry = tab[((scales >> (16 * row_half + 8 * q)) & 0xFF) // 8]
                for i in range(4):
                    out[2 * q + step, row_half, i] = entry[(word >> 4 * i) & 7] | ((word >> (8 * i)) & 0x80)
                    out[2 * q + step, 2 + row_half, i] = entry[(word >> (16 + 4 * i)) & 7] | (
                        ((word << 4) >> (8 * i)) & 0x80
                    )
    return out


def as_multiplied(block: np.ndarray, fmt: str) -> np.ndarray:
    """[128 tile rows, 128 positions]: the A operand that the tensor cores see."""
    a = np.zeros((128, 128), np.uint8)
    for slab in range(2):
        for warp in range(4):
            for lane in range(32):
                group, quad = lane >> 2, lane & 3
                fragment = registers(block, fmt, slab, warp, lane)
                for step in range(4):
                    for register in range(4):
                        row = slab * 64 + warp * 16 + group + 8 * (register & 1)
                        k = 32 * step + 4 * quad + 16 * (register >> 1)
                        a[row, k : k + 4] = fragment[step, register]
    return a


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8"])
@pytest.mark.parametrize("parts", [1, 2])
def test_threads_read_the_weights(fmt, parts):
    rows, cols = 256, 192  # two tiles, a block and a half of columns
    if fmt == "mxfp4":
        data, scale = random_mxfp4(1, rows, cols, 110, 125)
        want = quant.mxfp4(data[0], scale[0]).numpy()
    else:
        data, scale = random_fp8(1, rows, cols, parts)
        want = data[0].float().numpy()
    packed = pack(fmt, data, scale, parts)[0].numpy()
    order = layout.row_order(rows, parts, torch.device("cpu")).numpy()
    header, size = (layout.MXFP4_HEADER, layout.MXFP4_BLOCK) if fmt == "mxfp4" else (0, layout.FP8_BLOCK)
    position = np.array([stored_position(c) for c in range(128)])
    for tile in range(2):
        blob = packed[tile * (header + 2 * size) :][: header + 2 * size]
        for k in range(2):
            block = blob[header + k * size :][:size]
            values = e4m3(as_multiplied(block, fmt))[:, position]  # [128, columns of the block]
            if fmt == "mxfp4":
                assert blob[128] == 0, "not a wide tile"
                values = values * np.exp2(blob[:128].astype(np.float64) + 8 - 127)[:, None]
            width = min(128, cols - 128 * k)
            expected = want[order[tile * 128 : tile * 128 + 128], 128 * k : 128 * k + width]
            np.testing.assert_array_equal(values[:, :width], expected)
            assert (values[:, width:] == 0).all()
