// Chooses and launches a GEMM; included by one .cu file per pair of formats.
#pragma once

#include <algorithm>

#include "../common/launch.h"
#include "launch.h"
#include "sm90_gemm.cuh"

namespace kimi::moe {

template <class Config, int... kLadder>
void launch_config(const GemmParams& params, int64_t max_items, cudaStream_t stream) {
  const int blocks = static_cast<int>(std::min<int64_t>(max_items, int64_t(sm_count()) * Config::kCtas));
  LaunchShape shape{dim3(round_up(blocks, Config::kCluster)), dim3(Config::kThreads), Config::kSharedBytes};
  shape.cluster = Config::kCluster;
  launch(experts_gemm<Config, kLadder...>, shape, stream, params);
}

// The most stages that fit beside the epilogue.
template <WeightFormat kFormat, Activation kActivation, int kGemm, int kMaxRows, int kCtas>
constexpr int most_stages() {
  using One = GemmConfig<kFormat, kActivation, kGemm, kMaxRows, 1, kCtas>;
  // An SM has 228 KiB, of which the system takes 1 KiB a CTA; less the barriers and the table.
  constexpr int kLimit = 233472 / kCtas / 128 * 128 - 1024 - 512;
  constexpr int kFit = (kLimit - One::kEpilogueBytes - 1024) / One::kStageBytes;
  return kFit < 16 ? kFit : 16;
}

template <WeightFormat kFormat, Activation kActivation, int kGemm, int kCtas, int... kLadder>
void launch_ladder(const GemmParams& params, int64_t max_items, cudaStream_t stream) {
  constexpr int kMaxRows = std::max({kLadder...});
  constexpr int kStages = most_stages<kFormat, kActivation, kGemm, kMaxRows, kCtas>();
  launch_config<GemmConfig<kFormat, kActivation, kGemm, kMaxRows, kStages, kCtas>, kLadder...>(params, max_items,
                                                                                               stream);
}

template <WeightFormat kFormat, Activation kActivation, int kGemm>
void launch_class(const GemmParams& params, TileClass tiles, int64_t max_items, cudaStream_t stream) {
  switch (tiles) {
    case TileClass::kSmall:
      return launch_ladder<kFormat, kActivation, kGemm, 2, 8, 16>(params, max_items, stream);
    case TileClass::kMedium:
      if constexpr (piece_rows(TileClass::kMedium, kFormat, kActivation) == 24) {
        return launch_ladder<kFormat, kActivation, kGemm, 2, 8, 16, 24>(params, max_items, stream);
      } else {
        return launch_ladder<kFormat, kActivation, kGemm, 2, 8, 16, 24, 32>(params, max_items, stream);
      }
    case TileClass::kLarge:
      if constexpr (piece_rows(TileClass::kLarge, kFormat, kActivation) == 128) {
        return launch_ladder<kFormat, kActivation, kGemm, 1, 32, 64, 96, 128>(params, max_items, stream);
      } else {
        return launch_ladder<kFormat, kActivation, kGemm, 1, 32, 64, 96, 128, 144, 160>(params, max_items, stream);
      }
  }
}

}  // namespace kimi::moe
