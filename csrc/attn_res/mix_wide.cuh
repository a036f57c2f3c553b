// Any number of sources and any width: a CTA a token, every source read twice, the mix kept in shared memory as fp32.
#pragma once

#include "mix_common.cuh"

namespace kimi::attn_res {

// Source j of a token at a column; j == num_blocks is the running sum.
__device__ __forceinline__ Bf16x8 wide_source(const MixParams& p, int64_t token, int j, int column) {
  Bf16x8 source;
  if (j < p.num_blocks) {
    source.load(p.blocks + j * p.block_stride + token * p.block_row_stride + column);
    return source;
  }
  source.load(p.partial + token * p.partial_stride + column);
  if (p.delta != nullptr) {
    Bf16x8 delta;
    delta.load(p.delta + token * p.delta_stride + column);
    add_rounded(source, delta);
  }
  return source;
}

__global__ void __launch_bounds__(kWideThreads) mix_wide_kernel(const __grid_constant__ MixParams p) {
  extern __shared__ __align__(16) float mix[];  // [width]
  __shared__ float scratch[2][32];
  __shared__ float score[kMaxBlocks + 1];
  ptx::pdl_wait();

  const int64_t token = blockIdx.x;
  const int sources = p.num_blocks + 1;
  constexpr int kStep = kWideThreads * kVector;
  for (int j = 0; j < sources; ++j) {
    float dot = 0.f, square = 0.f;
    for (int column = threadIdx.x * kVector; column < p.width; column += kStep) {
      float weight[kVector];
      load_score_weight(p, column, weight);
      accumulate_score(wide_source(p, token, j, column), weight, dot, square);
    }
    dot = block_sum(dot, scratch[0]);
    square = block_sum(square, scratch[1]);
    if (threadIdx.x == 0) score[j] = dot * rsqrtf(square / static_cast<float>(p.width) + p.eps);
    __syncthreads();
  }
  float largest = -INFINITY, sum = 0.f;
  for (int j = 0; j < sources; ++j) largest = fmaxf(largest, score[j]);
  for (int j = 0; j < sources; ++j) sum += exp2f((score[j] - largest) * kLog2E);

  float square = 0.f;
  for (int column = threadIdx.x * kVector; column < p.width; column += kStep) {
    float values[kVector] = {};
    for (int j = 0; j < sources; ++j) {
      accumulate_mix(wide_source(p, token, j, column), exp2f((score[j] - largest) * kLog2E) / sum, values);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) square += values[i] * values[i];
    *reinterpret_cast<float4*>(mix + column) = make_float4(values[0], values[1], values[2], values[3]);
    *reinterpret_cast<float4*>(mix + column + 4) = make_float4(values[4], values[5], values[6], values[7]);
    // Written last: partial_out may be partial or delta, which this thread has read for the last time.
    if (p.partial_out != nullptr) {
      wide_source(p, token, p.num_blocks, column).store(p.partial_out + token * p.partial_out_stride + column);
    }
  }
  const float rstd = rsqrtf(block_sum(square, scratch[0]) / static_cast<float>(p.width) + p.eps);
  for (int column = threadIdx.x * kVector; column < p.width; column += kStep) {
    float weight[kVector];
    load_weight(p.out_norm, p.out_norm_f32, column, weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) weight[i] *= mix[column + i] * rstd;
    Bf16x8 packed;
    packed.pack(weight);
    packed.store(p.x + token * p.x_stride + column);
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::attn_res
