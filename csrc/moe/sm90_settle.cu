#include <algorithm>

#include "../common/launch.h"
#include "launch.h"
#include "sm90_settle.cuh"

namespace kimi::moe {

void launch_settle(const SettleParams& params, int64_t max_tiles, cudaStream_t stream) {
  const int most = 16 * sm_count();  // blocks: two waves or so
  const int blocks = static_cast<int>(std::min<int64_t>(max_tiles, most));
  const int rows = std::clamp(most / std::max(blocks, 1), 1, ceil_div(params.work.max_rows, kSettleThreads / 32));
  launch(settle_kernel, LaunchShape{dim3(blocks, rows), dim3(kSettleThreads)}, stream, params);
}

}  // namespace kimi::moe
