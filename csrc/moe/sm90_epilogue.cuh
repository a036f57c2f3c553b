// What happens to a finished tile: SiTU and requantisation into the second product's blobs, or rows of the output.
#pragma once

#include "../common/tile.cuh"
#include "sm90_config.h"
#include "sm90_fragment.cuh"
#include "work.cuh"

namespace kimi::moe {

// exp(v) for v <= 0, or where infinity will do: what underflows is 0.
__device__ __forceinline__ float exp_fast(float v) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * kLog2E));
  return e;
}

// tanh(v) as a quotient, so that several share one reciprocal. Relative error below 1e-6 everywhere: the series where
// 1 - exp(-2v) would cancel.
struct Quotient {
  float above, below;
};
__device__ __forceinline__ Quotient tanh_quotient(float v) {
  const float square = v * v;
  const float series =
      v *
      fmaf(square, fmaf(square, fmaf(square, fmaf(square, 62.f / 2835.f, -17.f / 315.f), 2.f / 15.f), -1.f / 3.f), 1.f);
  const float e = exp_fast(-2.f * fabsf(v));
  const bool small = fabsf(v) < 0.25f;
  return Quotient{small ? series : copysignf(1.f - e, v), small ? 1.f : 1.f + e};
}

// The special function unit is what bounds the epilogue: three exponentials and one reciprocal. exp(-gate) may be
// infinite; the reciprocal is 0 then, as the sigmoid.
__device__ __forceinline__ float situ(float gate, float up, float beta, float inverse_beta, float linear_beta,
                                      float inverse_linear_beta) {
  const Quotient bounded = tanh_quotient(gate * inverse_beta);
  float above = beta * bounded.above, below = bounded.below * (1.f + exp_fast(-gate));
  if (linear_beta > 0.f) {
    const Quotient linear = tanh_quotient(up * inverse_linear_beta);
    above *= linear_beta * linear.above, below *= linear.below;
  } else {
    above *= up;
  }
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(below));
  return above * inverse;
}

// Where column c (0..63) of a half block lies, counted in elements.
template <Activation kActivation>
__device__ __forceinline__ int stored_position(int c) {
  const int t = c >> 4, step = (c >> 3) & 1, half = (c >> 2) & 1, n = c & 3;
  if constexpr (kActivation == Activation::kFp8) {
    return 32 * step + 16 * half + 4 * t + n;
  } else {
    return 16 * (2 * step + half) + 8 * (n & 1) + 2 * t + (n >> 1);
  }
}

// acc: rows g (gate, even fours) and g + 8 (up) of this warp's 16 rows; columns are sorted rows of the piece.
template <class Config, int kN>
__device__ __forceinline__ void store_hidden(const GemmParams& p, const Piece& piece, int tile, float (&acc)[kN / 2],
                                             float scale_gate, float scale_up, uint8_t* shared,
                                             const FragmentPlace& place) {
  constexpr bool kFp8 = Config::kFp8;
  const int warp = place.slab * 4 + place.warp, g = place.group(), t = place.quad();
  const int column = warp * 8 + g;  // of the tile's 64
  const float inverse_beta = 1.f / p.beta, inverse_linear = p.linear_beta > 0.f ? 1.f / p.linear_beta : 0.f;

  if (p.raw != nullptr && tile * 64 + column < p.inner) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int row = 8 * (i / 2) + 2 * t + i % 2;
      if (row < piece.count) {
        __nv_bfloat16* raw = p.raw + int64_t(piece.row + row) * 2 * p.inner + tile * 64 + column;
        raw[0] = __float2bfloat16(acc[4 * (i / 2) + i % 2] * scale_gate);
        raw[p.inner] = __float2bfloat16(acc[4 * (i / 2) + 2 + i % 2] * scale_up);
      }
    }
  }

  float h[kN / 4];
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
    h[i] = situ(acc[4 * (i / 2) + i % 2] * scale_gate, acc[4 * (i / 2) + 2 + i % 2] * scale_up, p.beta, inverse_beta,
                p.linear_beta, inverse_linear);
  }

  uint8_t* staged = shared + Config::kMaximaBytes;
  const int padded = round_up(piece.count, 8);
  uint8_t* blob = p.hidden + int64_t(piece.padded_row) * p.hidden_k_blocks * Config::kRowPitch +
                  int64_t(tile >> 1) * padded * Config::kRowPitch;
  if constexpr (kFp8) {
    float* maxima = reinterpret_cast<float*>(shared);  // [row][8 warps]
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      float largest = fabsf(h[i]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
      }
      if (g == 0) maxima[(8 * (i / 2) + 2 * t + i % 2) * 8 + warp] = largest;
    }
    ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    // One thread a row: the maxima become the scale, and its inverse takes their place.
    const int thread = warp * 32 + place.lane;
    if (thread < padded) {
      float* row_maxima = maxima + thread * 8;
      const float4 low = *reinterpret_cast<const float4*>(row_maxima);
      const float4 high = *reinterpret_cast<const float4*>(row_maxima + 4);
      const float largest =
          fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
      const float scale = __fdiv_rn(fmaxf(largest, 1e-10f), kE4M3Max);
      *row_maxima = __frcp_rn(scale);
      if (thread < piece.count) {
        reinterpret_cast<float*>(blob + padded * kBlockColumns)[(tile & 1) * padded + thread] = scale;
      }
    }
    ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
    const int position = stored_position<Activation::kFp8>(column);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int row = 8 * (i / 2) + 2 * t + i % 2;
      staged[row * Config::kHiddenStride + position] =
          __nv_cvt_float_to_fp8(h[i] * maxima[row * 8], __NV_SATFINITE, __NV_E4M3);
    }
  } else {
    const int position = stored_position<Activation::kBf16>(column);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int row = 8 * (i / 2) + 2 * t + i % 2;
      reinterpret_cast<__nv_bfloat16*>(staged + row * Config::kHiddenStride)[position] = __float2bfloat16(h[i]);
    }
  }
  ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);

  // 16-byte chunks into the 128-byte swizzle: half a row of 128 bytes (FP8), a whole one (BF16).
  constexpr int kChunks = kFp8 ? 4 : 8;
  uint8_t* half = blob + (kFp8 ? 0 : (tile & 1) * padded * 128);
  const int first_chunk = kFp8 ? (tile & 1) * 4 : 0;
  for (int i = warp * 32 + place.lane; i < piece.count * kChunks; i += kConsumerThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<uint4*>(half + row * 128 + (((first_chunk + chunk) ^ (row & 7)) << 4)) =
        *reinterpret_cast<const uint4*>(staged + row * Config::kHiddenStride + chunk * 16);
  }
  // The next tile's maxima and staged rows lie behind its first barrier, except its maxima, which nobody reads any
  // more.
  if constexpr (!kFp8) ptx::named_barrier_sync(kConsumerBarrier, kConsumerThreads);
}

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t value) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

template <class Config, int kN>
__device__ __forceinline__ void store_rows(const GemmParams& p, const Piece& piece, int tile, float (&acc)[kN / 2],
                                           float scale_top, float scale_bottom, const FragmentPlace& place) {
  const int first = tile * kTileRows + place.slab * 64 + place.warp * 16;  // of this warp's 16 columns of out
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const uint32_t top = transpose_8x8(pack_bf16(acc[4 * j] * scale_top, acc[4 * j + 1] * scale_top));
    const uint32_t bottom = transpose_8x8(pack_bf16(acc[4 * j + 2] * scale_bottom, acc[4 * j + 3] * scale_bottom));
    const int row = 8 * j + place.group();
    if (row < piece.count && first < p.width) {
      const int64_t pair = p.pairs[piece.row + row];
      __nv_bfloat16* out = p.out + pair * p.out_stride + first + 2 * place.quad();
      *reinterpret_cast<uint32_t*>(out) = top;
      *reinterpret_cast<uint32_t*>(out + 8) = bottom;
    }
  }
}

}  // namespace kimi::moe
