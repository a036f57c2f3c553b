// Block 0 makes the tiles; the others sort a chunk's pairs of 32 experts each, a warp an expert.
#pragma once

#include <cstdint>

#include "../common/math.h"
#include "params.h"

namespace kimi::routing {

constexpr int kDispatchThreads = 1024;
constexpr int kDispatchWarps = kDispatchThreads / 32;
constexpr int kSliceExperts = kDispatchWarps;
constexpr int kMaxRounds = 8;  // pairs of a thread: a chunk holds at most 8192, so its counts fit 16 bits
constexpr int kDigitBits = 5;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kOwnPieces = 4;  // tiles of its expert that a thread writes itself

static_assert(kDispatchWarps == 32, "lane i of each warp stands for warp i, for digit i, for group i of experts");
static_assert(kMaxExperts == kDispatchThreads, "a thread an expert");

struct SliceShared {
  int32_t count[kSliceExperts];   // all pairs of each expert of the slice,
  int32_t before[kSliceExperts];  // those in the chunks before this one
  int32_t below[kDispatchWarps];  // a warp's sums over all pairs: of experts before the slice,
  int32_t total[kDispatchWarps];  // of all that take part,
  int32_t own[kDispatchWarps];    // and of the slice, in this chunk
};  // followed by uint32 [pairs of a chunk]: the slice's pairs in order

struct TileShared {
  int32_t count[kMaxExperts];
  int32_t start[kMaxExperts];
  int32_t sorted[kMaxExperts];
  uint32_t lanes[kDigits][33];  // by digit (largest first) and warp: which lanes' experts have it
  int32_t before[kDigits][33];  // how many experts with this digit are in the warps before
  int32_t digit_total[kDigits];
  int32_t warp_total[kDispatchWarps], warp_most[kDispatchWarps], warp_pieces[kDispatchWarps];
};

// Pairs of a chunk for each thread: a few sizes, so that few pairs do not run through the code of many.
inline int dispatch_rounds(int64_t pairs) {
  return pairs <= kDispatchThreads ? 1 : pairs <= 4 * kDispatchThreads ? 4 : kMaxRounds;
}

inline int dispatch_slices(int experts) { return ceil_div(experts, kSliceExperts); }

inline size_t dispatch_shared_bytes(int rounds) {
  const size_t slice = sizeof(SliceShared) + sizeof(uint32_t) * rounds * kDispatchThreads;
  return slice > sizeof(TileShared) ? slice : sizeof(TileShared);
}

}  // namespace kimi::routing
