#include "decode.cuh"

#include "../common/launch.h"

namespace kimi::kda {
namespace {

template <int kCluster, int kWarps, int kMinBlocks, bool kPrefetch>
void launch_as(const DecodeParams& params, cudaStream_t stream) {
  using Config = DecodeConfig<kCluster, kWarps>;
  const int64_t blocks = int64_t{params.tokens} * params.heads * kCluster;
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(Config::kThreads), 0, kCluster};
  launch(decode_kernel<Config, kMinBlocks, kPrefetch>, shape, stream, params);
}

}  // namespace

void launch_decode(const DecodeParams& params, cudaStream_t stream) {
  launch_as<4, 8, 4, false>(params, stream);
}

}  // namespace kimi::kda
