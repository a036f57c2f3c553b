// Arguments of the routing kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi::routing {

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 16;
constexpr int64_t kMaxPairs = int64_t{1} << 28;  // (token, choice) of one dispatch

struct TopkParams {
  const float* logits;        // [tokens, experts], row stride in elements
  const float* bias;          // [experts], used for choosing only
  const int32_t* num_tokens;  // [1] or null: rows at or beyond it get ids -1 and weights 0
  int32_t* ids;               // [tokens, k]
  float* weights;             // [tokens, k]
  int32_t* counts;            // [experts + 1], added to (last entry: rows with a NaN), or null
  int64_t tokens;
  int64_t logits_stride;
  int experts, k;
  int num_groups, topk_groups;
  float scale;
};

// Sorts the pairs (token, choice) by expert and cuts each expert's into tiles. Experts are counted from `first`.
struct DispatchParams {
  const int32_t* ids;         // [tokens, k]
  const int32_t* num_tokens;  // [1] or null
  int32_t* clear;             // [num_clear] set to 0: the counts that topk added to; or null
  int32_t* counts;            // [experts]
  int32_t* offsets;           // [experts + 1]
  int32_t* pairs;             // [tokens * k]: token * k + j by expert, ascending within one; -1 beyond the total
  int32_t* tiles;             // [max_tiles, 3]: expert, first position in pairs, tokens; -1 beyond num_tiles
  int32_t* num_tiles;         // [1]
  int64_t tokens;
  int k;
  int num_clear;
  int first, experts;  // ids first .. first + experts - 1 take part
  int tile_tokens;     // a tile holds at most so many pairs
  int max_tiles;
  // Set by launch_dispatch.
  int chunks;
  int32_t* group_counts;   // [chunks, 32] when there is more than one chunk: pairs of 32 experts each
  uint16_t* chunk_counts;  // [chunks, experts]
};

int64_t dispatch_scratch(int64_t pairs, int64_t experts);  // int32 elements; 0 when no scratch is needed
void launch_dispatch(DispatchParams params, int32_t* scratch, cudaStream_t stream);

void launch_topk(const TopkParams& params, cudaStream_t stream);

}  // namespace kimi::routing
