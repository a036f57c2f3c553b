// A block sorts one chunk of pairs: 32 warps, each a contiguous piece, with a counter for each expert and warp.
#pragma once

#include <cstdint>

#include "../common/math.h"
#include "params.h"

namespace kimi::routing {

constexpr int kDispatchThreads = 1024;
constexpr int kDispatchWarps = kDispatchThreads / 32;
constexpr int kDispatchRounds = 8;                               // of 32 pairs, a warp at most
constexpr int kChunkPairs = kDispatchThreads * kDispatchRounds;  // 8192: counters fit 16 bits
constexpr int kOwnPieces = 4;                                    // tiles of its expert that a thread writes itself

static_assert(kChunkPairs <= 65535, "counters are 16 bits wide");
static_assert(kMaxExperts <= kDispatchThreads, "a thread scans one expert");

// Counters, then the scan of experts. The block that makes the tiles uses the counters' space for sorting.
struct DispatchShared {
  int32_t base[kMaxExperts];
  int32_t count[kMaxExperts];
  int32_t warp_total[kDispatchWarps];
  int32_t total;
  int32_t pad[31];
};

inline size_t dispatch_shared_bytes(int experts) {
  const size_t counters = sizeof(uint16_t) * kDispatchWarps * round_up(experts, 8);
  const size_t sort = 2 * sizeof(uint32_t) * kMaxExperts;
  return sizeof(DispatchShared) + (counters > sort ? counters : sort);
}

}  // namespace kimi::routing
