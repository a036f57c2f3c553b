// A block a token, 8 columns a thread: the rows of all choices are asked for before the first is added, in choice
// order, so that the result depends on nothing but the token.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "finalize.h"

namespace kimi::moe {

// Few tokens are a matter of latency: all rows of a token at once, one block an SM. Many are a matter of bandwidth:
// fewer rows a thread in flight, two blocks an SM, so that one loads while the other reduces.
constexpr int kFewThreads = 512, kFewBytes = 256;
constexpr int kManyThreads = 1024, kManyBytes = 64;

template <bool kF32>
struct Row8 {
  uint4 raw[kF32 ? 2 : 1];

  __device__ __forceinline__ void load(const void* base, int64_t offset) {
    const uint4* source = reinterpret_cast<const uint4*>(static_cast<const char*>(base) + offset * (kF32 ? 4 : 2));
    raw[0] = source[0];
    if constexpr (kF32) raw[1] = source[1];
  }

  __device__ __forceinline__ void unpack(float (&x)[8]) const {
    if constexpr (kF32) {
      x[0] = __uint_as_float(raw[0].x), x[1] = __uint_as_float(raw[0].y);
      x[2] = __uint_as_float(raw[0].z), x[3] = __uint_as_float(raw[0].w);
      x[4] = __uint_as_float(raw[1].x), x[5] = __uint_as_float(raw[1].y);
      x[6] = __uint_as_float(raw[1].z), x[7] = __uint_as_float(raw[1].w);
    } else {
      Bf16x8 vector;
      vector.raw = raw[0];
      vector.unpack(x);
    }
  }

  __device__ __forceinline__ void store(void* base, int64_t offset, const float (&x)[8]) {
    if constexpr (kF32) {
      float4* target = reinterpret_cast<float4*>(static_cast<float*>(base) + offset);
      target[0] = make_float4(x[0], x[1], x[2], x[3]);
      target[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
      Bf16x8 vector;
      vector.pack(x);
      vector.store(static_cast<__nv_bfloat16*>(base) + offset);
    }
  }
};

template <bool kF32, int kThreads, int kBytes>
__global__ void __launch_bounds__(kThreads) finalize_kernel(const __grid_constant__ FinalizeParams p) {
  __shared__ float scratch[32];
  const int column = threadIdx.x * 8;
  const bool inside = column < p.width;
  constexpr int kBatch = kBytes / static_cast<int>(sizeof(Row8<kF32>));  // rows in flight
  const int64_t token = blockIdx.x;

  ptx::pdl_wait();
  ptx::pdl_trigger();

  const int32_t* row_index = p.row_index + token * p.k;
  const float* weights = p.weights + token * p.k;
  float sum[8] = {};
  for (int first = 0; first < p.k; first += kBatch) {
    Row8<kF32> row[kBatch];
    int index[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      index[j] = first + j < p.k ? row_index[first + j] : -1;
      if (p.own_rows) {
        const bool here = index[j] >= p.first_expert && index[j] < p.last_expert && first + j < p.k;
        index[j] = here ? static_cast<int>(token * p.k) + first + j : -1;
      }
      if (index[j] >= 0 && inside) row[j].load(p.rows, index[j] * p.rows_stride + column);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (index[j] < 0 || !inside) continue;  // the weight of a missing row is not looked at
      const float weight = weights[first + j];
      float x[8];
      row[j].unpack(x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += weight * x[i];
    }
  }
  if (p.norm != nullptr) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) square += sum[i] * sum[i];
    float scale[8];
    if (inside) {
      if (p.norm_f32) {
        Row8<true> weight;
        weight.load(p.norm, column);
        weight.unpack(scale);
      } else {
        Row8<false> weight;
        weight.load(p.norm, column);
        weight.unpack(scale);
      }
    }
    const float rstd = rsqrtf(block_sum(square, scratch) / static_cast<float>(p.width) + p.eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= rstd * scale[i];
  }
  if (inside) Row8<kF32>().store(p.out, token * p.out_stride + column, sum);
}

}  // namespace kimi::moe
