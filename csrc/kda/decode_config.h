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

// Runs: a cluster of one or two blocks holds one head of one sequence, each its part of the value rows, a warp 16 of
// them.
template <int kCluster_>
struct RunConfig {
  static constexpr int kCluster = kCluster_;
  static constexpr int kRows = kHeadDim / kCluster;  // of a block
  static constexpr int kThreads = 2 * kRows;
  static constexpr int kBlocksPerSm = kCluster == 1 ? 2 : 3;  // as many as shared memory has room for
  static constexpr int kMixed = 2 / kCluster;                 // of q and k, those whose convolution a block makes
  static_assert(kCluster == 1 || kCluster == 2);
};

// The kernel's loop over tokens relies on the order: k and decay are one and two arrays behind q, error and o behind v.
template <class Config>
struct RunShared {
  alignas(128) float q[kMaxRun][kHeadDim];  // convolved, then scaled in place; k too
  float k[kMaxRun][kHeadDim];
  float decay[kMaxRun][kHeadDim];
  float v[kMaxRun][Config::kRows];
  struct Inputs {  // of this block: q, k or both, its rows of v and the same channels of the forget gate
    __nv_bfloat16 mixed[Config::kMixed][kMaxRun][kHeadDim], v[kMaxRun][Config::kRows], f[kMaxRun][Config::kRows];
  };
  struct Results {  // of its rows; the error is weighted with beta
    float error[kMaxRun][Config::kRows], o[kMaxRun][Config::kRows];
  };
  union alignas(16) {
    Inputs raw;
    Results result;  // after the convolutions
  };
  alignas(16) __nv_bfloat16 gate[kMaxRun][Config::kRows];
  float norm_weight[Config::kRows];
  alignas(16) float sum_squares[kMaxRun][8];  // of the four pieces of q, then of k
  struct alignas(8) {
    float beta, kq;  // beta after the sigmoid
  } scalars[kMaxRun];
  float squares[kMaxRun];                                     // of o, from the other block
  uint64_t channels_barrier, squares_barrier, loads_barrier;  // count bytes, the first two those of the other block
  alignas(128) float last[3][kMaxRun][kHeadDim];      // decay, k and errors of the last run, as far as it is accepted
  alignas(128) float state[Config::kRows][kHeadDim];  // on its way from memory, and back to it
};

}  // namespace kimi::kda
