// Arithmetic that the layouts share: weights, the running sum, scores to softmax weights.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "mix_config.h"

namespace kimi::attn_res {

// Eight values of a weight as they are stored: a load that nobody waits for yet.
struct RawWeight {
  uint4 low, high;  // bf16: only low

  __device__ __forceinline__ void load(const void* weight, bool is_f32, int column) {
    if (is_f32) {
      const uint4* source = reinterpret_cast<const uint4*>(static_cast<const float*>(weight) + column);
      low = source[0], high = source[1];
    } else {
      low = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(weight) + column);
    }
  }

  __device__ __forceinline__ void unpack(bool is_f32, float (&values)[kVector]) const {
    if (is_f32) {
      const uint4 parts[2] = {low, high};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        values[4 * i] = __uint_as_float(parts[i].x), values[4 * i + 1] = __uint_as_float(parts[i].y);
        values[4 * i + 2] = __uint_as_float(parts[i].z), values[4 * i + 3] = __uint_as_float(parts[i].w);
      }
    } else {
      Bf16x8{low}.unpack(values);
    }
  }
};

__device__ __forceinline__ void load_weight(const void* weight, bool is_f32, int column, float (&values)[kVector]) {
  RawWeight raw = {};
  raw.load(weight, is_f32, column);
  raw.unpack(is_f32, values);
}

// norm * proj: what a source is multiplied by in its score.
__device__ __forceinline__ void load_score_weight(const MixParams& p, int column, float (&values)[kVector]) {
  float proj[kVector];
  load_weight(p.norm, p.norm_f32, column, values);
  load_weight(p.proj, p.proj_f32, column, proj);
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] *= proj[i];
}

// partial + delta, rounded to bf16 as the running sum is kept.
__device__ __forceinline__ void add_rounded(Bf16x8& sum, const Bf16x8& delta) {
  float a[kVector], b[kVector];
  sum.unpack(a);
  delta.unpack(b);
#pragma unroll
  for (int i = 0; i < kVector; ++i) a[i] += b[i];
  sum.pack(a);
}

__device__ __forceinline__ void accumulate_score(const Bf16x8& source, const float (&weight)[kVector], float& dot,
                                                 float& square) {
  float v[kVector];
  source.unpack(v);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    dot += v[i] * weight[i];
    square += v[i] * v[i];
  }
}

// Scores are summed over the warp in two groups of sources, which halves the accumulators that are alive at once.
// A lane ends with one total of the group; score_slot says of which sum: j for the dot product of source j, kSources +
// j for its square, -1 for none.
constexpr int kScoreGroup = (kFastSources + 1) / 2;

template <int kSources, int kFirst, int kCount>
__device__ __forceinline__ int score_slot() {
  const int index = warp_sum_many_index<2 * kCount>();
  return index < 0 ? -1 : index < kCount ? kFirst + index : kSources + kFirst + index - kCount;
}

// load(v, values) gives vector v of the score weight.
template <int kFirst, int kCount, int kVectors, typename Weight>
__device__ __forceinline__ float score_group(const Bf16x8 (*source)[kVectors], const Weight& load) {
  float sum[2 * kCount] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float weight[kVector];
    load(v, weight);
#pragma unroll
    for (int j = 0; j < kCount; ++j) accumulate_score(source[kFirst + j][v], weight, sum[j], sum[kCount + j]);
  }
  return warp_sum_many(sum);
}

__device__ __forceinline__ void accumulate_mix(const Bf16x8& source, float weight, float (&mix)[kVector]) {
  float v[kVector];
  source.unpack(v);
#pragma unroll
  for (int i = 0; i < kVector; ++i) mix[i] += weight * v[i];
}

// Lane l holds the total of dot product l (l < kSources) or of square l - kSources. Returns, in lane j < kSources, the
// softmax weight of source j.
template <int kSources>
__device__ __forceinline__ float softmax_weight(float total, int width, float eps) {
  const int lane = threadIdx.x % 32;
  const float square = __shfl_sync(kFullWarp, total, (lane + kSources) % 32);
  const float score = total * rsqrtf(square / static_cast<float>(width) + eps);
  const float largest = warp_max(lane < kSources ? score : -INFINITY);
  const float weight = lane < kSources ? exp2f((score - largest) * kLog2E) : 0.f;
  return weight / warp_sum(weight);
}

}  // namespace kimi::attn_res
