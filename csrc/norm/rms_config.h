// How a row is spread over a block: 16-byte vectors a thread, threads, and blocks that walk the rows.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../common/math.h"

namespace kimi::norm {

constexpr int kVectorElements = 8;  // bf16 in 16 bytes
constexpr int kQuantGroup = 128;    // columns that share an FP8 scale
constexpr int kGroupWidth = 128;    // columns that the gated norm normalises together
constexpr int kMaxThreads = 1024;
constexpr int kMaxWidth = 2 * kVectorElements * kMaxThreads;

struct RmsTiling {
  int vectors;  // a thread's 16-byte vectors of one row: 1 or 2
  int threads;
  int blocks;
};

// Two vectors a thread from 4096 columns on: three blocks of 448 threads then share an SM at width 7168, and while one
// reduces the others load. Few rows are a matter of latency, so there the row is spread over more threads.
inline RmsTiling rms_tiling(int64_t rows, int width, int sms) {
  if (width > kMaxWidth) throw std::invalid_argument("norm.rms: at most " + std::to_string(kMaxWidth) + " columns");
  const bool few = rows <= sms;
  int vectors = 1;
  if (width > kVectorElements * kMaxThreads || (!few && width > 4096)) vectors = 2;
  const int threads = round_up(ceil_div(width, vectors * kVectorElements), 32);
  const int resident = 2048 / threads < 16 ? 2048 / threads : 16;
  const int64_t most = static_cast<int64_t>(sms) * resident;
  return {vectors, threads, static_cast<int>(rows < most ? rows : most)};
}

}  // namespace kimi::norm
