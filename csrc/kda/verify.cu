#include <algorithm>

#include "../common/launch.h"
#include "../common/math.h"
#include "verify.cuh"

namespace kimi::kda {

void launch_run(const RunParams& params, cudaStream_t stream) {
  const dim3 grid = decode_grid(params.sequences, params.token.heads * 2);
  // Few blocks are spread evenly over the SMs: each asks for so much shared memory that no SM takes more than its
  // share, where it could take four and leave others with two. An SM has 228 KiB, of which a block takes one unseen.
  constexpr int kMostBlocks = 4, kSharedOfSm = 228 * 1024, kReserved = 1024;
  const int64_t share = ceil_div<int64_t>(int64_t{grid.x} * grid.y * grid.z, sm_count());
  size_t shared_bytes = sizeof(RunShared);
  if (share > 0 && share < kMostBlocks) shared_bytes = std::max<size_t>(shared_bytes, kSharedOfSm / share - kReserved);
  launch(run_kernel, LaunchShape{grid, dim3(kRunThreads), shared_bytes, 2}, stream, params);
}

}  // namespace kimi::kda
