// Zeroing and copying of slots: both pools in one launch, a block a piece of one slot's state.
#pragma once

#include "../common/math.h"
#include "../common/ptx.cuh"
#include "params.h"

namespace kimi::kda {

constexpr int kSlotThreads = 256;
constexpr int64_t kSlotPiece = int64_t{kSlotThreads} * 4 * sizeof(float4);  // four 16-byte accesses a thread

__host__ __device__ inline int64_t slot_pieces(const SlotParams& p) {
  return ceil_div(p.state_inner, kSlotPiece) + ceil_div(p.conv_inner, kSlotPiece);
}

__global__ void __launch_bounds__(kSlotThreads) slots_kernel(const __grid_constant__ SlotParams p) {
  ptx::pdl_wait();
  const int64_t pieces = slot_pieces(p), state_pieces = ceil_div(p.state_inner, kSlotPiece);
  const int entry = static_cast<int>(blockIdx.x / pieces);
  const int64_t piece = blockIdx.x - entry * pieces;
  const bool conv = piece >= state_pieces;

  const int target = p.target[entry], source = p.source == nullptr ? target : p.source[entry];
  const bool skipped = target <= 0 || target >= p.num_slots || source <= 0 || source >= p.num_slots;
  if (!skipped) {
    char* const pool = conv ? p.conv_state : p.state;
    const int64_t stride = conv ? p.conv_slot_stride : p.state_slot_stride, inner = conv ? p.conv_inner : p.state_inner;
    const int64_t start = (conv ? piece - state_pieces : piece) * kSlotPiece + threadIdx.x * sizeof(float4);
    float4 values[4] = {};
    if (p.source != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t offset = start + i * int64_t{kSlotThreads} * sizeof(float4);
        if (offset < inner) values[i] = __ldcg(reinterpret_cast<const float4*>(pool + source * stride + offset));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t offset = start + i * int64_t{kSlotThreads} * sizeof(float4);
      if (offset < inner) *reinterpret_cast<float4*>(pool + target * stride + offset) = values[i];
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::kda
