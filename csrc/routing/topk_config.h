// One warp a token. Scores live in registers: expert e sits in lane e % 32, register e / 32.
#pragma once

#include <cstdint>

#include "params.h"

namespace kimi::routing {

// Candidates that the fast path can rank: two a lane. 16 of 896 random scores leave 22 on average.
constexpr int kMaxCandidates = 64;

// Registers for scores in a lane: 8, 16, 28 (K3's 896 experts) or 32.
inline int topk_registers(int experts) {
  const int needed = (experts + 31) / 32;
  return needed <= 8 ? 8 : needed <= 16 ? 16 : needed <= 28 ? 28 : 32;
}

// Few tokens spread over all SMs, one warp a block; many share blocks.
inline int topk_warps(int64_t tokens, int sms) { return tokens <= 4 * static_cast<int64_t>(sms) ? 1 : 4; }

struct TopkShared {
  unsigned long long candidate[kMaxCandidates];  // score key in the high half, ~expert in the low half
  float score[kMaxCandidates];                   // the unbiased sigmoid
  uint32_t lane_best[32];
};

// Only for expert groups.
struct GroupShared {
  float score[kMaxExperts];
  uint8_t kept[kMaxExperts];
};

}  // namespace kimi::routing
