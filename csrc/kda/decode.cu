#include "../common/launch.h"
#include "decode.cuh"

namespace kimi::kda {
namespace {

template <int kCluster, int kWarps, int kMinBlocks, bool kPrefetch>
void launch_as(const DecodeParams& params, cudaStream_t stream) {
  using Config = DecodeConfig<kCluster, kWarps>;
  const LaunchShape shape{decode_grid(params.tokens, params.heads * Config::kCluster), dim3(Config::kThreads), 0,
                          kCluster};
  launch(decode_kernel<Config, kMinBlocks, kPrefetch>, shape, stream, params);
}

}  // namespace

void launch_decode(const DecodeParams& params, cudaStream_t stream) { launch_as<4, 8, 4, false>(params, stream); }

}  // namespace kimi::kda
