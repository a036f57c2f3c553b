#include "sm90_gather.cuh"

#include <algorithm>

#include "../common/launch.h"
#include "launch.h"

namespace kimi::moe {

void launch_gather(const GatherParams& params, Activation activation, int64_t max_tiles, cudaStream_t stream) {
  const int threads = std::min(512, round_up(params.k_blocks * (kBlockColumns / 8), 32));
  const int blocks = static_cast<int>(std::min<int64_t>(max_tiles, 8 * sm_count()));
  const int rows = std::clamp(8 * sm_count() / std::max(blocks, 1), 1, std::min(params.work.max_rows, 64));
  const LaunchShape shape{dim3(blocks, rows), dim3(threads)};
  if (activation == Activation::kFp8) {
    launch(gather_kernel<Activation::kFp8>, shape, stream, params);
  } else {
    launch(gather_kernel<Activation::kBf16>, shape, stream, params);
  }
}

}  // namespace kimi::moe
