// Tile shapes of the sm_90a expert GEMM and its shared-memory plan; what made them: docs/kernels/moe_experts.md.
#pragma once

#include "../common/math.h"
#include "params.h"

namespace kimi::moe {

constexpr int kConsumerWarpgroups = 2;  // 64 weight rows each
constexpr int kConsumerThreads = kConsumerWarpgroups * 128;
constexpr int kEpilogueBarrier = 1;  // and 2: one a warpgroup
constexpr int kTurnBarrier = 3;      // and 4

// When the next block's weights are decoded. kAfterwards: once this block is multiplied (its packed words are read
// before); kMeanwhile: while it is multiplied, into a second set of registers; kMeanwhileFetched: and its words were
// read a block earlier. The more registers, the less latency stands in the way of a warp.
enum class Decode { kAfterwards, kMeanwhile, kMeanwhileFetched };

// kMaxRows: the largest piece (N). kCtas: CTAs an SM.
template <WeightFormat kFormat_, Activation kActivation_, int kGemm_, int kMaxRows_, int kStages_, int kCtas_>
struct GemmConfig {
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr Activation kActivation = kActivation_;
  static constexpr int kGemm = kGemm_;  // 1: SiTU and requantise; 2: rows of out
  static constexpr int kMaxRows = kMaxRows_;
  static constexpr int kStages = kStages_;
  static constexpr int kCtas = kCtas_;
  // Where the tensor cores are the bound, two CTAs with neighbouring row tiles share the activations by multicast.
  static constexpr int kCluster = kCtas == 1 ? 2 : 1;
  static constexpr bool kFp8 = kActivation == Activation::kFp8;
  // One or two CTAs: registers move from a producer warpgroup to the consumers; a CTA starts with 384 times 168 or 80.
  // With three no thread may have more than 72 anyway, and a producer warp is enough.
  static constexpr bool kMoveRegisters = kCtas <= 2;
  static constexpr int kThreads = kConsumerThreads + (kMoveRegisters ? 128 : 32);
  static constexpr int kConsumerRegisters = kCtas == 1 ? 232 : 96;
  static constexpr int kProducerRegisters = kCtas == 1 ? 40 : 48;

  static constexpr int kRowBytes = row_bytes(kActivation);
  static constexpr int kBlockBytes = weight_block_bytes(kFormat);
  static constexpr int kHeaderBytes = weight_header_bytes(kFormat);
  // Over how many blocks the tensor cores sum before their accumulators are added to fp32 sums. FP8 weights have a
  // scale a block. FP8 products are summed in short accumulators; BF16 x MXFP4 needs no other sums (0).
  static constexpr int kSumBlocks = kFormat == WeightFormat::kFp8 ? 1 : kFp8 ? 4 : 0;

  // Where every block is promoted and one CTA has the SM, the warpgroups take turns at the tensor cores: one promotes
  // and decodes while the other multiplies.
  static constexpr bool kTakeTurns = kCtas == 1 && kSumBlocks < 2;

  // BF16 weights take twice the registers, and ptxas spills some of them whatever N is when there are two sets.
  static constexpr Decode decode(int rows) {
    if (!kFp8 || kCtas > 2) return Decode::kAfterwards;
    if (kCtas == 2 && kFormat == WeightFormat::kMxfp4 && rows <= 16) return Decode::kMeanwhileFetched;
    return Decode::kMeanwhile;
  }

  // A stage: activations, their scales (in a tile's last block), weights (after the header in a tile's first block).
  static constexpr int kScaleOffset = kMaxRows * kRowBytes;
  static constexpr int kWeightOffset = round_up(kScaleOffset + (kFp8 ? 4 * kMaxRows : 0), 128);
  static constexpr int kStageBytes = round_up(kWeightOffset + kHeaderBytes + kBlockBytes, 1024);
  // Epilogue of the first product, for each row and warpgroup: the exponents of four warps' columns, then 32 columns of
  // h before they are copied out.
  static constexpr int kEpilogueBytes = kGemm == 1 ? kMaxRows * kConsumerWarpgroups * (4 + (kFp8 ? 32 : 64)) : 0;
  static constexpr int kSharedBytes = kStages * kStageBytes + kEpilogueBytes + 1024;  // the stages are aligned by hand
  static_assert(kSharedBytes <= 232448 - 512, "shared memory of a CTA");
};

}  // namespace kimi::moe
