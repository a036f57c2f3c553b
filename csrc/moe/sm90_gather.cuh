// Brings the rows of x into the blobs that the first product reads: gathered by piece, columns in fragment order (see
// sm90_fragment.cuh), 16-byte chunks in the 128-byte swizzle, and for FP8 quantised with one scale per row and 128
// columns.
//
// A block takes a row at a time, a thread eight columns, sixteen threads a block of columns. Rows that fill a piece up
// to a multiple of 8 stay as they are: they only reach accumulator columns that nobody stores.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "params.h"
#include "work.cuh"

namespace kimi::moe {

constexpr int kGatherThreads = 512;

// Where the word of element pair or quadruple lies: chunk (16 bytes) and word in it, for columns 8v..8v+7 of a block.
struct StoredWords {
  int half, step, lane;
  __device__ __forceinline__ explicit StoredWords(int vector)  // 0..15
      : half(vector >> 3), step(vector & 1), lane((vector >> 1) & 3) {}
};

// Columns 8 * vector .. + 7 of one row and block, from its sixteen threads; `store` may differ from row to row.
template <Activation kActivation>
__device__ __forceinline__ void store_words(const Bf16x8& raw, uint8_t* blob, int row, int padded, int vector,
                                            bool store) {
  const StoredWords words(vector);
  if constexpr (kActivation == Activation::kFp8) {
    float values[8];
    raw.unpack(values);
    float largest = 0.f;
#pragma unroll
    for (float value : values) largest = fmaxf(largest, fabsf(value));
    largest = warp_max<16>(largest);
    const float scale = __fdiv_rn(fmaxf(largest, 1e-10f), kE4M3Max);
    const float inverse = __frcp_rn(scale);
    if (!store) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = (4 * words.half + 2 * words.step + h) ^ (row & 7);
      *reinterpret_cast<uint32_t*>(blob + row * 128 + chunk * 16 + words.lane * 4) =
          pack_e4m3(values[4 * h] * inverse, values[4 * h + 1] * inverse, values[4 * h + 2] * inverse,
                    values[4 * h + 3] * inverse);
    }
    if (vector == 0) reinterpret_cast<float*>(blob + padded * kBlockColumns)[row] = scale;
  } else {
    if (!store) return;
    const uint32_t pair[4] = {raw.raw.x, raw.raw.y, raw.raw.z, raw.raw.w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {  // elements (0, 2), then (1, 3), of four
        const uint32_t word = __byte_perm(pair[2 * h], pair[2 * h + 1], odd ? 0x7632 : 0x5410);
        const int chunk = (4 * words.step + 2 * h + odd) ^ (row & 7);
        *reinterpret_cast<uint32_t*>(blob + (words.half * padded + row) * 128 + chunk * 16 + words.lane * 4) = word;
      }
    }
  }
}

// kRows: rows of one piece that a block has in flight. One is best for latency, many for bandwidth.
template <Activation kActivation, int kRows>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  constexpr int kRowPitch = row_pitch(kActivation);
  ptx::pdl_wait();
  const int tiles = *p.work.num_tiles;
  const int vectors = p.k_blocks * (kBlockColumns / 8);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Piece tile = load_tile(p.work, index);
    for (int tile_row = blockIdx.y * kRows; tile_row < tile.count; tile_row += gridDim.y * kRows) {
      const int first = tile_row % p.work.max_rows;
      const Piece piece = tile.part(tile_row - first, p.work.max_rows);
      const int padded = round_up(piece.count, 8), last = piece.count - 1;
      const __nv_bfloat16* x[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        x[r] = p.x + int64_t(p.pairs[piece.row + min(first + r, last)] / p.top_k) * p.x_stride;
      }
      for (int v = threadIdx.x; v < round_up(vectors, 32); v += blockDim.x) {  // whole warps: they shuffle
        uint8_t* blob = p.blobs + (int64_t(piece.padded_row) * p.k_blocks + int64_t(v / 16) * padded) * kRowPitch;
        Bf16x8 raw[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          raw[r].clear();
          if (8 * v < p.width) raw[r].load(x[r] + 8 * v);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          store_words<kActivation>(raw[r], blob, first + r, padded, v % 16, first + r <= last && v < vectors);
        }
      }
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::moe
