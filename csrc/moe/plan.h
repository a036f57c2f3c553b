// Problem -> choice of tiles -> what a call needs: host arithmetic only, printable, no CUDA call.
#pragma once

#include <cstdint>
#include <string>

#include "params.h"

namespace kimi::moe {

// One call of the experts as its shapes say it; nothing here depends on the routing, which only the device knows.
struct Problem {
  int64_t tokens;
  int top_k;
  int experts;        // that take part: of expert_range
  int total_experts;  // that the pairs are spread over: those of other ranks too
  int width;          // of x and of the result
  int inner;          // of h
  WeightFormat format;
  Activation activation;
};

// Sizes of pieces that the GEMMs are built for.
enum class TileClass : int { kSmall = 0, kMedium = 1, kLarge = 2 };

// The most rows of a piece. FP8 weights x BF16 keeps fp32 parts and sums and twice the weight registers: more would
// spill.
constexpr int piece_rows(TileClass tiles, WeightFormat format, Activation activation) {
  const bool crowded = format == WeightFormat::kFp8 && activation == Activation::kBf16;
  if (tiles == TileClass::kSmall) return 16;
  if (tiles == TileClass::kMedium) return crowded ? 24 : 32;
  return crowded ? 128 : 160;
}

struct Choice {
  TileClass tiles;
  int piece_rows;     // the largest piece, and the tiles of the work list that fits best
  int64_t max_tiles;  // tiles that the work list can hold
};

// Offsets into the workspace, in bytes. The rows take the place of x's blobs, which nobody reads any more by then, and
// h's scales that of x's.
struct Workspace {
  int64_t blobs, hidden, rows;
  int64_t scales, exponents, codes, code_scales;  // of FP8 activations
  int64_t bytes;
};

Choice choose(const Problem& problem);
Workspace lay_out(const Problem& problem);
std::string describe(const Problem& problem);

}  // namespace kimi::moe
