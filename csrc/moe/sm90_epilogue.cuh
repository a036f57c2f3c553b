// What happens to a finished tile: SiTU and requantisation into the second product's blobs, or rows of the output.
#pragma once

#include <type_traits>

#include "../common/quantise.cuh"
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

// tanh(v) for |v| < 0.25, relative error below 1e-6.
__device__ __forceinline__ float tanh_series(float v) {
  const float square = v * v;
  return v * fmaf(square,
                  fmaf(square, fmaf(square, fmaf(square, 62.f / 2835.f, -17.f / 315.f), 2.f / 15.f), -1.f / 3.f), 1.f);
}

// tanh(v) as a quotient, so that several share one reciprocal. Relative error below 1e-6 everywhere: the series where
// 1 - exp(-2v) would cancel.
struct Quotient {
  float above, below;
};
constexpr float kSeriesLimit = 0.25f;
__device__ __forceinline__ Quotient tanh_quotient(float v) {
  const float series = tanh_series(v), e = exp_fast(-2.f * fabsf(v));
  const bool small = fabsf(v) < kSeriesLimit;
  return Quotient{small ? series : copysignf(1.f - e, v), small ? 1.f : 1.f + e};
}

// exp(-gate) may be infinite; the reciprocal is 0 then, as the sigmoid. kSeries: linear_beta is given, and up within
// the series; the same value.
template <bool kSeries>
__device__ __forceinline__ float situ(float gate, float up, float beta, float inverse_beta, float linear_beta,
                                      float inverse_linear_beta) {
  const Quotient bounded = tanh_quotient(gate * inverse_beta);
  float above = beta * bounded.above, below = bounded.below * (1.f + exp_fast(-gate));
  if constexpr (kSeries) {
    above *= linear_beta * tanh_series(up * inverse_linear_beta);
  } else if (linear_beta > 0.f) {
    const Quotient linear = tanh_quotient(up * inverse_linear_beta);
    above *= linear_beta * linear.above, below *= linear.below;
  } else {
    above *= up;
  }
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(below));
  return above * inverse;
}

// Maxima over the eight lanes of a column of the warp (equal lane % 4), of kCount values >= 0 each: every step a lane
// hands on the half of its values that its partner keeps. A lane is left with the values first() .. of count().
template <int kCount, int kOffset = 16>
struct ColumnMaxima {
  static constexpr int kHalf = (kCount + 1) / 2;
  using Next = ColumnMaxima<kHalf, kOffset / 2>;
  static constexpr int kLeft = Next::kLeft;
  static __device__ __forceinline__ void run(const float (&values)[kCount], float (&left)[kLeft]) {
    const bool upper = threadIdx.x & kOffset;
    float kept[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float low = values[i], high = kHalf + i < kCount ? values[kHalf + i < kCount ? kHalf + i : 0] : 0.f;
      kept[i] = fmaxf(upper ? high : low, __shfl_xor_sync(kFullWarp, upper ? low : high, kOffset));
    }
    Next::run(kept, left);
  }
  static __device__ __forceinline__ int first() { return (threadIdx.x & kOffset ? kHalf : 0) + Next::first(); }
  static __device__ __forceinline__ int count(int of = kCount) {
    return Next::count(threadIdx.x & kOffset ? max(of - kHalf, 0) : min(of, kHalf));
  }
};
template <int kCount>
struct ColumnMaxima<kCount, 2> {
  static constexpr int kLeft = kCount;
  static __device__ __forceinline__ void run(const float (&values)[kCount], float (&left)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) left[i] = values[i];
  }
  static __device__ __forceinline__ int first() { return 0; }
  static __device__ __forceinline__ int count(int of) { return of; }
};

// Where column 16 * warp + 8 * slab + group of a half block lies among the slab's 32, counted in elements.
template <Activation kActivation>
__device__ __forceinline__ int stored_position(int warp, int group) {
  const int half = group >> 2, n = group & 3;
  if constexpr (kActivation == Activation::kFp8) {
    return 16 * half + 4 * warp + n;
  } else {
    return 16 * half + 8 * (n & 1) + 2 * warp + (n >> 1);
  }
}

// acc: rows g (gate, even fours) and g + 8 (up) of this warp's 16 rows; columns are sorted rows of the piece. The
// warpgroups go through it apart, so that one multiplies meanwhile: each has 32 of the tile's 64 columns.
template <class Config, int kN>
__device__ __forceinline__ void store_hidden(const GemmParams& p, const Piece& piece, int tile, float (&acc)[kN / 2],
                                             float scale_gate, float scale_up, uint8_t* shared,
                                             const FragmentPlace& place) {
  constexpr bool kFp8 = Config::kFp8;
  constexpr int kChunks = kFp8 ? 2 : 4;  // of 16 bytes: the slab's part of a row
  const int warp = place.warp, g = place.group(), t = place.quad(), thread = warp * 32 + place.lane;
  const int column = tile * 64 + warp * 16 + place.slab * 8 + g;
  const float inverse_beta = 1.f / p.beta, inverse_linear = p.linear_beta > 0.f ? 1.f / p.linear_beta : 0.f;
  auto row_of = [&](int i) { return 8 * (i / 2) + 2 * t + i % 2; };
  auto barrier = [&] { ptx::named_barrier_sync(kEpilogueBarrier + place.slab, 128); };

  float h[kN / 4], largest = 0.f;
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
    acc[4 * (i / 2) + i % 2] *= scale_gate;
    acc[4 * (i / 2) + 2 + i % 2] *= scale_up;
    largest = fmaxf(largest, fabsf(acc[4 * (i / 2) + 2 + i % 2]));
  }
  if (p.raw != nullptr && column < p.inner) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      if (row_of(i) < piece.count) {
        __nv_bfloat16* raw = p.raw + int64_t(piece.row + row_of(i)) * 2 * p.inner + column;
        raw[0] = __float2bfloat16(acc[4 * (i / 2) + i % 2]);
        raw[p.inner] = __float2bfloat16(acc[4 * (i / 2) + 2 + i % 2]);
      }
    }
  }
  auto activate = [&](auto series) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      h[i] = situ<decltype(series)::value>(acc[4 * (i / 2) + i % 2], acc[4 * (i / 2) + 2 + i % 2], p.beta, inverse_beta,
                                           p.linear_beta, inverse_linear);
    }
  };
  if (p.linear_beta > 0.f && __all_sync(kFullWarp, largest * inverse_linear < kSeriesLimit)) {
    activate(std::true_type());
  } else {
    activate(std::false_type());
  }

  uint8_t* const maxima = shared + place.slab * Config::kMaxRows * (4 + 16 * kChunks);  // FP8: [row][4 warps]
  uint8_t* const staged = maxima + Config::kMaxRows * 4;                                // [row][chunks], swizzled
  auto staged_chunk = [&](int row, int chunk) {
    return staged + (row * kChunks + (chunk ^ ((kFp8 ? row >> 2 : row >> 1) & (kChunks - 1)))) * 16;
  };
  const int padded = round_up(piece.count, 8);
  const int position = stored_position<Config::kActivation>(warp, g) * (kFp8 ? 1 : 2);  // bytes
  uint8_t* blob = p.hidden + (int64_t(piece.padded_row) * p.hidden_k_blocks + (tile >> 1) * padded) * Config::kRowBytes;
  if constexpr (kFp8) {
    using Maxima = ColumnMaxima<kN / 4>;
    float left[Maxima::kLeft];
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) acc[i] = fabsf(h[i]);
    Maxima::run(reinterpret_cast<const float (&)[kN / 4]>(acc), left);
    const int first = Maxima::first(), count = Maxima::count();
#pragma unroll
    for (int j = 0; j < Maxima::kLeft; ++j) {
      if (j < count) maxima[row_of(first + j) * 4 + warp] = mxfp8_byte(left[j]);
    }
    barrier();
    // One thread a row: the warps' exponents become one, and the factor that divides by it takes their place.
    for (int row = thread; row < padded; row += 128) {
      const uint32_t bytes = *reinterpret_cast<const uint32_t*>(maxima + 4 * row);
      const uint32_t pairs = __vmaxu4(bytes, bytes >> 16), byte = max(pairs & 0xff, pairs >> 8 & 0xff);
      *reinterpret_cast<float*>(maxima + 4 * row) = mxfp8_factor(byte);
      p.exponents[int64_t(piece.padded_row) * hidden_groups(p.hidden_k_blocks) + (2 * tile + place.slab) * padded +
                  row] = byte;
    }
    barrier();
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int row = row_of(i);
      const float factor = *reinterpret_cast<const float*>(maxima + 4 * row);
      staged_chunk(row, position / 16)[position % 16] = __nv_cvt_float_to_fp8(h[i] * factor, __NV_SATFINITE, __NV_E4M3);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      uint8_t* chunk = staged_chunk(row_of(i), position / 16);
      *reinterpret_cast<__nv_bfloat16*>(chunk + position % 16) = __float2bfloat16(h[i]);
    }
  }
  barrier();

  // 16-byte chunks into the 128-byte swizzle: a quarter of a row of 128 bytes (FP8), half of one (BF16).
  uint8_t* rows = blob + (kFp8 ? 0 : (tile & 1) * padded * 128);
  const int first_chunk = (kFp8 ? (tile & 1) * 4 : 0) + place.slab * kChunks;
  for (int i = thread; i < piece.count * kChunks; i += 128) {
    const int row = i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<uint4*>(rows + row * 128 + (((first_chunk + chunk) ^ (row & 7)) << 4)) =
        *reinterpret_cast<const uint4*>(staged_chunk(row, chunk));
  }
  // The next tile's maxima and staged rows lie behind its first barriers, except its maxima, which nobody reads any
  // more.
  if constexpr (!kFp8) barrier();
}

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t value) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

// Row g of this warp's 16 is column 4 (g / 2) + g % 2 of them, row g + 8 the one two further on: transposed, a thread
// holds four neighbouring columns of a row, and a quad the 32 bytes of a sector.
template <class Config, int kN>
__device__ __forceinline__ void store_rows(const GemmParams& p, const Piece& piece, int tile, float (&acc)[kN / 2],
                                           float scale_top, float scale_bottom, const FragmentPlace& place) {
  const int column = tile * kTileRows + place.slab * 64 + place.warp * 16 + 4 * place.quad();
  if (column >= p.width) return;            // the whole warp: width is a multiple of 32
  constexpr int kBatch = kN <= 32 ? 1 : 8;  // pairs asked for at once; small tiles have no registers for more
#pragma unroll
  for (int first = 0; first < kN / 8; first += kBatch) {
    int32_t pairs[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch && first + i < kN / 8; ++i) {
      const int row = 8 * (first + i) + place.group();
      if (kBatch > 1) pairs[i] = -1;
      if (row < piece.count) pairs[i] = p.pairs[piece.row + row];
    }
#pragma unroll
    for (int i = 0; i < kBatch && first + i < kN / 8; ++i) {
      const int j = 4 * (first + i), row = 8 * (first + i) + place.group();
      const uint32_t low = transpose_8x8(pack_bf16(acc[j] * scale_top, acc[j + 1] * scale_top));
      const uint32_t high = transpose_8x8(pack_bf16(acc[j + 2] * scale_bottom, acc[j + 3] * scale_bottom));
      if (kBatch > 1 ? pairs[i] >= 0 : row < piece.count) {
        *reinterpret_cast<uint2*>(p.out + int64_t(pairs[i]) * p.out_stride + column) = make_uint2(low, high);
      }
    }
  }
}

}  // namespace kimi::moe
