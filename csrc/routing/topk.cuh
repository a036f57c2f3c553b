// Top-k of sigmoid(logits) + bias for one token a warp, without sorting all scores.
//
// Each lane knows the best of its own scores. Let tau be the k-th best of those 32: then at least k scores reach tau,
// so every winner does, and few others do (22 of 896 on average for k = 16). The ones that do are put side by side and
// ranked by counting who beats whom: all comparisons are independent, so the latency is that of a few dozen
// instructions instead of k dependent rounds. When more than 64 reach tau (many equal scores), k rounds of arg-max
// decide.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "topk_config.h"

namespace kimi::routing {

using Key = unsigned long long;

// Floats as unsigned integers of the same order; -inf is above 0, so 0 stands for "not to be chosen".
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.f);  // -0 equals +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Larger key first, then the lower expert.
__device__ __forceinline__ Key rank_key(uint32_t key, int expert) {
  return static_cast<Key>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}

__device__ __forceinline__ int expert_of(Key key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key & 0xffffffffu));
}

__device__ __forceinline__ void write_choice(const TopkParams& p, int64_t row, int rank, int expert, float weight) {
  p.ids[row * p.k + rank] = expert;
  p.weights[row * p.k + rank] = weight;
  if (p.counts != nullptr) atomicAdd(p.counts + expert, 1);
}

// Clears the keys of all experts outside the best groups; a group's score is the sum of its two best.
template <int kRegisters>
__device__ __forceinline__ void keep_best_groups(const TopkParams& p, const float (&biased)[kRegisters],
                                                 uint32_t (&key)[kRegisters], GroupShared& shared) {
  const int lane = threadIdx.x % 32, size = p.experts / p.num_groups;
  constexpr float kNone = -INFINITY;
  for (int group = 0; group < p.num_groups; ++group) {
    float first = kNone, second = kNone;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const int expert = i * 32 + lane;
      if (expert >= p.experts || expert / size != group) continue;
      second = fmaxf(second, fminf(first, biased[i]));
      first = fmaxf(first, biased[i]);
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
  for (int group = lane; group < p.num_groups; group += 32) {
    int rank = 0;
    for (int other = 0; other < p.num_groups; ++other) {
      const float mine = shared.score[group], theirs = shared.score[other];
      rank += theirs > mine || (theirs == mine && other < group);
    }
    shared.kept[group] = rank < p.topk_groups;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int expert = i * 32 + lane;
    if (expert < p.experts && !shared.kept[expert / size]) key[i] = 0;
  }
  __syncwarp();
}

// k rounds of arg-max, each below the one before. Any number of equal scores; 10 times slower.
template <int kRegisters>
__device__ __forceinline__ void choose_by_rounds(const TopkParams& p, int64_t row, const float (&score)[kRegisters],
                                                 const uint32_t (&key)[kRegisters]) {
  const int lane = threadIdx.x % 32;
  Key last = ~0ull;
  float sum = 0.f, my_score = 0.f;
  int my_expert = 0;
  for (int rank = 0; rank < p.k; ++rank) {
    Key best = 0;
    float best_score = 0.f;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const Key candidate = key[i] == 0 ? 0 : rank_key(key[i], i * 32 + lane);
      if (candidate < last && candidate > best) best = candidate, best_score = score[i];
    }
    const Key mine = best;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const Key other = __shfl_xor_sync(kFullWarp, best, offset);
      best = other > best ? other : best;
    }
    const int owner = __ffs(__ballot_sync(kFullWarp, mine == best)) - 1;
    best_score = __shfl_sync(kFullWarp, best_score, owner);
    if (lane == rank) my_expert = expert_of(best), my_score = best_score;
    sum += best_score;
    last = best;
  }
  if (lane < p.k) write_choice(p, row, lane, my_expert, my_score / (sum + 1e-20f) * p.scale);
}

template <int kRegisters, bool kGroups>
__global__ void __launch_bounds__(128) topk_kernel(const __grid_constant__ TopkParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  TopkShared& shared = reinterpret_cast<TopkShared*>(memory)[warp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * warps + warp;

  // ---- before the dependency wait: the bias is a weight ----
  float bias[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int expert = i * 32 + lane;
    bias[i] = expert < p.experts ? p.bias[expert] : 0.f;
  }
  shared.candidate[lane] = 0;
  shared.candidate[lane + 32] = 0;
  ptx::pdl_wait();

  if (row >= p.tokens) return;
  if (row >= live_tokens(p.num_tokens, p.tokens)) {
    if (lane < p.k) {
      p.ids[row * p.k + lane] = -1;
      p.weights[row * p.k + lane] = 0.f;
    }
    return;
  }

  // ---- scores ----
  const float* logits = p.logits + row * p.logits_stride;
  float score[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int expert = i * 32 + lane;
    score[i] = expert < p.experts ? logits[expert] : 0.f;
  }
  uint32_t key[kRegisters];
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    score[i] = sigmoid(score[i]);
    bias[i] += score[i];  // from here on the biased score
    bad |= bias[i] != bias[i];
    key[i] = i * 32 + lane < p.experts ? order_key(bias[i]) : 0;
  }
  if (__any_sync(kFullWarp, bad)) {
    if (lane < p.k) {
      p.ids[row * p.k + lane] = -1;
      p.weights[row * p.k + lane] = NAN;
    }
    if (lane == 0 && p.counts != nullptr) atomicAdd(p.counts + p.experts, 1);
    return;
  }
  if constexpr (kGroups) {
    GroupShared* groups = reinterpret_cast<GroupShared*>(memory + warps * sizeof(TopkShared));
    keep_best_groups(p, bias, key, groups[warp]);
  }

  // ---- tau: the k-th best of the lanes' best ----
  uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) best = max(best, key[i]);
  shared.lane_best[lane] = best;
  __syncwarp();
  int at_least = 0;
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    const uint4 others = *reinterpret_cast<const uint4*>(shared.lane_best + j);
    at_least += (others.x >= best) + (others.y >= best) + (others.z >= best) + (others.w >= best);
  }
  // With fewer than k lanes in use every expert that may be chosen is a candidate.
  const uint32_t tau = max(__reduce_max_sync(kFullWarp, at_least >= p.k ? best : 0u), 1u);

  // ---- candidates side by side ----
  int count = 0;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) count += key[i] >= tau;
  int total = 0, position = 0;
#pragma unroll
  for (int bit = 0; bit < 6; ++bit) {  // a lane has at most 32
    const unsigned having = __ballot_sync(kFullWarp, count >> bit & 1);
    position += __popc(having & ((1u << lane) - 1)) << bit;
    total += __popc(having) << bit;
  }
  if (total > kMaxCandidates) {
    choose_by_rounds(p, row, score, key);
    ptx::pdl_trigger();
    return;
  }
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    if (key[i] >= tau) {
      shared.candidate[position] = rank_key(key[i], i * 32 + lane);
      shared.score[position] = score[i];
      ++position;
    }
  }
  __syncwarp();

  // ---- rank = how many are better ----
  const Key mine[2] = {shared.candidate[lane], shared.candidate[lane + 32]};
  int rank[2] = {0, 0};
  auto count_better = [&](int first) {
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const ulonglong2 others = *reinterpret_cast<const ulonglong2*>(shared.candidate + first + j);
      rank[0] += (others.x > mine[0]) + (others.y > mine[0]);
      rank[1] += (others.x > mine[1]) + (others.y > mine[1]);
    }
  };
  count_better(0);
  if (total > 32) count_better(32);

  bool chosen[2];
  float value[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    chosen[half] = lane + 32 * half < total && rank[half] < p.k;
    value[half] = chosen[half] ? shared.score[lane + 32 * half] : 0.f;
  }
  const float norm = warp_sum(value[0] + value[1]) + 1e-20f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (chosen[half]) write_choice(p, row, rank[half], expert_of(mine[half]), value[half] / norm * p.scale);
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::routing
