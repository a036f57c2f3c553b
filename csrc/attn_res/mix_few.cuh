// Few tokens: latency. A cluster of `split` CTAs shares a token by columns; every thread holds one 16-byte vector of
// every source in registers, so all loads are in flight at once and each source is read once. A CTA adds up its warps'
// sums and stores them asynchronously into the shared memory of every CTA of the cluster, where a barrier counts them:
// a cluster barrier would cost a memory fence on top. Everyone then adds the CTAs' sums in the same order.
#pragma once

#include "mix_common.cuh"

namespace kimi::attn_res {

template <int kSources, int kThreads>
__global__ void __launch_bounds__(kThreads) mix_few_kernel(const __grid_constant__ MixParams p) {
  constexpr bool kRoomy = kThreads <= kFewThreads;  // registers for every load at once, the weights as they are stored
  constexpr int kSums = 2 * kSources;
  constexpr int kQuads = ceil_div(kSums, 4);
  __shared__ alignas(16) float sums[kMaxSplit][4 * kQuads];  // by CTA: dot products, then squares
  __shared__ alignas(16) float own_sums[4 * kQuads];
  __shared__ float squares[kMaxSplit];
  __shared__ float warp_sums[32][kSums], warp_squares[32];
  __shared__ uint64_t arrived[2];  // of sums, of squares

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int split = kRoomy ? p.split : 1;  // half a row of 8192 columns fits kFewThreads
  const int rank = split > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const int64_t token = blockIdx.x / split;
  const int columns = p.width / split;
  const bool inside = threadIdx.x * kVector < columns;
  const int column = rank * columns + threadIdx.x * kVector;

  // ---- before the dependency wait: weights; and every CTA of the cluster has to run before it is written to ----
  if (split > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&arrived[0], 1);
      ptx::mbarrier_init(&arrived[1], 1);
      ptx::mbarrier_init_fence();
      ptx::mbarrier_arrive_expect_tx(&arrived[0], split * sizeof(sums[0]));
      ptx::mbarrier_arrive_expect_tx(&arrived[1], split * sizeof(squares[0]));
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
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
  ptx::pdl_trigger();  // early: what depends on this kernel waits for its end all the same
  if (p.delta != nullptr) add_rounded(source[kSources - 1][0], delta);
  if (inside && p.partial_out != nullptr) {
    source[kSources - 1][0].store(p.partial_out + token * p.partial_out_stride + column);
  }

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
  float* mine = warp_sums[warp];
  const float first_sum = score_group<0, kFirstGroup>(source, weight_of);
  float second_sum = 0.f;
  if constexpr (kSecondGroup > 0) second_sum = score_group<kFirstGroup, kSecondGroup>(source, weight_of);
  if (const int slot = score_slot<kSources, 0, kFirstGroup>(); slot >= 0) mine[slot] = first_sum;
  if constexpr (kSecondGroup > 0) {
    if (const int slot = score_slot<kSources, kFirstGroup, kSecondGroup>(); slot >= 0) mine[slot] = second_sum;
  }
  if (split > 1) ptx::cluster_wait();
  __syncthreads();
  if (warp == 0) {
    float sum = 0.f;
    if (lane < kSums) {
#pragma unroll 4  // so that loads do not wait for each other
      for (int w = 0; w < warps; ++w) sum += warp_sums[w][lane];
    }
    if (lane < 4 * kQuads) (split > 1 ? own_sums : sums[0])[lane] = sum;
    __syncwarp();
    if (split > 1) {
      const int to = lane % kMaxSplit;
      for (int quad = lane / kMaxSplit; quad < kQuads && to < split; quad += 32 / kMaxSplit) {
        ptx::cluster_store_async(ptx::cluster_address(&sums[rank][4 * quad], to),
                                 *reinterpret_cast<const float4*>(own_sums + 4 * quad),
                                 ptx::cluster_address(&arrived[0], to));
      }
    }
  }
  if (split > 1) {
    ptx::mbarrier_wait(&arrived[0], 0);
  } else {
    __syncthreads();
  }
  float total = 0.f;
  if (lane < kSums) {
#pragma unroll
    for (int cta = 0; cta < kMaxSplit; ++cta) total += cta < split ? sums[cta][lane] : 0.f;
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
  if (lane == 0) warp_squares[warp] = square;
  __syncthreads();
  if (split == 1) {
    square = warp_sum(lane < warps ? warp_squares[lane] : 0.f);
  } else {
    if (warp == 0) {
      square = warp_sum(lane < warps ? warp_squares[lane] : 0.f);
      if (lane < split) {
        ptx::cluster_store_async(ptx::cluster_address(&squares[rank], lane), square,
                                 ptx::cluster_address(&arrived[1], lane));
      }
    }
    ptx::mbarrier_wait(&arrived[1], 0);
    square = 0.f;
#pragma unroll
    for (int cta = 0; cta < kMaxSplit; ++cta) square += cta < split ? squares[cta] : 0.f;
  }
  const float rstd = rsqrtf(square / static_cast<float>(p.width) + p.eps);
  if (inside) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) mix[i] *= rstd * out_weight[i];
    Bf16x8 packed;
    packed.pack(mix);
    packed.store(p.x + token * p.x_stride + column);
  }
}

}  // namespace kimi::attn_res
