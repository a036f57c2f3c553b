// Brings the rows of x into the blobs that the first product reads: gathered by piece, columns in fragment order (see
// sm90_fragment.cuh), 16-byte chunks in the 128-byte swizzle, and for FP8 quantised with one scale a row.
//
// Few rows: each is quantised wherever it goes, in one kernel. Many: each token once, and its codes are copied. Rows
// that fill a piece up to a multiple of 8 stay as they are: they only reach accumulator columns that nobody stores.
#pragma once

#include "../common/ptx.cuh"
#include "../common/quantise.cuh"
#include "../common/tile.cuh"
#include "params.h"
#include "work.cuh"

namespace kimi::moe {

constexpr int kGatherThreads = 512;
constexpr int kGatherVectors = 2;  // of 8 columns, a thread: 8192 columns at most
constexpr int kCopyThreads = 256;

// Where the word of element pair or quadruple lies: chunk (16 bytes) and word in it, for columns 8v..8v+7 of a block.
struct StoredWords {
  int half, step, lane;
  __device__ __forceinline__ explicit StoredWords(int vector)  // 0..15
      : half(vector >> 3), step(vector & 1), lane((vector >> 1) & 3) {}
};

// Columns 8 * vector .. + 7 of one row and block.
template <Activation kActivation>
__device__ __forceinline__ void store_words(const Bf16x8& raw, uint8_t* blob, int row, int padded, int vector,
                                            float inverse) {
  const StoredWords words(vector);
  if constexpr (kActivation == Activation::kFp8) {
    float values[8];
    raw.unpack(values);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = (4 * words.half + 2 * words.step + h) ^ (row & 7);
      *reinterpret_cast<uint32_t*>(blob + row * 128 + chunk * 16 + words.lane * 4) =
          pack_e4m3(values[4 * h] * inverse, values[4 * h + 1] * inverse, values[4 * h + 2] * inverse,
                    values[4 * h + 3] * inverse);
    }
  } else {
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

// The scale max(v, 1e-10) / 448 and its inverse, both as division rounds them for every v that is a bf16 (tried for
// all of them), without the calls that divisions compile to.
__device__ __forceinline__ float e4m3_scale(float v, float& inverse) {
  constexpr float kInverse = 1.f / kE4M3Max;
  v = fmaxf(v, kMinAmax);
  const float quotient = v * kInverse;
  const float scale = fmaf(fmaf(-kE4M3Max, quotient, v), kInverse, quotient);
  inverse = reciprocal_approx(scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) inverse = fmaf(inverse, fmaf(-scale, inverse, 1.f), inverse);
  return scale;
}

__device__ __forceinline__ float largest_of(const Bf16x8& raw) {
  float values[8], largest = 0.f;
  raw.unpack(values);
#pragma unroll
  for (float value : values) largest = fmaxf(largest, fabsf(value));
  return largest;
}

// A row of x, eight columns (or twice that) a thread.
struct GatheredRow {
  Bf16x8 raw[kGatherVectors];

  __device__ __forceinline__ void load(const __nv_bfloat16* x, int width) {
#pragma unroll
    for (int i = 0; i < kGatherVectors; ++i) {
      const int column = 8 * (threadIdx.x + i * blockDim.x);
      raw[i].clear();
      if (column < width) raw[i].load(x + column);
    }
  }
  // The row's scale, in every thread. `maxima`: a float a warp, free again after the next barrier but one.
  __device__ __forceinline__ float scale(float* maxima, float& inverse) const {
    float largest = largest_of(raw[0]);
#pragma unroll
    for (int i = 1; i < kGatherVectors; ++i) largest = fmaxf(largest, largest_of(raw[i]));
    largest = warp_max(largest);
    const int lane = threadIdx.x % 32;
    if (lane == 0) maxima[threadIdx.x / 32] = largest;
    __syncthreads();
    return e4m3_scale(warp_max(lane < blockDim.x / 32 ? maxima[lane] : 0.f), inverse);
  }
  // Into row `row` of blobs of `padded` rows.
  template <Activation kActivation>
  __device__ __forceinline__ void store(uint8_t* blobs, int row, int padded, int k_blocks, float inverse) const {
#pragma unroll
    for (int i = 0; i < kGatherVectors; ++i) {
      const int v = threadIdx.x + i * blockDim.x;
      if (v >= k_blocks * (kBlockColumns / 8)) break;
      store_words<kActivation>(raw[i], blobs + int64_t(v / 16) * padded * row_bytes(kActivation), row, padded, v % 16,
                               inverse);
    }
  }
};

// kRows: rows of one piece that a block has in flight. One is best for latency, many for bandwidth.
template <Activation kActivation, int kRows>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  __shared__ float maxima[2][32];
  ptx::pdl_wait();
  ptx::pdl_trigger();
  const int tiles = *p.work.num_tiles;
  int turn = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Piece tile = load_tile(p.work, index);
    for (int tile_row = blockIdx.y * kRows; tile_row < tile.count; tile_row += gridDim.y * kRows) {
      const int first = tile_row % p.work.max_rows;
      const Piece piece = tile.part(tile_row - first, p.work.max_rows);
      const int padded = round_up(piece.count, 8), last = piece.count - 1;
      GatheredRow rows[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        rows[r].load(p.x + int64_t(p.pairs[piece.row + min(first + r, last)] / p.top_k) * p.x_stride, p.width);
      }
      uint8_t* blobs = p.blobs + int64_t(piece.padded_row) * p.k_blocks * row_bytes(kActivation);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float inverse = 1.f;
        if constexpr (kActivation == Activation::kFp8) {
          const float scale = rows[r].scale(maxima[turn ^= 1], inverse);
          if (threadIdx.x == 0 && first + r <= last) p.scales[piece.padded_row + first + r] = scale;
        }
        if (first + r <= last) rows[r].template store<kActivation>(blobs, first + r, padded, p.k_blocks, inverse);
      }
    }
  }
}

// FP8 and many rows: each token is quantised once, into p.codes [tokens, k_blocks * 128] (the columns of a blob's row
// before the swizzle) and p.code_scales, and then copied to all its places.
__global__ void __launch_bounds__(kGatherThreads) quantise_kernel(const __grid_constant__ GatherParams p) {
  __shared__ float maxima[2][32];
  ptx::pdl_wait();
  ptx::pdl_trigger();
  int turn = 0;
  for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    GatheredRow row;
    row.load(p.x + token * p.x_stride, p.width);
    float inverse;
    const float scale = row.scale(maxima[turn ^= 1], inverse);
    if (threadIdx.x == 0) p.code_scales[token] = scale;
    row.store<Activation::kFp8>(p.codes + int64_t(token) * p.k_blocks * kBlockColumns, 0, 1, p.k_blocks, inverse);
  }
}

// A warp a row, 16 bytes a lane.
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const __grid_constant__ GatherParams p) {
  constexpr int kBatch = 7;
  ptx::pdl_wait();
  ptx::pdl_trigger();
  const int tiles = *p.work.num_tiles, chunks = 8 * p.k_blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = kCopyThreads / 32;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Piece tile = load_tile(p.work, index);
    for (int tile_row = blockIdx.y * warps + warp; tile_row < tile.count; tile_row += gridDim.y * warps) {
      const int row = tile_row % p.work.max_rows;
      const Piece piece = tile.part(tile_row - row, p.work.max_rows);
      const int padded = round_up(piece.count, 8), token = p.pairs[piece.row + row] / p.top_k;
      const uint4* codes = reinterpret_cast<const uint4*>(p.codes + int64_t(token) * p.k_blocks * kBlockColumns);
      uint8_t* to = p.blobs + (int64_t(piece.padded_row) * p.k_blocks + row) * kBlockColumns;
      if (lane == 0) p.scales[piece.padded_row + row] = p.code_scales[token];
      for (int first = lane; first < chunks; first += 32 * kBatch) {
        uint4 words[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + 32 * i < chunks) words[i] = codes[first + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int chunk = first + 32 * i;
          if (chunk < chunks) {
            *reinterpret_cast<uint4*>(to + int64_t(chunk / 8) * padded * kBlockColumns + ((chunk ^ row) & 7) * 16) =
                words[i];
          }
        }
      }
    }
  }
}

}  // namespace kimi::moe
