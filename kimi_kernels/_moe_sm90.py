"""The weight layout of the sm_90a expert GEMM, in plain torch: runs on CPU and GPU alike, pure and invertible.

A matrix becomes tiles of 128 rows x 128 columns, each one contiguous blob that a bulk copy brings into shared memory
and that threads read 16 bytes at a time without bank conflicts, in the order of wgmma's A registers
(csrc/moe/sm90_fragment.cuh has the same indices from the other side). Tile rows count as (slab 2, warp 4, row half 2,
group 8); block columns as (half 2, quad lane 4, step 2, element 8). For w13 row half 0 is a gate row and 1 the up row
of the same column.

mxfp4: a header of 256 bytes a tile (base exponent of each row, then the flag "wide"), then per block 8192 bytes of
words and 512 of scales. A row's scales are stored less its base, 0..14, times 8
(the offset of a table entry); in a wide tile, where a row's scales spread
over more than 14 binades, they are stored as they are. fp8: 16384 bytes of values and two f32 scales, padded to 128
bytes. Rows and columns are filled up to 128 with zeros (w13: 64 gate and 64 up rows a tile, an even number of tiles).
"""

from __future__ import annotations

import torch

TILE = 128
MXFP4_HEADER, MXFP4_BLOCK = 256, TILE * TILE // 2 + TILE * 4
FP8_BLOCK = TILE * TILE + 128
MAX_SPREAD = 14  # binades over which E2M1 x 2^s is exact in E4M3
CHUNK_BYTES = 128 << 20  # experts are packed in groups of about this many bytes of source


def blocks(cols: int) -> int:
    return -(-cols // TILE)


def tiles(rows: int, parts: int) -> int:
    """Row tiles of a matrix of `rows` rows in all: w13 (parts 2) has an even number, so that h fills whole blocks."""
    return 2 * -(-rows // parts // TILE) if parts == 2 else -(-rows // TILE)


def expert_bytes(fmt: str, rows: int, cols: int, parts: int) -> int:
    header, block = (MXFP4_HEADER, MXFP4_BLOCK) if fmt == "mxfp4" else (0, FP8_BLOCK)
    return tiles(rows, parts) * (header + blocks(cols) * block)


def row_order(rows: int, parts: int, device: torch.device) -> torch.Tensor:
    """[tiles * 128] int64: the source row of each tile row, `rows` (one past the end) where there is none."""
    index = torch.arange(tiles(rows, parts) * TILE, device=device)
    tile, slab, warp, half, group = index // 128, index // 64 % 2, index // 16 % 4, index // 8 % 2, index % 8
    if parts == 1:  # a thread ends with four neighbouring columns of the output
        return (index // 16 * 16 + group // 2 * 4 + half * 2 + group % 2).clamp(max=rows)
    column = tile * 64 + warp * 16 + slab * 8 + group  # a slab's 32 columns of h are 32 neighbouring bytes of its row
    inner = rows // 2
    return torch.where(column < inner, half * inner + column, rows)


def _by_tile(x: torch.Tensor, order: torch.Tensor, cols: int) -> torch.Tensor:
    """x [E, rows, n] -> [E, tiles*128, cols]: rows in tile order, zeros where there is nothing."""
    padded = x.new_zeros((x.shape[0], x.shape[1] + 1, cols))
    padded[:, :-1, : x.shape[2]] = x
    return padded[:, order]


def pack_mxfp4(data: torch.Tensor, scale: torch.Tensor, parts: int, out: torch.Tensor) -> None:
    """data uint8 [E, rows, cols/2], scale uint8 [E, rows, cols/32] -> out uint8 [E, expert_bytes]."""
    experts, rows, half = data.shape
    k_blocks, order = blocks(2 * half), row_order(rows, parts, data.device)
    m = len(order) // TILE
    # The base of a row puts its largest scale at the top remainder; all remainders count from it.
    low, high = scale.amin(-1), scale.amax(-1)  # [E, rows]
    base = (high.int() - MAX_SPREAD).clamp(min=0).to(torch.uint8)
    spread = _by_tile((high - low).unsqueeze(-1), order, 1).view(experts, m, TILE)
    wide = (spread > MAX_SPREAD).any(-1)  # [E, m]
    bases = _by_tile(base.unsqueeze(-1), order, 1).view(experts, m, TILE)
    raw = _by_tile(scale, order, 4 * k_blocks).view(experts, m, TILE, 4 * k_blocks)
    stored = torch.where(wide[:, :, None, None], raw, 8 * (raw - torch.minimum(raw, bases.unsqueeze(-1))))

    tile = out.view(experts, m, MXFP4_HEADER + k_blocks * MXFP4_BLOCK)
    tile[:, :, :TILE] = bases
    tile[:, :, TILE : TILE + 1] = wide.unsqueeze(-1)
    tile[:, :, TILE + 1 : MXFP4_HEADER] = 0
    body = tile[:, :, MXFP4_HEADER:].view(experts, m, k_blocks, MXFP4_BLOCK)

    packed = _by_tile(data, order, k_blocks * TILE // 2)
    # bytes [E, m, slab, warp, row half, group, block, half, lane, step, byte 4]
    nibbles = packed.view(experts, m, 2, 4, 2, 8, k_blocks, 2, 4, 2, 4)
    word = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=data.device)
    for n in range(8):
        code = nibbles[..., n // 2].int() >> (4 * (n % 2))
        word |= (code & 7) << (4 * n)
        word |= ((code >> 3) & 1) << (8 * n + 7 if n < 4 else 8 * (n - 4) + 3)
    # -> [E, m, block, slab, half, warp, group, lane, step, row half]
    ordered = word.permute(0, 1, 6, 2, 7, 3, 5, 8, 9, 4).contiguous()
    body[..., : TILE * TILE // 2] = ordered.view(torch.uint8).view(experts, m, k_blocks, -1)
    # scales [E, m, slab, warp, row half, group, block, half, pair]
    # -> [E, m, block, slab, warp, group, pair, row half, half]
    scales = stored.view(experts, m, 2, 4, 2, 8, k_blocks, 2, 2).permute(0, 1, 6, 2, 3, 5, 8, 4, 7)
    body[..., TILE * TILE // 2 :] = scales.reshape(experts, m, k_blocks, -1)


def unpack_mxfp4(packed: torch.Tensor, rows: int, cols: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: (data [E, rows, cols/2], scale [E, rows, cols/32])."""
    experts, k_blocks = packed.shape[0], blocks(cols)
    order = row_order(rows, parts, packed.device)
    m = len(order) // TILE
    tile = packed.view(experts, m, MXFP4_HEADER + k_blocks * MXFP4_BLOCK)
    bases, wide = tile[:, :, :TILE], tile[:, :, TILE].bool()
    body = tile[:, :, MXFP4_HEADER:].view(experts, m, k_blocks, MXFP4_BLOCK)
    word = body[..., : TILE * TILE // 2].contiguous().view(torch.int32).view(experts, m, k_blocks, 2, 2, 4, 8, 4, 2, 2)
    word = word.permute(0, 1, 3, 5, 9, 6, 2, 4, 7, 8)  # [E, m, slab, warp, row half, group, block, half, lane, step]
    data = torch.zeros((*word.shape, 4), dtype=torch.uint8, device=packed.device)
    for n in range(8):
        sign = (word >> (8 * n + 7 if n < 4 else 8 * (n - 4) + 3)) & 1
        code = (((word >> (4 * n)) & 7) | (sign << 3)) << (4 * (n % 2))
        data[..., n // 2] |= code.to(torch.uint8)
    stored = body[..., TILE * TILE // 2 :].contiguous().view(experts, m, k_blocks, 2, 4, 8, 2, 2, 2)
    stored = stored.permute(0, 1, 3, 4, 7, 5, 2, 8, 6).reshape(experts, m, TILE, 4 * k_blocks)
    raw = torch.where(wide[:, :, None, None], stored, stored // 8 + bases.unsqueeze(-1))
    return (
        _by_row(data.view(experts, m * TILE, -1), order, rows)[..., : cols // 2],
        _by_row(raw.view(experts, m * TILE, -1), order, rows)[..., : cols // 32],
    )


def pack_fp8(data: torch.Tensor, scale: torch.Tensor, parts: int, out: torch.Tensor) -> None:
    """data e4m3 [E, rows, cols], scale f32 [E, parts*ceil(rows/parts/128), ceil(cols/128)] -> out [E, expert_bytes]."""
    experts, rows, cols = data.shape
    k_blocks, order = blocks(cols), row_order(rows, parts, data.device)
    m = len(order) // TILE
    body = out.view(experts, m, k_blocks, FP8_BLOCK)
    values = _by_tile(data.view(torch.uint8), order, k_blocks * TILE)
    values = values.view(experts, m, 2, 4, 2, 8, k_blocks, 2, 4, 2, 2, 4)
    # [E, m, slab, warp, row half, group, block, half, lane, step, quad half, byte]
    # -> [E, m, block, slab, half, step, warp, group, lane, quad half, row half, byte]
    ordered = values.permute(0, 1, 6, 2, 7, 9, 3, 5, 8, 10, 4, 11)
    body[..., : TILE * TILE] = ordered.reshape(experts, m, k_blocks, -1)
    first, second = _scale_rows(m, parts, scale)
    both = torch.stack([first, second], -1).contiguous()  # [E, m, block, 2]
    body[..., TILE * TILE : TILE * TILE + 8] = both.view(torch.uint8).view(experts, m, k_blocks, 8)
    body[..., TILE * TILE + 8 :] = 0


def unpack_fp8(packed: torch.Tensor, rows: int, cols: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: (data [E, rows, cols], scale)."""
    experts, k_blocks = packed.shape[0], blocks(cols)
    order = row_order(rows, parts, packed.device)
    m = len(order) // TILE
    body = packed.view(experts, m, k_blocks, FP8_BLOCK)
    values = body[..., : TILE * TILE].contiguous().view(experts, m, k_blocks, 2, 2, 2, 4, 8, 4, 2, 2, 4)
    values = values.permute(0, 1, 3, 6, 10, 7, 2, 4, 8, 5, 9, 11).reshape(experts, m * TILE, -1)
    both = body[..., TILE * TILE : TILE * TILE + 8].contiguous().view(torch.float32).view(experts, m, k_blocks, 2)
    scale = torch.cat([both[:, ::2, :, 0], both[:, ::2, :, 1]], 1) if parts == 2 else both[..., 0]
    return _by_row(values, order, rows)[..., :cols].contiguous().view(torch.float8_e4m3fn), scale.contiguous()


def _scale_rows(m: int, parts: int, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The block scales of row half 0 and 1 of every tile: [E, m, blocks] each."""
    if parts == 1:
        return scale, scale
    gate, up = scale.chunk(2, 1)
    return gate.repeat_interleave(2, 1)[:, :m], up.repeat_interleave(2, 1)[:, :m]


def _by_row(x: torch.Tensor, order: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of _by_tile: [E, tiles*128, n] -> [E, rows, n]."""
    out = x.new_empty((x.shape[0], rows + 1, x.shape[2]))
    out[:, order] = x
    return out[:, :rows]
