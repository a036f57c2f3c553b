#include "verify.cuh"

#include "../common/launch.h"

namespace kimi::kda {

void launch_run(const RunParams& params, cudaStream_t stream) {
  using Config = DecodeConfig<4, 8>;
  const int64_t blocks = int64_t{params.sequences} * params.token.heads * Config::kCluster;
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(Config::kThreads), 0, Config::kCluster};
  launch(run_kernel<Config, 2>, shape, stream, params);
}

}  // namespace kimi::kda
