// Rounding to FP8 groups in registers. A thread holds 8 neighbouring values, kLanes neighbouring lanes a group.
// Same rules as the reference: FP8 scale = max(amax, 1e-10) / 448 and value = E4M3(x * (1 / scale)); MXFP8 scale = the
// smallest power of two that keeps amax within 448. NaN spreads over its group.
#pragma once

#include "tile.cuh"

namespace kimi {

constexpr float kMinAmax = 1e-10f;

__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

template <int kLanes>
__device__ __forceinline__ float group_amax(const float (&x)[8]) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = max_nan(amax, fabsf(x[i]));
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    amax = max_nan(amax, __shfl_xor_sync(kFullWarp, amax, offset));
  }
  return amax;
}

__device__ __forceinline__ uint2 pack_e4m3(const float (&x)[8], float factor) {
  return make_uint2(pack_e4m3(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor),
                    pack_e4m3(x[4] * factor, x[5] * factor, x[6] * factor, x[7] * factor));
}

__device__ __forceinline__ float fp8_scale(float amax) { return max_nan(amax, kMinAmax) / kE4M3Max; }

// The biased exponent byte; 255 when amax is not finite.
__device__ __forceinline__ int mxfp8_byte(float amax) {
  const uint32_t bits = __float_as_uint(amax);
  const int exponent = static_cast<int>(bits >> 23);
  if (exponent >= 255) return 255;
  const int byte = exponent - 8 + ((bits & 0x7fffffu) > 0x600000u);  // 448 is 1.75 * 2^8
  return byte > 0 ? byte : 0;
}

// 2^(127 - byte), exact; for 255 it is the denormal 2^-128.
__device__ __forceinline__ float mxfp8_factor(int byte) {
  return byte <= 253 ? __uint_as_float(static_cast<uint32_t>(254 - byte) << 23)
                     : __uint_as_float(byte == 254 ? 0x00400000u : 0x00200000u);
}

}  // namespace kimi
