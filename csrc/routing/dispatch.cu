#include "../common/launch.h"
#include "dispatch.cuh"

namespace kimi::routing {

int dispatch_chunks(int64_t pairs) {
  const int64_t chunks = ceil_div<int64_t>(pairs, kChunkPairs);
  return static_cast<int>(chunks < 1 ? 1 : chunks);
}

void launch_dispatch(const DispatchParams& params, cudaStream_t stream) {
  const dim3 block(kDispatchThreads);
  const size_t shared = dispatch_shared_bytes(params.experts);
  if (params.chunks > 1) launch(count_chunks_kernel, LaunchShape{dim3(params.chunks), block, shared}, stream, params);
  launch(dispatch_kernel, LaunchShape{dim3(params.chunks + 1), block, shared}, stream, params);
}

}  // namespace kimi::routing
