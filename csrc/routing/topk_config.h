// A warp a token: expert e sits in lane e % 32, register e / 32.
#pragma once

#include <cstdint>

#include "params.h"

namespace kimi::routing {

constexpr int kTopkThreads = 128;
constexpr int kTopkWarps = kTopkThreads / 32;
constexpr int kTopkBlocks = 4;  // of an SM: 128 registers a thread, for all loads at once
constexpr int kCandidates = 64;

struct TopkChoice {
  int32_t expert;
  float score;  // the unbiased sigmoid
};

struct TopkShared {
  alignas(16) unsigned long long key[kCandidates + 4];
  TopkChoice candidate[kCandidates];
  TopkChoice chosen[kMaxTopK];
};

// Only for expert groups.
struct GroupShared {
  float biased[kMaxExperts];
  float score[kMaxExperts];
};

}  // namespace kimi::routing
