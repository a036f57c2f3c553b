#include "../common/launch.h"
#include "verify.cuh"

namespace kimi::kda {

void launch_run(const RunParams& params, cudaStream_t stream) {
  using Config = DecodeConfig<4, 8>;
  const LaunchShape shape{decode_grid(params.sequences, params.token.heads * Config::kCluster), dim3(Config::kThreads),
                          0, Config::kCluster};
  launch(run_kernel<Config, 2>, shape, stream, params);
}

}  // namespace kimi::kda
