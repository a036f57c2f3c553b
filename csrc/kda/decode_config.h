// How a head is spread over blocks, warps and lanes, and what a block keeps in shared memory.
#pragma once

#include "params.h"

namespace kimi::kda {

// A cluster of kCluster blocks holds one head of one sequence; block `rank` owns 128 / kCluster consecutive value rows,
// a warp kRows of them, and a lane four consecutive key columns of each row (16 bytes, so a row is one warp-wide
// access).
template <int kCluster_, int kWarps_>
struct DecodeConfig {
  static constexpr int kCluster = kCluster_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockRows = kHeadDim / kCluster;
  static constexpr int kRows = kBlockRows / kWarps;
  static constexpr int kPartials = kCluster * kWarps;  // one sum of o^2 per warp of the cluster
  static_assert(kCluster <= 8 && kRows >= 1 && kRows <= 16 && kRows * kWarps * kCluster == kHeadDim);

  // Work before the recurrence, in pieces of 32 channels, one channel a lane. Each channel of the head is made by one
  // block of the cluster: kQkPieces of the eight q and k pieces, its own value rows, and the same channels of the
  // forget gate.
  static constexpr int kQkPieces = 8 / kCluster;
  static constexpr int kOwnPieces = (kBlockRows + 31) / 32;
  static constexpr int kPieces = kQkPieces + 2 * kOwnPieces;
  static constexpr int kPasses = (kPieces + kWarps - 1) / kWarps;  // piece i belongs to warp i % kWarps
};

// Heads and their split along x, so that a cluster is one head; sequences along y and, beyond its limit, z.
inline dim3 decode_grid(int sequences, int blocks_of_one) {
  constexpr int kMost = 32768;
  const int y = sequences < kMost ? sequences : kMost;
  return dim3(blocks_of_one, y, (sequences + y - 1) / y);
}

// What the recurrence of one token needs of its head; every block of the cluster gets it, value rows apart.
template <class Config>
struct TokenInputs {
  alignas(16) float q[kHeadDim];  // convolved, not yet normalised
  alignas(16) float k[kHeadDim];
  alignas(16) float decay[kHeadDim];  // e^g
  float v[Config::kBlockRows];
  alignas(16) float sum_squares[8];  // of the four pieces of q, then of k
  static constexpr int kBytes = (3 * kHeadDim + Config::kBlockRows + 8) * sizeof(float);
};

template <class Config>
struct DecodeShared {
  TokenInputs<Config> inputs;
  alignas(16) float partials[Config::kPartials];  // of o^2, written by every warp of the cluster
  uint64_t inputs_barrier, partials_barrier;      // count the bytes of both
};

// Runs: a cluster of two blocks holds one head of one sequence, each half of its value rows.
constexpr int kRunThreads = 128, kRunRows = kHeadDim / 2;

struct RunShared {
  struct Record {
    alignas(16) float decay[kHeadDim];
    float k[kHeadDim];
    float delta[kRunRows];
  };
  struct Token {
    alignas(16) float q[kHeadDim];  // convolved, then scaled in place; k too
    float k[kHeadDim];
    float decay[kHeadDim];
    float v[kRunRows];
    float error[kRunRows];  // beta-weighted
    float o[kRunRows];
    __nv_bfloat16 gate[kRunRows];
    float sum_squares[8];  // of the four pieces of q, then of k
    float beta;            // after the sigmoid
    float kq;
    float squares;  // of o, from the other block
  };
  union {
    Record committed[kMaxRun];                       // the last run's records, as far as they are accepted,
    alignas(128) float leaving[kRunRows][kHeadDim];  // then the state on its way to memory
  };
  Token tokens[kMaxRun];
  uint64_t channels_barrier, squares_barrier;  // count the bytes from the other block
};

}  // namespace kimi::kda
