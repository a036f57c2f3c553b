// FP8 and MXFP8 quantisation of rows: one read, one write. A warp takes 256 columns of one row, 16 bytes a lane.
#pragma once

#include "../common/ptx.cuh"
#include "../common/quantise.cuh"
#include "quant_config.h"

namespace kimi::quant {

enum class Format { kFp8, kMxfp8 };

// Eight columns; those at or beyond width are 0.
__device__ __forceinline__ void load8(const QuantParams& p, int64_t row, int column, float (&x)[8]) {
  if (p.x_f32) {
    const float* source = static_cast<const float*>(p.x) + row * p.x_stride + column;
    const float4 a = *reinterpret_cast<const float4*>(source), b = *reinterpret_cast<const float4*>(source + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    Bf16x8 vector;
    vector.load(static_cast<const __nv_bfloat16*>(p.x) + row * p.x_stride + column);
    vector.unpack(x);
  }
}

__device__ __forceinline__ float load1(const QuantParams& p, int64_t row, int column) {
  const int64_t offset = row * p.x_stride + column;
  return p.x_f32 ? static_cast<const float*>(p.x)[offset]
                 : __bfloat162float(static_cast<const __nv_bfloat16*>(p.x)[offset]);
}

// The factor for the values of a group; `writer` stores its scale.
template <Format kFormat>
__device__ __forceinline__ float finish_group(const QuantParams& p, int64_t row, int group, float amax, bool writer) {
  if constexpr (kFormat == Format::kFp8) {
    const float scale = fp8_scale(amax);
    if (writer) p.scale[row * p.groups + group] = scale;
    return 1.f / scale;
  } else {
    const int byte = mxfp8_byte(amax);
    if (writer) p.exponent[row * p.groups + group] = static_cast<uint8_t>(byte);
    return mxfp8_factor(byte);
  }
}

template <Format kFormat, int kLanes>
__global__ void __launch_bounds__(kThreads) quant_kernel(const __grid_constant__ QuantParams p) {
  const int lane = threadIdx.x % 32;
  const int warps_per_row = ceil_div(p.width, kWarpColumns);
  const int64_t total = p.rows * warps_per_row, step = static_cast<int64_t>(gridDim.x) * kWarps;
  ptx::pdl_wait();
  for (int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; warp < total; warp += step) {
    const int64_t row = warp / warps_per_row;
    const int column = static_cast<int>(warp - row * warps_per_row) * kWarpColumns + lane * 8;
    const bool inside = column < p.width;
    float x[8] = {};
    if (inside) load8(p, row, column, x);
    const float amax = group_amax<kLanes>(x);
    const float factor = finish_group<kFormat>(p, row, column / (kLanes * 8), amax, inside && lane % kLanes == 0);
    if (inside) {
      // E4M3 has no infinity: a plain conversion would saturate it.
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = isinf(x[i]) ? NAN : x[i];
      *reinterpret_cast<uint2*>(p.values + row * p.width + column) = pack_e4m3(x, factor);
    }
  }
  ptx::pdl_trigger();
}

// Any group size, width and alignment: a warp walks one group twice.
template <Format kFormat>
__global__ void __launch_bounds__(kThreads) quant_general_kernel(const __grid_constant__ QuantParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t total = p.rows * p.groups, step = static_cast<int64_t>(gridDim.x) * kWarps;
  ptx::pdl_wait();
  for (int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; warp < total; warp += step) {
    const int64_t row = warp / p.groups;
    const int group = static_cast<int>(warp - row * p.groups);
    const int begin = group * p.group, end = min(begin + p.group, p.width);
    float amax = 0.f;
    for (int column = begin + lane; column < end; column += 32) {
      amax = max_nan(amax, fabsf(load1(p, row, column)));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      amax = max_nan(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    }
    const float factor = finish_group<kFormat>(p, row, group, amax, lane == 0);
    for (int column = begin + lane; column < end; column += 32) {
      const float x = load1(p, row, column);
      p.values[row * p.width + column] =
          __nv_cvt_float_to_fp8((isinf(x) ? NAN : x) * factor, __NV_SATFINITE, __NV_E4M3);
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::quant
