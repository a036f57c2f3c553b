// The arithmetic of one KDA token, shared by decode and verify so that both give the same bits: every rounding is
// written out (no contraction left to the compiler) and every sum has one fixed tree, whatever the split of a head over
// blocks.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "params.h"

namespace kimi::kda {

__device__ __forceinline__ float dot4(float4 a, float4 b) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}

__device__ __forceinline__ float4 scale4(float4 a, float b) {
  return {__fmul_rn(a.x, b), __fmul_rn(a.y, b), __fmul_rn(a.z, b), __fmul_rn(a.w, b)};
}

__device__ __forceinline__ float4 decayed(float4 s, float4 decay) {
  return {__fmul_rn(s.x, decay.x), __fmul_rn(s.y, decay.y), __fmul_rn(s.z, decay.z), __fmul_rn(s.w, decay.w)};
}

__device__ __forceinline__ float4 corrected(float4 s, float delta, float4 k) {
  return {__fmaf_rn(delta, k.x, s.x), __fmaf_rn(delta, k.y, s.y), __fmaf_rn(delta, k.z, s.z),
          __fmaf_rn(delta, k.w, s.w)};
}

// For what goes into the state, where errors stay: within 2 ulp, and exactly 0 and 1 at the ends.
__device__ __forceinline__ float precise_sigmoid(float x) { return reciprocal_approx(__fadd_rn(1.f, expf(-x))); }

// SiLU of one channel's convolution, not rounded. Raw rows, widened from bf16, oldest first.
__device__ __forceinline__ float convolve(float4 weight, float x0, float x1, float x2, float x3) {
  float sum = __fmul_rn(weight.x, x0);
  sum = __fmaf_rn(weight.y, x1, sum);
  sum = __fmaf_rn(weight.z, x2, sum);
  sum = __fmaf_rn(weight.w, x3, sum);
  return __fmul_rn(sum, precise_sigmoid(sum));
}

// e^g of one key channel, g = lower_bound * sigmoid(e^a_log * (f + dt_bias)).
__device__ __forceinline__ float decay_of(float f, float a_log, float dt_bias, float lower_bound) {
  const float x = __fmul_rn(expf(a_log), __fadd_rn(f, dt_bias));
  return expf(__fmul_rn(lower_bound, precise_sigmoid(x)));
}

// From the sum of squares, and from those of the four 32-channel pieces.
__device__ __forceinline__ float inverse_length(float squares) { return rsqrtf(__fadd_rn(squares, 1e-6f)); }
__device__ __forceinline__ float inverse_length(float4 squares) {
  return inverse_length(__fadd_rn(__fadd_rn(squares.x, squares.y), __fadd_rn(squares.z, squares.w)));
}

constexpr float kQueryScale = 0.08838834764831845f;  // 128^-0.5

// The gated norm of one output channel; `squares` is the sum of o^2 over the head.
__device__ __forceinline__ __nv_bfloat16 gated_norm(float o, float squares, float weight, __nv_bfloat16 gate,
                                                    float eps) {
  const float scale = rsqrtf(__fmaf_rn(squares, 1.f / kHeadDim, eps));
  return __float2bfloat16_rn(__fmul_rn(__fmul_rn(__fmul_rn(o, scale), weight), sigmoid(__bfloat162float(gate))));
}

}  // namespace kimi::kda
