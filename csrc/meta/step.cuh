// All per-step metadata in one launch: three independent maps (tokens, sequences, block table), no thread waits for
// another. Sizes are read from the packed header and cut to the buffers, so that a wrong header cannot write outside.
#pragma once

#include "../common/math.h"
#include "../common/ptx.cuh"
#include "params.h"

namespace kimi::meta {

constexpr int kStepThreads = 256;

__device__ __forceinline__ int clamp_to(int value, int64_t most) {
  return value < 0 ? 0 : value < most ? value : static_cast<int>(most);
}

__global__ void __launch_bounds__(kStepThreads) step_kernel(const __grid_constant__ StepParams p) {
  ptx::pdl_wait();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kStepThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kStepThreads;

  const int n = clamp_to(p.packed[0], p.max_seqs), decodes = clamp_to(p.packed[1], n);
  const int tokens = clamp_to(p.packed[2], p.max_tokens);
  const int32_t* cu = p.packed + kHeader;
  const int32_t* computed = cu + n + 1;
  const int32_t* slots = computed + n;
  const int32_t* first_block = slots + n;
  const int32_t* blocks = first_block + n + 1;
  const int32_t* ids = blocks + p.packed[3];

  for (int64_t token = first; token < p.max_tokens; token += stride) {
    if (token >= tokens) {
      p.token_ids[token] = 0;
      p.slot_mapping[token] = -1;
      continue;
    }
    int sequence = static_cast<int>(token);  // a decode has one token
    if (token >= decodes) {                  // the last sequence that starts at or before the token
      int low = decodes, high = n - 1;
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (cu[middle] <= token) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      sequence = low;
    }
    const int position = computed[sequence] + static_cast<int>(token) - cu[sequence];
    const int64_t block = blocks[first_block[sequence] + position / p.block_size];
    p.token_ids[token] = ids[token];
    p.slot_mapping[token] = block * p.block_size + position % p.block_size;
  }

  for (int64_t i = first; i <= p.max_seqs; i += stride) {
    const int sequence = static_cast<int>(i);
    p.cu_seqlens[i] = cu[min(sequence, n)];
    p.prefill_cu_seqlens[i] = cu[min(sequence + decodes, n)] - cu[decodes];
    if (sequence == p.max_seqs) break;
    const bool there = sequence < n;
    p.context_lens[i] = there ? computed[sequence] + cu[sequence + 1] - cu[sequence] : 0;
    p.slots[i] = there ? slots[sequence] : 0;
    p.fresh[i] = there && computed[sequence] == 0;
  }

  const int64_t entries = static_cast<int64_t>(p.max_seqs) * p.max_blocks;
  for (int64_t i = first; i < entries; i += stride) {
    const int sequence = static_cast<int>(i / p.max_blocks), column = static_cast<int>(i % p.max_blocks);
    const int start = sequence < n ? first_block[sequence] : 0;
    const int count = sequence < n ? first_block[sequence + 1] - start : 0;
    p.block_table[i] = column < count ? blocks[start + column] : 0;
  }
  if (first == 0) *p.num_tokens = tokens;
  ptx::pdl_trigger();
}

}  // namespace kimi::meta
