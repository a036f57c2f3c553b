// Brings h to one scale a row. The first product leaves it with a power of two per 32 columns, since the parts of a row
// are made by different warpgroups; the largest of them becomes the row's, and codes of the other groups lose the
// difference from their exponents: exact but for what becomes subnormal, below 2^-14 of the row's maximum.
//
// A warp takes a row.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "params.h"
#include "sm90_fragment.cuh"
#include "work.cuh"

namespace kimi::moe {

constexpr int kSettleThreads = 256;

// Four E4M3 times a power of two, rounded to nearest even. Exact in f16 wherever the result is not rounded to 0.
__device__ __forceinline__ uint32_t scale_e4m3(uint32_t codes, __half2 factor) {
  uint32_t out = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2_raw wide =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> (16 * i)), __NV_E4M3);
    const __half2 scaled = __hmul2(__half2(wide), factor);
    out |= uint32_t(__nv_cvt_halfraw2_to_fp8x2(__half2_raw(scaled), __NV_SATFINITE, __NV_E4M3)) << (16 * i);
  }
  return out;
}

__global__ void __launch_bounds__(kSettleThreads) settle_kernel(const __grid_constant__ SettleParams p) {
  constexpr int kBatch = 6;
  // Before the wait: until its own wait the second product reads weights and the work list only, and both were there
  // when the first product let this kernel start.
  ptx::pdl_trigger();
  ptx::pdl_wait();
  const int tiles = *p.work.num_tiles, groups = hidden_groups(p.k_blocks), chunks = 8 * p.k_blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = kSettleThreads / 32;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Piece tile = load_tile(p.work, index);
    for (int tile_row = blockIdx.y * warps + warp; tile_row < tile.count; tile_row += gridDim.y * warps) {
      const int row = tile_row % p.work.max_rows;
      const Piece piece = tile.part(tile_row - row, p.work.max_rows);
      const int padded = round_up(piece.count, 8);
      const uint8_t* exponents = p.exponents + int64_t(piece.padded_row) * groups + row;
      int top = 0;
      for (int group = lane; group < groups; group += 32) top = max(top, int(exponents[group * padded]));
      top = __reduce_max_sync(kFullWarp, top);
      if (lane == 0) p.scales[piece.padded_row + row] = exponent_value(top);
      uint8_t* codes = p.hidden + (int64_t(piece.padded_row) * p.k_blocks + row) * kBlockColumns;
      for (int first = lane; first < chunks; first += 32 * kBatch) {
        uint4 words[kBatch];
        int down[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int chunk = first + 32 * i, group = chunk / 8 * 4 + (((chunk ^ row) >> 1) & 3);
          down[i] = chunk < chunks ? top - exponents[group * padded] : 0;
          if (down[i] > 0) {
            words[i] =
                *reinterpret_cast<const uint4*>(codes + int64_t(chunk / 8) * padded * kBlockColumns + chunk % 8 * 16);
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (down[i] <= 0) continue;
          const int chunk = first + 32 * i;
          const __half2 factor = __float2half2_rn(__uint_as_float((127 - min(down[i], 24)) << 23));
          words[i].x = scale_e4m3(words[i].x, factor), words[i].y = scale_e4m3(words[i].y, factor);
          words[i].z = scale_e4m3(words[i].z, factor), words[i].w = scale_e4m3(words[i].w, factor);
          *reinterpret_cast<uint4*>(codes + int64_t(chunk / 8) * padded * kBlockColumns + chunk % 8 * 16) = words[i];
        }
      }
    }
  }
}

}  // namespace kimi::moe
