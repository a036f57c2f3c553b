// What one thread, warp or block does with a piece of a row: 16-byte vectors, reductions in a fixed order, padding.
#pragma once

#include <cstdint>

#include "math.h"

namespace kimi {

constexpr unsigned kFullWarp = 0xffffffffu;

// Eight bf16 in one 16-byte access.
struct alignas(16) Bf16x8 {
  uint4 raw;

  __device__ __forceinline__ void load(const __nv_bfloat16* source) { raw = *reinterpret_cast<const uint4*>(source); }
  __device__ __forceinline__ void store(__nv_bfloat16* target) const { *reinterpret_cast<uint4*>(target) = raw; }
  __device__ __forceinline__ void clear() { raw = make_uint4(0, 0, 0, 0); }

  // From here on the compiler knows nothing of these bits: it unpacks again instead of keeping eight floats alive.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w)); }

  __device__ __forceinline__ void unpack(float (&values)[8]) const {
    values[0] = bf16_low(raw.x), values[1] = bf16_high(raw.x);
    values[2] = bf16_low(raw.y), values[3] = bf16_high(raw.y);
    values[4] = bf16_low(raw.z), values[5] = bf16_high(raw.z);
    values[6] = bf16_low(raw.w), values[7] = bf16_high(raw.w);
  }

  __device__ __forceinline__ void pack(const float (&values)[8]) {
    raw = make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]),
                     pack_bf16(values[6], values[7]));
  }
};

// Sum over groups of kWidth neighbouring lanes; every lane gets it, and in the same bits: the additions commute.
template <int kWidth = 32>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

template <int kWidth = 32>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// Which of kCount values a lane holds after warp_sum_many; -1: none.
template <int kCount>
__device__ __forceinline__ int warp_sum_many_index() {
  int index = 0, left = kCount, count = kCount;  // of `count` places `left` hold a value
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const int half = (count + 1) / 2;
    if (threadIdx.x & offset) {
      index += half;
      left -= half;
    } else {
      left = left < half ? left : half;
    }
    count = half;
  }
  return left > 0 ? index : -1;
}

// Sums kCount <= 32 values over the warp in about kCount + 4 shuffles instead of 5 * kCount: each step a lane hands on
// the half of the values that its partner keeps. A lane ends with one total, that of warp_sum_many_index().
template <int kCount, int kOffset = 16>
__device__ __forceinline__ float warp_sum_many(const float (&values)[kCount]) {
  constexpr int kHalf = (kCount + 1) / 2;
  const bool upper = threadIdx.x & kOffset;
  float kept[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = values[i], high = kHalf + i < kCount ? values[kHalf + i < kCount ? kHalf + i : 0] : 0.f;
    kept[i] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, kOffset);
  }
  if constexpr (kOffset == 1) {
    return kept[0];
  } else {
    return warp_sum_many<kHalf, kOffset / 2>(kept);
  }
}

// Sum over the block; `scratch` has a float for each warp and is free for reuse after the next block barrier.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  value = warp_sum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.f);
}

// Rows that count: min(T, *num_tokens). Read after the dependency wait, the scalar is written by an earlier kernel.
__device__ __forceinline__ int64_t live_tokens(const int32_t* num_tokens, int64_t tokens) {
  if (num_tokens == nullptr) return tokens;
  const int64_t live = *num_tokens;
  return live < 0 ? 0 : (live < tokens ? live : tokens);
}

}  // namespace kimi
