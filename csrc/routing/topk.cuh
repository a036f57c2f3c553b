// Top-k of sigmoid(logits) + bias, a warp a token, without sorting all scores.
//
// Every lane knows the best of its scores. Let tau be the k-th best of those 32: then at least k scores reach tau, so
// every winner does, and few others do (22 of 896 on average for k = 16). The ones that do are put side by side and
// ranked by counting who beats whom: all comparisons are independent. If more than 64 reach tau (equal scores), k
// rounds of arg-max over them decide: slower, not wrong.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "topk_config.h"

namespace kimi::routing {

using Key = unsigned long long;

// Floats as unsigned integers of the same order, all above 0.
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.f);  // -0 equals +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Larger score first, then the lower expert.
__device__ __forceinline__ Key rank_key(float value, int expert) {
  return static_cast<Key>(order_key(value)) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}

// NaN when one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The k-th largest of the lanes' values: all of them sorted, largest in lane 0.
__device__ __forceinline__ float warp_kth_largest(float value, int k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const float other = __shfl_xor_sync(kFullWarp, value, stride);
      const bool keep_larger = ((lane & size) == 0) == ((lane & stride) == 0);
      value = keep_larger ? fmaxf(value, other) : fminf(value, other);
    }
  }
  return __shfl_sync(kFullWarp, value, k - 1);
}

// Bit i: expert 32 i + lane is in one of the best groups; a group's score is the sum of its two best.
template <int kRegisters>
__device__ __forceinline__ uint32_t best_groups(const TopkParams& p, const float (&biased)[kRegisters],
                                                GroupShared& shared) {
  const int lane = threadIdx.x % 32, size = p.experts / p.num_groups;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) shared.biased[i * 32 + lane] = biased[i];
  __syncwarp();
  for (int group = 0; group < p.num_groups; ++group) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = lane; i < size; i += 32) {
      const float value = shared.biased[group * size + i];
      second = fmaxf(second, fminf(first, value));
      first = fmaxf(first, value);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other_first = __shfl_xor_sync(kFullWarp, first, offset);
      const float other_second = __shfl_xor_sync(kFullWarp, second, offset);
      second = fmaxf(fmaxf(second, other_second), fminf(first, other_first));
      first = fmaxf(first, other_first);
    }
    if (lane == 0) shared.score[group] = size == 1 ? first : first + second;
  }
  __syncwarp();
  uint32_t kept = 0;
  for (int i = 0; i * 32 + lane < p.experts; ++i) {
    const int group = (i * 32 + lane) / size;
    const float mine = shared.score[group];
    int rank = 0;
    for (int other = 0; other < p.num_groups; ++other) {
      rank += shared.score[other] > mine || (shared.score[other] == mine && other < group);
    }
    kept |= rank < p.topk_groups ? 1u << i : 0;
  }
  return kept;
}

// kExact: there are 32 * kRegisters experts. kGroups: only some groups take part; GroupShared [warps] dynamic.
template <int kRegisters, bool kExact, bool kGroups>
__global__ void __launch_bounds__(kTopkThreads, kTopkBlocks) topk_kernel(const __grid_constant__ TopkParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ TopkShared shared_of_warp[kTopkWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  TopkShared& shared = shared_of_warp[warp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTopkWarps + warp;
  if (row >= p.tokens) return;
  auto inside = [&](int i) { return kExact || i * 32 + lane < p.experts; };

  // ---- before the dependency wait: the bias is a weight ----
  const float* bias = p.bias + lane;
  float biased[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) biased[i] = inside(i) ? bias[i * 32] : -INFINITY;
  ptx::pdl_wait();

  // ---- scores; asked for before num_tokens has arrived ----
  const float* logits = p.logits + row * p.logits_stride + lane;
  float logit[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) logit[i] = inside(i) ? logits[i * 32] : 0.f;
  int32_t* ids = p.ids + row * p.k + lane;
  float* weights = p.weights + row * p.k + lane;
  if (row >= live_tokens(p.num_tokens, p.tokens)) {
    if (lane < p.k) *ids = -1, *weights = 0.f;
    return;
  }
  float best = -INFINITY;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    biased[i] += sigmoid(logit[i]);
    best = max_or_nan(best, biased[i]);
  }
  if (__any_sync(kFullWarp, best != best)) {
    if (lane < p.k) *ids = -1, *weights = NAN;
    if (lane == 0 && p.counts != nullptr) atomicAdd(p.counts + p.experts, 1);
    return;
  }
  uint32_t allowed = ~0u;
  if constexpr (kGroups) {
    allowed = best_groups(p, biased, reinterpret_cast<GroupShared*>(memory)[warp]);
    best = -INFINITY;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if (allowed >> i & 1) best = fmaxf(best, biased[i]);
    }
  }

  // ---- who reaches tau ----
  const float tau = warp_kth_largest(best, p.k);
  uint32_t reach = 0;  // bit i: expert 32 i + lane
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) reach |= biased[i] >= tau && inside(i) ? 1u << i : 0;
  if constexpr (kGroups) reach &= allowed;
  int place = __popc(reach);
  const int own = place;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, place, offset);
    if (lane >= offset) place += other;
  }
  const int total = __shfl_sync(kFullWarp, place, 31);
  place -= own;
  auto score_of = [&](int expert) { return sigmoid(logits[expert - lane]); };
  auto key_of = [&](int expert, float score) { return rank_key(bias[expert - lane] + score, expert); };

  // ---- side by side in any order; rank = how many are better ----
  if (total <= kCandidates) {
    for (; reach != 0; reach &= reach - 1) shared.candidate[place++].expert = (__ffs(reach) - 1) * 32 + lane;
    if (lane < 4) shared.key[total + lane] = 0;  // they are read four at a time
    __syncwarp();
    for (int c = lane; c < total; c += 32) {
      const int expert = shared.candidate[c].expert;
      const float score = score_of(expert);
      shared.candidate[c].score = score;
      shared.key[c] = key_of(expert, score);
    }
    __syncwarp();
    for (int c = lane; c < total; c += 32) {
      const Key mine = shared.key[c];
      int rank = 0;
      for (int j = 0; j < total; j += 4) {
        const ulonglong2 a = *reinterpret_cast<const ulonglong2*>(shared.key + j);
        const ulonglong2 b = *reinterpret_cast<const ulonglong2*>(shared.key + j + 2);
        rank += (a.x > mine) + (a.y > mine) + (b.x > mine) + (b.y > mine);
      }
      if (rank < p.k) shared.chosen[rank] = shared.candidate[c];
    }
  } else {
    for (int rank = 0; rank < p.k; ++rank) {
      Key key = 0;
      for (uint32_t left = reach; left != 0; left &= left - 1) {
        const int expert = (__ffs(left) - 1) * 32 + lane;
        key = max(key, key_of(expert, score_of(expert)));
      }
      const uint32_t high = static_cast<uint32_t>(key >> 32), highest = __reduce_max_sync(kFullWarp, high);
      const uint32_t low = high == highest ? static_cast<uint32_t>(key) : 0;
      const int winner = static_cast<int>(0xffffffffu - __reduce_max_sync(kFullWarp, low));
      if (winner % 32 == lane) {
        reach &= ~(1u << winner / 32);
        shared.chosen[rank] = {winner, score_of(winner)};
      }
    }
  }
  __syncwarp();
  const TopkChoice choice = lane < p.k ? shared.chosen[lane] : TopkChoice{0, 0.f};
  const float norm = warp_sum(choice.score) + 1e-20f;  // in the order of ranks
  if (lane < p.k) {
    *ids = choice.expert;
    *weights = choice.score / norm * p.scale;
    if (p.counts != nullptr) atomicAdd(p.counts + choice.expert, 1);
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::routing
