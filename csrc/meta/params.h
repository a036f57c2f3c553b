// Arguments of the step's metadata launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi::meta {

constexpr int kHeader = 4;  // int32 words: sequences n, decodes among them, tokens T, block ids B

// The host's arrays as they lie in `packed`, one after the other: header, cu_seqlens [n + 1], num_computed [n],
// slots [n], first_block [n + 1], blocks [B], token_ids [T]. n, T, B come from the header: a graph replays any step.
struct StepParams {
  const int32_t* packed;        // [words]
  int64_t* token_ids;           // [max_tokens]; 0 beyond T
  int32_t* cu_seqlens;          // [max_seqs + 1]; T beyond n
  int32_t* prefill_cu_seqlens;  // [max_seqs + 1]: cu_seqlens from the first prefill on, less its start; constant beyond
  int32_t* context_lens;        // [max_seqs], this step's tokens included; 0 beyond n
  int32_t* slots;               // [max_seqs]; 0 beyond n
  bool* fresh;                  // [max_seqs]: nothing computed before; false beyond n
  int32_t* block_table;         // [max_seqs, max_blocks]; 0 beyond a sequence's blocks
  int64_t* slot_mapping;        // [max_tokens]: block * block_size + row; -1 beyond T
  int32_t* num_tokens;          // [1]: T
  int64_t max_tokens;
  int max_seqs, max_blocks, block_size;
};

void launch_step(const StepParams& params, cudaStream_t stream);

}  // namespace kimi::meta
