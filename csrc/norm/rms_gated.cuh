// RMSNorm of each 128 columns times sigmoid(gate): 16 lanes hold a group, so a sum is four shuffles and no barrier.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "params.h"
#include "rms_config.h"
#include "weight.cuh"

namespace kimi::norm {

constexpr int kGroupLanes = kGroupWidth / kVectorElements;
constexpr int kGatedThreads = 256;
constexpr int kGatedGroups = kGatedThreads / kGroupLanes;  // of a block

template <bool kWeightF32>
__global__ void __launch_bounds__(kGatedThreads) rms_gated_kernel(const __grid_constant__ RmsGatedParams p) {
  const int lane = threadIdx.x % kGroupLanes;
  Weight8<kWeightF32> packed_weight;
  packed_weight.load(p.weight, lane * kVectorElements);
  float weight[8];
  packed_weight.unpack(weight);
  ptx::pdl_wait();

  const int64_t groups = p.rows * p.heads, step = static_cast<int64_t>(gridDim.x) * kGatedGroups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGatedGroups + threadIdx.x / kGroupLanes;
  // Whole warps go round together: the shuffles need both groups of a warp.
  for (int64_t index = first; index - threadIdx.x / kGroupLanes % 2 < groups; index += step) {
    const bool inside = index < groups;
    const int64_t row = index / p.heads;
    const int64_t column = (index - row * p.heads) * kGroupWidth + lane * kVectorElements;
    Bf16x8 vector, gates;
    vector.clear();
    gates.clear();
    if (inside) {
      vector.load(p.x + row * p.x_stride + column);
      gates.load(p.gate + row * p.gate_stride + column);
    }
    float x[8], gate[8], square = 0.f;
    vector.unpack(x);
    gates.unpack(gate);
#pragma unroll
    for (int i = 0; i < 8; ++i) square += x[i] * x[i];
    const float rstd = rsqrtf(warp_sum<kGroupLanes>(square) / kGroupWidth + p.eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= rstd * weight[i] * sigmoid(gate[i]);
    vector.pack(x);
    if (inside) vector.store(p.out + row * p.out_stride + column);
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::norm
