#include "../common/launch.h"
#include "decode.cuh"

namespace kimi::kda {
namespace {

template <int kCluster, int kWarps, int kMinBlocks, bool kGuess, bool kOnce, bool kAskFirst>
void launch_as(const DecodeParams& params, cudaStream_t stream, int carveout = -1) {
  using Config = DecodeConfig<kCluster, kWarps>;
  const dim3 grid = decode_grid(params.tokens, params.heads * kCluster);
  const LaunchShape shape{grid, dim3(Config::kThreads), 0, kCluster, carveout};
  launch(decode_kernel<Config, kMinBlocks, kGuess, kOnce, kAskFirst>, shape, stream, params);
}

}  // namespace

// By the heads of the whole batch; measured at the sizes of docs/kernels/kda_decode.md. Few heads: many small blocks,
// so that all SMs load at once. Many: whole heads, whose blocks exchange nothing, and as many bytes on their way as
// registers hold. From 128 to 639 heads as little L1 as there can be is worth 5% at 192 and 3% at 384, costs 2% at 288,
// and is not understood; more heads lose up to a fifth by it.
void launch_decode(const DecodeParams& params, cudaStream_t stream) {
  constexpr int kNoL1 = 100;
  const int64_t heads = int64_t{params.tokens} * params.heads;
  if (heads < 64) {
    launch_as<8, 4, 8, true, false, true>(params, stream);
  } else if (heads >= 128 && heads < 640) {
    launch_as<2, 8, 3, false, true, false>(params, stream, kNoL1);
  } else if (heads < 2048) {
    launch_as<2, 8, 3, true, false, false>(params, stream);
  } else {
    launch_as<1, 16, 2, true, false, false>(params, stream);
  }
}

}  // namespace kimi::kda
