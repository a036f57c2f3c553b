// RMSNorm of rows, with a bf16 output, an FP8 output with a scale per 128 columns, or both, from one read.
// A block owns whole rows and walks them with the grid's stride; the weight stays in registers and the next row is on
// its way while this one is reduced.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "params.h"
#include "rms_config.h"

namespace kimi::norm {

__device__ __forceinline__ void load_weight(const void* weight, bool is_f32, int column, float (&values)[8]) {
  if (is_f32) {
    const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(weight) + column);
    const float4 a = source[0], b = source[1];
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
  } else {
    Bf16x8 vector;
    vector.load(static_cast<const __nv_bfloat16*>(weight) + column);
    vector.unpack(values);
  }
}

template <int kVectors>
__global__ void __launch_bounds__(kMaxThreads) rms_kernel(const __grid_constant__ RmsParams p) {
  __shared__ float scratch[2][32];

  // ---- before the dependency wait: the weight belongs to no earlier kernel ----
  float weight[kVectors][8];
  int column[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    column[v] = (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVectorElements;
    if (column[v] < p.width) load_weight(p.weight, p.weight_f32, column[v], weight[v]);
  }
  ptx::pdl_wait();

  Bf16x8 next[kVectors];
  auto fetch = [&](int64_t row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      next[v].clear();
      if (row < p.rows && column[v] < p.width) next[v].load(p.x + row * p.x_stride + column[v]);
    }
  };
  fetch(blockIdx.x);

  int phase = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, phase ^= 1) {
    float x[kVectors][8];
    float square = 0.f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      next[v].unpack(x[v]);
#pragma unroll
      for (int i = 0; i < 8; ++i) square += x[v][i] * x[v][i];
    }
    fetch(row + gridDim.x);
    // Two scratch rows: a warp may start the next sum before the last one has read this one.
    const float rstd = rsqrtf(block_sum(square, scratch[phase]) / static_cast<float>(p.width) + p.eps);

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool inside = column[v] < p.width;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v][i] = inside ? x[v][i] * rstd * weight[v][i] : 0.f;
      if (inside && p.out != nullptr) {
        Bf16x8 packed;
        packed.pack(x[v]);
        packed.store(p.out + row * p.out_stride + column[v]);
      }
      if (p.q != nullptr) {
        // 16 neighbouring lanes hold one group. The scale is never 0, so an all-zero group stays zero.
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[v][i]));
        const float scale = fmaxf(warp_max<16>(largest), 1e-12f) / kE4M3Max;
        const float inverse = 1.f / scale;
        if (inside) {
          uint2 bytes;
          bytes.x = pack_e4m3(x[v][0] * inverse, x[v][1] * inverse, x[v][2] * inverse, x[v][3] * inverse);
          bytes.y = pack_e4m3(x[v][4] * inverse, x[v][5] * inverse, x[v][6] * inverse, x[v][7] * inverse);
          *reinterpret_cast<uint2*>(p.q + row * p.q_stride + column[v]) = bytes;
          if (threadIdx.x % 16 == 0) p.scale[row * p.scale_stride + column[v] / kQuantGroup] = scale;
        }
      }
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::norm
