// Top-k of sigmoid(logits) + bias, a block a token, without sorting all scores.
//
// Every group of four lanes knows the best of its scores. Let tau be the k-th best of those 32: then at least k scores
// reach tau, so every winner does, and few others do (22 of 896 on average for k = 16). The ones that do are put side
// by side and ranked by counting who beats whom: all comparisons are independent, so the latency is that of a few dozen
// instructions instead of k dependent rounds. Any number may reach tau (equal scores): it is slower then, not wrong.
// A block a token because one warp alone is bound by the latency of its own instructions.
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

// Clears the keys of all experts outside the best groups; a group's score is the sum of its two best.
template <int kRegisters>
__device__ __forceinline__ void keep_best_groups(const TopkParams& p, const float (&biased)[kRegisters],
                                                 uint32_t (&key)[kRegisters], TopkShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, size = p.experts / p.num_groups;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int expert = i * kTopkThreads + static_cast<int>(threadIdx.x);
    if (expert < p.experts) shared.groups.biased[expert] = biased[i];
  }
  __syncthreads();
  for (int group = warp; group < p.num_groups; group += kTopkThreads / 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = lane; i < size; i += 32) {
      const float value = shared.groups.biased[group * size + i];
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
    if (lane == 0) shared.groups.score[group] = size == 1 ? first : first + second;
  }
  __syncthreads();
  for (int group = threadIdx.x; group < p.num_groups; group += kTopkThreads) {
    int rank = 0;
    for (int other = 0; other < p.num_groups; ++other) {
      const float mine = shared.groups.score[group], theirs = shared.groups.score[other];
      rank += theirs > mine || (theirs == mine && other < group);
    }
    shared.groups.kept[group] = rank < p.topk_groups;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int expert = i * kTopkThreads + static_cast<int>(threadIdx.x);
    if (expert < p.experts && !shared.groups.kept[expert / size]) key[i] = 0;
  }
  __syncthreads();  // the candidates take over the space
}

template <int kRegisters>
__global__ void __launch_bounds__(kTopkThreads) topk_kernel(const __grid_constant__ TopkParams p) {
  __shared__ TopkShared shared;
  const int thread = threadIdx.x, lane = thread % 32;
  const int64_t row = blockIdx.x;

  // ---- before the dependency wait: the bias is a weight ----
  float biased[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int expert = i * kTopkThreads + thread;
    biased[i] = expert < p.experts ? p.bias[expert] : 0.f;
  }
  if (thread == 0) shared.total = 0;
  ptx::pdl_wait();

  if (row >= live_tokens(p.num_tokens, p.tokens)) {
    if (thread < p.k) {
      p.ids[row * p.k + thread] = -1;
      p.weights[row * p.k + thread] = 0.f;
    }
    return;
  }

  // ---- scores ----
  const float* logits = p.logits + row * p.logits_stride;
  float score[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const int expert = i * kTopkThreads + thread;
    score[i] = expert < p.experts ? logits[expert] : 0.f;
  }
  uint32_t key[kRegisters], best = 0;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    score[i] = sigmoid(score[i]);
    biased[i] += score[i];
    bad |= biased[i] != biased[i];
    key[i] = i * kTopkThreads + thread < p.experts ? order_key(biased[i]) : 0;
    best = max(best, key[i]);
  }
  const bool groups = p.topk_groups < p.num_groups;
  if (groups) {
    keep_best_groups(p, biased, key, shared);
    best = 0;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) best = max(best, key[i]);
  }

  // ---- tau: the k-th best of the lane groups' best ----
  best = max(best, __shfl_xor_sync(kFullWarp, best, 1));
  best = max(best, __shfl_xor_sync(kFullWarp, best, 2));
  if (lane % 4 == 0) shared.group_best[thread / 4] = best;
  if (__syncthreads_or(bad)) {
    if (thread < p.k) {
      p.ids[row * p.k + thread] = -1;
      p.weights[row * p.k + thread] = NAN;
    }
    if (thread == 0 && p.counts != nullptr) atomicAdd(p.counts + p.experts, 1);
    return;
  }
  const uint32_t mine = shared.group_best[lane];
  int at_least = 0;
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    const uint4 others = *reinterpret_cast<const uint4*>(shared.group_best + j);
    at_least += (others.x >= mine) + (others.y >= mine) + (others.z >= mine) + (others.w >= mine);
  }
  // With fewer than k groups in use every expert that may be chosen is a candidate.
  const uint32_t tau = max(__reduce_max_sync(kFullWarp, at_least >= p.k ? mine : 0u), 1u);

  // ---- candidates side by side, in any order: the rank decides ----
  int count = 0;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) count += key[i] >= tau;
  if (count > 0) {
    int place = atomicAdd(&shared.total, count);
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if (key[i] >= tau) {
        shared.candidate[place] = rank_key(key[i], i * kTopkThreads + thread);
        shared.score[place] = score[i];
        ++place;
      }
    }
  }
  __syncthreads();

  // ---- rank = how many are better; four lanes share a candidate ----
  const int total = shared.total;
  for (int first = 0; first < total; first += kTopkThreads / 4) {
    const int candidate = first + thread / 4;
    const Key own = candidate < total ? shared.candidate[candidate] : ~0ull;
    int rank = 0;
    for (int j = lane % 4; j < total; j += 4) rank += shared.candidate[j] > own;
    rank += __shfl_xor_sync(kFullWarp, rank, 1);
    rank += __shfl_xor_sync(kFullWarp, rank, 2);
    if (lane % 4 == 0 && candidate < total && rank < p.k) {
      shared.chosen[rank] = expert_of(own);
      shared.chosen_score[rank] = shared.score[candidate];
    }
  }
  __syncthreads();
  if (thread < 32) {
    const float value = lane < p.k ? shared.chosen_score[lane] : 0.f;
    const float norm = warp_sum(value) + 1e-20f;
    if (lane < p.k) {
      const int expert = shared.chosen[lane];
      p.ids[row * p.k + lane] = expert;
      p.weights[row * p.k + lane] = value / norm * p.scale;
      if (p.counts != nullptr) atomicAdd(p.counts + expert, 1);
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::routing
