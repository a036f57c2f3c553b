// Three ways to lay a token over the machine, chosen by the number of tokens.
//   few:   a token over a cluster of up to 8 CTAs, one 16-byte vector a thread and source, straight into registers
//   many:  one persistent CTA an SM; a producer thread streams whole rows through a ring in shared memory
//   wide:  anything beyond (more than 9 sources, rows over 8192 columns): a CTA a token, sources read twice
#pragma once

#include <cstdint>

#include "../common/math.h"
#include "params.h"

namespace kimi::attn_res {

constexpr int kVector = 8;       // bf16 in 16 bytes
constexpr int kFastSources = 9;  // K3: 8 blocks and the running sum
constexpr int kFewWidth = 8192;
constexpr int kManyWidth = 7680;  // 480 consumers with two vectors each: one warp more would cost 32 registers a thread

// ---- few ----
constexpr int kFewThreads = 512;  // of a CTA, with registers for every load at once
constexpr int kFewMaxThreads = 1024;
static_assert(kFewWidth <= 2 * kFewThreads * kVector && kFewWidth <= kFewMaxThreads * kVector, "a vector a thread");
constexpr int kMaxSplit = 8;
constexpr int kFewTokens = 2;  // SMs a token from which on spreading it over a cluster is worth it

// CTAs a token: as many as leave the SMs with one CTA each, while every CTA keeps whole warps of work.
inline int few_split(int64_t tokens, int width, int sms) {
  int split = kMaxSplit;
  while (split > 1 && (tokens * split > sms || width % (split * kVector) != 0 || width / split < 512)) split /= 2;
  return split;
}

// ---- many ----
constexpr int kManyVectors = 2;  // a thread's vectors of one row
constexpr int kManyMaxThreads = kManyWidth / (kVector * kManyVectors) + 32;
constexpr int kManyMaxStages = 6;  // more rows on their way cost bandwidth: 351 us with 6, 396 with 13 (8192 tokens)

struct alignas(16) ManyShared {
  uint64_t full[kManyMaxStages];
  uint64_t empty[kManyMaxStages];
  float sums[2][32][2 * kFastSources];  // by token parity and warp: dot products, then squares
  float squares[2][32];
};

inline int many_consumers(int width) { return round_up(ceil_div(width, kVector * kManyVectors), 32); }

// Barriers and sums, then the score weight as float4 [2 * kManyVectors][consumers], then the ring.
inline size_t many_ring_offset(int width) {
  return round_up<size_t>(sizeof(ManyShared) + sizeof(float) * kVector * kManyVectors * many_consumers(width), 128);
}

inline int many_stages(int width, int shared_limit) {
  const int fit = (shared_limit - static_cast<int>(many_ring_offset(width))) / (width * 2);
  return fit < kManyMaxStages ? fit : kManyMaxStages;
}

inline size_t many_shared_bytes(int width, int stages) {
  return many_ring_offset(width) + static_cast<size_t>(stages) * width * 2;
}

// ---- wide ----
constexpr int kWideThreads = 512;

}  // namespace kimi::attn_res
