#include "plan.h"

#include <algorithm>

#include "../common/math.h"

namespace kimi::moe {
namespace {

// Up to how many rows an expert has on average a class is taken; measurements in docs/kernels/moe_experts.md.
struct Row {
  double mean_rows;
  TileClass tiles;
};
constexpr Row kTable[] = {{6.0, TileClass::kSmall}, {20.0, TileClass::kMedium}, {1e300, TileClass::kLarge}};

}  // namespace

Choice choose(const Problem& problem) {
  const int64_t pairs = problem.tokens * problem.top_k;
  const double mean = static_cast<double>(pairs) / problem.total_experts;
  const Row* row = kTable;
  while (mean > row->mean_rows) ++row;
  Choice choice = {};
  choice.tiles = row->tiles;
  choice.piece_rows = piece_rows(row->tiles, problem.format, problem.activation);
  choice.max_tiles = std::min<int64_t>(pairs, problem.experts) + pairs / choice.piece_rows;
  return choice;
}

Workspace lay_out(const Problem& problem) {
  const int64_t pairs = problem.tokens * problem.top_k, padded = padded_rows(pairs, problem.experts);
  const int64_t blobs = padded * ceil_div(problem.width, kBlockColumns) * row_bytes(problem.activation);
  const int64_t hidden = padded * ceil_div(problem.inner, kBlockColumns) * row_bytes(problem.activation);
  const int64_t rows = pairs * problem.width * 2;
  const bool fp8 = problem.activation == Activation::kFp8;
  const int64_t groups = fp8 ? padded * hidden_groups(ceil_div(problem.inner, kBlockColumns)) : 0;
  Workspace space = {};
  space.blobs = space.rows = 0;
  space.hidden = round_up<int64_t>(std::max(blobs, rows), 256);
  space.scales = space.hidden + round_up<int64_t>(hidden, 256);
  space.exponents = space.scales + (fp8 ? round_up<int64_t>(padded * 4, 256) : 0);
  space.codes = space.exponents + round_up<int64_t>(groups, 256);
  space.code_scales = space.codes + (fp8 ? problem.tokens * round_up(problem.width, kBlockColumns) : 0);
  space.bytes = space.code_scales + (fp8 ? round_up<int64_t>(problem.tokens * 4, 256) : 0);
  return space;
}

std::string describe(const Problem& problem) {
  const Choice choice = choose(problem);
  const char* const format = problem.format == WeightFormat::kMxfp4 ? "mxfp4" : "fp8";
  const char* const activation = problem.activation == Activation::kFp8 ? "fp8" : "bf16";
  return std::to_string(problem.tokens) + " tokens, " + std::to_string(problem.top_k) + " of " +
         std::to_string(problem.total_experts) + " experts, " + std::to_string(problem.experts) + " here, " +
         std::to_string(problem.width) + " -> " + std::to_string(problem.inner) + ", " + format + " x " + activation +
         ": pieces of up to " + std::to_string(choice.piece_rows) + " rows, at most " +
         std::to_string(choice.max_tiles) + " tiles, workspace " + std::to_string(lay_out(problem).bytes) + " bytes";
}

}  // namespace kimi::moe
