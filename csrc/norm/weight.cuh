// Eight norm weights, stored as bf16 or float32, kept as they were loaded until they are used.
#pragma once

#include "../common/tile.cuh"

namespace kimi::norm {

template <bool kF32>
struct Weight8 {
  uint4 raw[kF32 ? 2 : 1];

  __device__ __forceinline__ void load(const void* weight, int column) {
    const uint4* source = reinterpret_cast<const uint4*>(static_cast<const char*>(weight) + column * (kF32 ? 4 : 2));
    raw[0] = source[0];
    if constexpr (kF32) raw[1] = source[1];
  }

  __device__ __forceinline__ void unpack(float (&values)[8]) const {
    if constexpr (kF32) {
      values[0] = __uint_as_float(raw[0].x), values[1] = __uint_as_float(raw[0].y);
      values[2] = __uint_as_float(raw[0].z), values[3] = __uint_as_float(raw[0].w);
      values[4] = __uint_as_float(raw[1].x), values[5] = __uint_as_float(raw[1].y);
      values[6] = __uint_as_float(raw[1].z), values[7] = __uint_as_float(raw[1].w);
    } else {
      Bf16x8 vector;
      vector.raw = raw[0];
      vector.unpack(values);
    }
  }
};

}  // namespace kimi::norm
