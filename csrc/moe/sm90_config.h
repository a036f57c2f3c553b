// Tile shapes of the sm_90a expert GEMM and its shared-memory plan; what made them: docs/kernels/moe_experts.md.
#pragma once

#include "../common/math.h"
#include "params.h"

namespace kimi::moe {

constexpr int kConsumerWarpgroups = 2;  // 64 weight rows each
constexpr int kConsumerThreads = kConsumerWarpgroups * 128;
constexpr int kConsumerBarrier = 1;
constexpr int kTurnBarrier = 2;  // and 3: one a warpgroup

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
  static constexpr bool kFp8 = kActivation == Activation::kFp8;
  // One or two CTAs: registers move from a producer warpgroup to the consumers; a CTA starts with 384 times 168 or 80.
  // With three no thread may have more than 72 anyway, and a producer warp is enough.
  static constexpr bool kMoveRegisters = kCtas <= 2;
  static constexpr int kThreads = kConsumerThreads + (kMoveRegisters ? 128 : 32);
  static constexpr int kConsumerRegisters = kCtas == 1 ? 232 : 96;
  static constexpr int kProducerRegisters = kCtas == 1 ? 40 : 48;

  static constexpr int kRowBytes = row_bytes(kActivation, kGemm);
  static constexpr int kRowPitch = row_pitch(kActivation);
  static constexpr int kBlockBytes = weight_block_bytes(kFormat);
  static constexpr int kHeaderBytes = weight_header_bytes(kFormat);
  // How often a block's accumulators are added to the fp32 sums: per scale group of the activations, and because FP8
  // products are summed in short accumulators; BF16 x MXFP4 needs neither, its row scales wait until the end.
  static constexpr int kPromotions = kFp8 ? kGemm : kFormat == WeightFormat::kFp8 ? 1 : 0;

  // With one CTA an SM the warpgroups take turns at the tensor cores: one promotes and decodes while the other
  // multiplies. With two promotions a block the turns are too short to pay.
  static constexpr bool kTakeTurns = kCtas == 1 && kPromotions < 2;

  // BF16 weights take twice the registers, and ptxas spills some of them whatever N is when there are two sets.
  static constexpr Decode decode(int rows) {
    if (!kFp8 || kCtas > 2) return Decode::kAfterwards;
    if (kCtas == 2 && kFormat == WeightFormat::kMxfp4 && rows <= 16) return Decode::kMeanwhileFetched;
    return Decode::kMeanwhile;
  }

  // A stage: activations, then weights (the header is there in a tile's first block only, but its place is kept).
  static constexpr int kWeightOffset = round_up(kMaxRows * kRowBytes, 128);
  static constexpr int kStageBytes = round_up(kWeightOffset + kHeaderBytes + kBlockBytes, 1024);
  // Epilogue of the first product: the largest |h| a warp and row, then h before it is copied out.
  static constexpr int kHiddenStride = (kFp8 ? 64 : 128) + 16;
  static constexpr int kMaximaBytes = kGemm == 1 && kFp8 ? kMaxRows * 8 * 4 : 0;
  static constexpr int kEpilogueBytes = kGemm == 1 ? kMaxRows * kHiddenStride + kMaximaBytes : 0;
  static constexpr int kSharedBytes = kStages * kStageBytes + kEpilogueBytes + 1024;  // the stages are aligned by hand
  static_assert(kSharedBytes <= 232448 - 512, "shared memory of a CTA");
};

}  // namespace kimi::moe
