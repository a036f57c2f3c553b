// One block a token. Scores live in registers: expert e sits in thread e % kTopkThreads, register e / kTopkThreads.
#pragma once

#include <cstdint>

#include "params.h"

namespace kimi::routing {

constexpr int kTopkThreads = 128;

// Only for expert groups.
struct GroupShared {
  float biased[kMaxExperts];
  float score[kMaxExperts];
  uint8_t kept[kMaxExperts];
};

struct TopkShared {
  union {
    struct {
      unsigned long long candidate[kMaxExperts];  // score key in the high half, ~expert in the low half
      float score[kMaxExperts];                   // the unbiased sigmoid
    };
    GroupShared groups;  // before the candidates
  };
  alignas(16) uint32_t group_best[32];
  int total;
  int chosen[kMaxTopK];
  float chosen_score[kMaxTopK];
};

}  // namespace kimi::routing
