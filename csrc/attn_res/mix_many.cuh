// Many tokens: bandwidth. One CTA an SM walks the tokens; a producer thread keeps copying whole rows (partial, delta,
// block 0, 1, ...) into a ring in shared memory, the other warps take a row into registers and free its stage at
// once. So the rows of the next token arrive while this one is reduced, mixed and normalised.
#pragma once

#include <type_traits>

#include "mix_common.cuh"

namespace kimi::attn_res {

template <int kValue>
using Int = std::integral_constant<int, kValue>;

constexpr int min_of(int a, int b) { return a < b ? a : b; }

template <int kSources>
__global__ void __launch_bounds__(kManyMaxThreads, 1) mix_many_kernel(const __grid_constant__ MixParams p) {
  constexpr int kSums = 2 * kSources;
  extern __shared__ __align__(128) unsigned char memory[];
  ManyShared& shared = *reinterpret_cast<ManyShared*>(memory);
  __nv_bfloat16* ring = reinterpret_cast<__nv_bfloat16*>(memory + p.ring_offset);
  float4* score_weight = reinterpret_cast<float4*>(&shared + 1);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stages = p.stages;
  const int consumers = blockDim.x - 32, consumer_warps = consumers / 32;
  const bool producer = warp == consumer_warps;

  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      ptx::mbarrier_init(&shared.full[s], 1);
      ptx::mbarrier_init(&shared.empty[s], consumer_warps * ptx::kWarpArrivals);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  if (producer) {
    if (lane == 0) {
      ptx::pdl_wait();
      const uint32_t bytes = p.width * sizeof(__nv_bfloat16);
      int stage = 0;
      uint32_t phase = 0;
      auto push = [&](const __nv_bfloat16* row) {
        ptx::mbarrier_wait(&shared.empty[stage], phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(&shared.full[stage], bytes);
        ptx::bulk_load(ring + static_cast<int64_t>(stage) * p.width, row, bytes, &shared.full[stage]);
        if (++stage == stages) stage = 0, phase ^= 1;
      };
      for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        push(p.partial + token * p.partial_stride);
        if (p.delta != nullptr) push(p.delta + token * p.delta_stride);
        const __nv_bfloat16* block = p.blocks + token * p.block_row_stride;
#pragma unroll 1
        for (int j = 0; j < kSources - 1; ++j) push(block + j * p.block_stride);
      }
    }
    return;
  }

  // ---- consumers: each thread keeps its own piece of the score weight in shared memory ----
  int column[kManyVectors];
  bool inside[kManyVectors];
#pragma unroll
  for (int v = 0; v < kManyVectors; ++v) {
    column[v] = (v * consumers + static_cast<int>(threadIdx.x)) * kVector;
    inside[v] = column[v] < p.width;
    float values[kVector] = {};
    if (inside[v]) load_score_weight(p, column[v], values);
    float4* mine = score_weight + 2 * v * consumers + threadIdx.x;
    mine[0] = make_float4(values[0], values[1], values[2], values[3]);
    mine[consumers] = make_float4(values[4], values[5], values[6], values[7]);
  }
  auto weight_of = [&](int v, float (&values)[kVector]) {
    const float4* mine = score_weight + 2 * v * consumers + threadIdx.x;
    const float4 a = mine[0], b = mine[consumers];
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
    values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
  };
  ptx::pdl_wait();
  ptx::pdl_trigger();  // early: what depends on this kernel waits for its end all the same

  int stage = 0;
  uint32_t phase = 0;
  auto pop = [&](Bf16x8(&row)[kManyVectors]) {
    ptx::mbarrier_wait(&shared.full[stage], phase);
#pragma unroll
    for (int v = 0; v < kManyVectors; ++v) {
      row[v].clear();
      if (inside[v]) row[v].load(ring + static_cast<int64_t>(stage) * p.width + column[v]);
    }
    ptx::mbarrier_warp_arrive(&shared.empty[stage]);
    if (++stage == stages) stage = 0, phase ^= 1;
  };

  constexpr int kBarrier = 1;
  // Groups of three sources: few accumulators are alive beside the 72 registers of 9 sources.
  constexpr int kFirstGroup = min_of(kSources, 3), kSecondGroup = min_of(kSources - kFirstGroup, 3);
  constexpr int kThirdGroup = kSources - kFirstGroup - kSecondGroup;
  int parity = 0;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x, parity ^= 1) {
    Bf16x8 source[kSources][kManyVectors];

    // ---- the running sum first: it has a second row to add and a result to write ----
    pop(source[kSources - 1]);
    if (p.delta != nullptr) {
      Bf16x8 delta[kManyVectors];
      pop(delta);
#pragma unroll
      for (int v = 0; v < kManyVectors; ++v) add_rounded(source[kSources - 1][v], delta[v]);
    }
    if (p.partial_out != nullptr) {
#pragma unroll
      for (int v = 0; v < kManyVectors; ++v) {
        if (inside[v]) source[kSources - 1][v].store(p.partial_out + token * p.partial_out_stride + column[v]);
      }
    }
    float* mine = shared.sums[parity][warp];
    auto score = [&](auto first, auto count) {
      constexpr int kFirst = decltype(first)::value, kCount = decltype(count)::value;
      if constexpr (kCount > 0) {
#pragma unroll
        for (int j = kFirst; j < kFirst + kCount; ++j) {
          if (j < kSources - 1) pop(source[j]);
        }
        const float group_sum = score_group<kFirst, kCount>(source, weight_of);
        if (const int slot = score_slot<kSources, kFirst, kCount>(); slot >= 0) mine[slot] = group_sum;
      }
    };
    score(Int<0>(), Int<kFirstGroup>());
    score(Int<kFirstGroup>(), Int<kSecondGroup>());
    score(Int<kFirstGroup + kSecondGroup>(), Int<kThirdGroup>());

    // ---- scores over the CTA; two sets of scratch, so that one barrier a sum is enough ----
    ptx::named_barrier_sync(kBarrier, consumers);
    float total = 0.f;
    if (lane < kSums) {
#pragma unroll 8
      for (int w = 0; w < consumer_warps; ++w) total += shared.sums[parity][w][lane];
    }
    const float weight = softmax_weight<kSources>(total, p.width, p.eps);

    // ---- mix, norm, write ----
    float mix[kManyVectors][kVector] = {};
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      const float share = __shfl_sync(kFullWarp, weight, j);
#pragma unroll
      for (int v = 0; v < kManyVectors; ++v) {
        source[j][v].forget();
        accumulate_mix(source[j][v], share, mix[v]);
      }
    }
    float square = 0.f;
#pragma unroll
    for (int v = 0; v < kManyVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) square += mix[v][i] * mix[v][i];
    }
    square = warp_sum(square);
    float scale[kManyVectors][kVector];  // from L1; asked for before the barrier, the sources' registers are free now
#pragma unroll
    for (int v = 0; v < kManyVectors; ++v) {
      if (inside[v]) load_weight(p.out_norm, p.out_norm_f32, column[v], scale[v]);
    }
    if (lane == 0) shared.squares[parity][warp] = square;
    ptx::named_barrier_sync(kBarrier, consumers);
    square = warp_sum(lane < consumer_warps ? shared.squares[parity][lane] : 0.f);
    const float rstd = rsqrtf(square / static_cast<float>(p.width) + p.eps);
#pragma unroll
    for (int v = 0; v < kManyVectors; ++v) {
      if (!inside[v]) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) mix[v][i] *= rstd * scale[v][i];
      Bf16x8 packed;
      packed.pack(mix[v]);
      packed.store(p.x + token * p.x_stride + column[v]);
    }
  }
}

}  // namespace kimi::attn_res
