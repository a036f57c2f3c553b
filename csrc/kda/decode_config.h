// Shape of the decode kernel: how one head's state is spread over blocks, warps and lanes.
#pragma once

#include "params.h"

namespace kimi::kda {

// A cluster of kCluster blocks holds one head of one token; block `rank` owns 128 / kCluster consecutive value rows, a
// warp kRows of them, and a lane four consecutive key columns of each row (16 bytes, so a row is one warp-wide access).
template <int kCluster_, int kWarps_>
struct DecodeConfig {
  static constexpr int kCluster = kCluster_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockRows = kHeadDim / kCluster;
  static constexpr int kRows = kBlockRows / kWarps;
  static constexpr int kPartials = kCluster * kWarps;  // one sum of o^2 per warp of the cluster
  static_assert(kRows >= 1 && kRows <= 16 && kRows * kWarps * kCluster == kHeadDim);

  // Work before the recurrence, in pieces of 32 channels, one channel a lane: 4 of q, 4 of k, this block's own v rows,
  // then 4 of the forget gate. Piece i of the convolutions belongs to warp i % kWarps; the gate is dealt to the last
  // warps, which have the fewest convolutions.
  static constexpr int kConvPieces = 8 + (kBlockRows + 31) / 32;
  static constexpr int kConvPasses = (kConvPieces + kWarps - 1) / kWarps;
  static constexpr int kFirstGateWarp = kWarps - 4;
  static_assert(kWarps >= 4);
};

// Heads and their split along x, so that a cluster is one head; sequences along y and, beyond its limit, z.
inline dim3 decode_grid(int sequences, int blocks_of_one) {
  constexpr int kMost = 32768;
  const int y = sequences < kMost ? sequences : kMost;
  return dim3(blocks_of_one, y, (sequences + y - 1) / y);
}

template <class Config>
struct DecodeShared {
  alignas(16) float q[kHeadDim];  // convolved, rounded to bf16, not yet normalised
  alignas(16) float k[kHeadDim];
  alignas(16) float decay[kHeadDim];  // e^g
  float v[Config::kBlockRows];
  float sum_squares[8];                           // of q (four warps) and k (four warps)
  alignas(16) float partials[Config::kPartials];  // of o^2, written by every warp of the cluster
  uint64_t barrier;                               // counts their bytes
};

// A run of up to kMaxRun tokens, and the last run's record as far as it is committed.
template <class Config>
struct RunShared {
  struct Record {
    alignas(16) float decay[kHeadDim];
    alignas(16) float k[kHeadDim];
    alignas(16) float delta[Config::kBlockRows];
  };
  struct Token {
    alignas(16) float q[kHeadDim];
    alignas(16) float k[kHeadDim];
    alignas(16) float decay[kHeadDim];
    float v[Config::kBlockRows];
    float o[Config::kBlockRows];
    __nv_bfloat16 gate[Config::kBlockRows];
    float beta;  // after the sigmoid
    alignas(16) float sum_squares[8];
    alignas(16) float partials[Config::kPartials];
  };
  Record committed[kMaxRun];
  Token tokens[kMaxRun];
  uint64_t barrier;  // counts the bytes of all tokens' partials
};

}  // namespace kimi::kda
