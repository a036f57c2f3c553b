// Small arithmetic shared by host and device code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi {

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
__host__ __device__ constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

#ifdef __CUDACC__

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kE4M3Max = 448.f;

// 2^x and 1/x of the special function unit: 2 ulp and 1 ulp, results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Exactly 0 and 1 at the ends: e^-x saturates to inf or 0. Relative error up to 1e-7 * max(1, |x|).
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_approx(1.f + exp2_approx(-x * kLog2E)); }

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// Two floats to two adjacent bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Four floats to four E4M3 bytes, round to nearest even, saturating at +-448.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

#endif  // __CUDACC__

}  // namespace kimi
