// RMSNorm of rows, with a bf16 output, an FP8 output with a scale per 128 columns, or both, from one read.
// A block owns whole rows and walks them with the grid's stride; the next row is on its way while this one is reduced.
// Values stay packed between the sum and the scaling, so that three blocks of K3's width share an SM.
#pragma once

#include "../common/ptx.cuh"
#include "../common/quantise.cuh"
#include "params.h"
#include "rms_config.h"
#include "weight.cuh"

namespace kimi::norm {

template <int kVectors, bool kWeightF32>
__global__ void __launch_bounds__(kMaxThreads) rms_kernel(const __grid_constant__ RmsParams p) {
  __shared__ float scratch[2][32];

  int column[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    column[v] = (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVectorElements;
  }
  // ---- before the dependency wait: the weight belongs to no earlier kernel; this brings it into L1 ----
  Weight8<kWeightF32> weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column[v] < p.width) weight[v].load(p.weight, column[v]);
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
    Bf16x8 current[kVectors];
    float square = 0.f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[8];
      current[v] = next[v];
      current[v].unpack(x);
#pragma unroll
      for (int i = 0; i < 8; ++i) square += x[i] * x[i];
    }
    fetch(row + gridDim.x);
    // Two scratch rows: a warp may start the next sum before the last one has read this one.
    const float rstd = rsqrtf(block_sum(square, scratch[phase]) / static_cast<float>(p.width) + p.eps);

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool inside = column[v] < p.width;
      float x[8], scale[8];
      current[v].forget();
      current[v].unpack(x);
      weight[v].unpack(scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = inside ? x[i] * rstd * scale[i] : 0.f;
      if (inside && p.out != nullptr) {
        Bf16x8 packed;
        packed.pack(x);
        packed.store(p.out + row * p.out_stride + column[v]);
      }
      if (p.q != nullptr) {
        const float group_scale = fp8_scale(group_amax<kQuantGroup / kVectorElements>(x));
        if (inside) {
          *reinterpret_cast<uint2*>(p.q + row * p.q_stride + column[v]) = pack_e4m3(x, 1.f / group_scale);
          if (threadIdx.x % (kQuantGroup / kVectorElements) == 0) {
            p.scale[row * p.scale_stride + column[v] / kQuantGroup] = group_scale;
          }
        }
      }
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::norm
