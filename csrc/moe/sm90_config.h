// Tile shapes of the sm_90a expert GEMM and its shared-memory plan. See README.md for the measurements behind the choice.
#pragma once

#include "../common/math.h"
#include "params.h"

namespace kimi::moe {

constexpr int kConsumerWarpgroups = 2;  // 64 weight rows each
constexpr int kConsumerThreads = kConsumerWarpgroups * 128;
constexpr int kGemmThreads = kConsumerThreads + 128;  // and a producer warpgroup, of which one thread works
constexpr int kConsumerBarrier = 1;

// kMaxRows: the largest piece (N).
template <WeightFormat kFormat_, Activation kActivation_, int kGemm_, int kMaxRows_, int kStages_, int kCtas_>
struct GemmConfig {
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr Activation kActivation = kActivation_;
  static constexpr int kGemm = kGemm_;  // 1: SiTU and requantise; 2: rows of out
  static constexpr int kMaxRows = kMaxRows_;
  static constexpr int kStages = kStages_;
  static constexpr int kCtas = kCtas_;
  static constexpr bool kFp8 = kActivation == Activation::kFp8;
  // Registers move from the producers to the consumers; a CTA starts with 384 times 168 (one a SM) or 80 (two).
  static constexpr int kConsumerRegisters = kCtas == 1 ? 232 : 96;
  static constexpr int kProducerRegisters = kCtas == 1 ? 40 : 48;

  static constexpr int kRowBytes = row_bytes(kActivation, kGemm);
  static constexpr int kBlockBytes = weight_block_bytes(kFormat);
  static constexpr int kHeaderBytes = weight_header_bytes(kFormat);
  // How often a block's accumulators are added to the fp32 sums: per scale group of the activations, and because FP8
  // products are summed in short accumulators; BF16 x MXFP4 needs neither, its row scales wait until the end.
  static constexpr int kPromotions = kFp8 ? kGemm : kFormat == WeightFormat::kFp8 ? 1 : 0;

  // Up to this N the registers hold two blocks of decoded weights, so that decoding hides behind the products. BF16 takes
  // twice the registers, and ptxas spills some of them whatever N is: there the other warpgroup's products hide it.
  static constexpr int kDecodeAheadRows = !kFp8 ? 0 : kCtas == 2 ? 32 : 160;

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
