#include "verify.cuh"

#include "../common/launch.h"

namespace kimi::kda {

void launch_run(const RunParams& params, cudaStream_t stream) {
  using Config = RunConfig<2, 8, 3>;
  const dim3 grid = decode_grid(params.sequences, params.token.heads * Config::kCluster);
  launch(run_kernel<Config, 264>, LaunchShape{grid, dim3(Config::kThreads), 0, Config::kCluster}, stream, params);
}

}  // namespace kimi::kda
