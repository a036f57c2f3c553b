// Few tokens: latency. A cluster of `split` CTAs shares a token by columns; every thread holds one 16-byte vector of
// every source in registers, so all loads are in flight at once and each source is read once. Warps put their partial
// sums straight into the shared memory of every CTA of the cluster; one cluster barrier later each warp adds them up
// in the same order by itself.
#pragma once

#include "mix_common.cuh"

namespace kimi::attn_res {

template <int kSources, int kThreads>
__global__ void __launch_bounds__(kThreads) mix_few_kernel(const __grid_constant__ MixParams p) {
  constexpr int kSums = 2 * kSources;
  __shared__ float sums[32][kSums];
  __shared__ float squares[32];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int split = p.split;
  const int rank = split > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const int64_t token = blockIdx.x / split;
  const int columns = p.width / split;
  const bool inside = threadIdx.x * kVector < columns;
  const int column = rank * columns + threadIdx.x * kVector;

  auto barrier = [&] {
    if (split > 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
  };
  // The same element in each CTA of the cluster.
  auto share = [&](float* target, float value) {
    if (split > 1) {
      for (int other = 0; other < split; ++other) ptx::cluster_store(ptx::cluster_address(target, other), value);
    } else {
      *target = value;
    }
  };

  // ---- before the dependency wait: weights; and every CTA of the cluster has to run before it is written to ----
  if (split > 1) ptx::cluster_arrive();
  constexpr bool kRoomy = kThreads <= kFewThreads;  // registers for every load at once, the weights as they are stored
  RawWeight norm = {}, proj = {}, out_norm = {};
  float score_weight[kVector] = {};
  if (inside) {
    if constexpr (kRoomy) {
      norm.load(p.norm, p.norm_f32, column);
      proj.load(p.proj, p.proj_f32, column);
      out_norm.load(p.out_norm, p.out_norm_f32, column);
    } else {
      load_score_weight(p, column, score_weight);
    }
  }
  ptx::pdl_wait();

  // ---- all sources into registers ----
  Bf16x8 source[kSources][1], delta;
  delta.clear();
#pragma unroll
  for (int j = 0; j < kSources; ++j) source[j][0].clear();
  if (inside) {
    const __nv_bfloat16* block = p.blocks + token * p.block_row_stride + column;
#pragma unroll
    for (int j = 0; j < kSources - 1; ++j) source[j][0].load(block + j * p.block_stride);
    source[kSources - 1][0].load(p.partial + token * p.partial_stride + column);
    if (p.delta != nullptr) delta.load(p.delta + token * p.delta_stride + column);
  }
  if (p.delta != nullptr) add_rounded(source[kSources - 1][0], delta);
  const Bf16x8 running_sum = source[kSources - 1][0];

  // ---- scores ----
  constexpr int kFirstGroup = kSources < kScoreGroup ? kSources : kScoreGroup;
  constexpr int kSecondGroup = kSources - kFirstGroup;
  if constexpr (kRoomy) {
    float values[kVector];
    norm.unpack(p.norm_f32, score_weight);
    proj.unpack(p.proj_f32, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) score_weight[i] *= values[i];
  }
  auto weight_of = [&](int, float (&values)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = score_weight[i];
  };
  float* mine = sums[rank * warps + warp];
  const float first_sum = score_group<0, kFirstGroup>(source, weight_of);
  float second_sum = 0.f;
  if constexpr (kSecondGroup > 0) second_sum = score_group<kFirstGroup, kSecondGroup>(source, weight_of);
  if (split > 1) ptx::cluster_wait();
  if (const int slot = score_slot<kSources, 0, kFirstGroup>(); slot >= 0) share(mine + slot, first_sum);
  if constexpr (kSecondGroup > 0) {
    if (const int slot = score_slot<kSources, kFirstGroup, kSecondGroup>(); slot >= 0) share(mine + slot, second_sum);
  }
  barrier();
  float total = 0.f;
  if (lane < kSums) {
#pragma unroll 8  // so that loads do not wait for each other
    for (int w = 0; w < warps * split; ++w) total += sums[w][lane];
  }
  const float weight = softmax_weight<kSources>(total, p.width, p.eps);

  // ---- mix and norm ----
  float mix[kVector] = {};
#pragma unroll
  for (int j = 0; j < kSources; ++j) {
    source[j][0].forget();
    accumulate_mix(source[j][0], __shfl_sync(kFullWarp, weight, j), mix);
  }
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) square += mix[i] * mix[i];
  square = warp_sum(square);
  float out_weight[kVector];
  if constexpr (!kRoomy) {
    if (inside) out_norm.load(p.out_norm, p.out_norm_f32, column);
  }
  out_norm.unpack(p.out_norm_f32, out_weight);
  if (lane == 0) share(&squares[rank * warps + warp], square);
  barrier();
  square = warp_sum(lane < warps * split ? squares[lane] : 0.f);
  const float rstd = rsqrtf(square / static_cast<float>(p.width) + p.eps);
  if (inside) {
    // Not before: the cluster barriers would wait until it has reached memory.
    if (p.partial_out != nullptr) running_sum.store(p.partial_out + token * p.partial_out_stride + column);
#pragma unroll
    for (int i = 0; i < kVector; ++i) mix[i] *= rstd * out_weight[i];
    Bf16x8 packed;
    packed.pack(mix);
    packed.store(p.x + token * p.x_stride + column);
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::attn_res
