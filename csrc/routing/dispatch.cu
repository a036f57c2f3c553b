#include "../common/launch.h"
#include "dispatch.cuh"

namespace kimi::routing {

int dispatch_chunks(int64_t pairs) {
  const int64_t chunks = ceil_div<int64_t>(pairs, kMaxRounds * kDispatchThreads);
  return static_cast<int>(chunks < 1 ? 1 : chunks);
}

int64_t dispatch_scratch(int64_t pairs, int64_t experts) {
  const int64_t chunks = dispatch_chunks(pairs);
  return chunks == 1 ? 0 : chunks * kDispatchWarps + ceil_div<int64_t>(chunks * experts, 2);
}

void launch_dispatch(DispatchParams params, int32_t* scratch, cudaStream_t stream) {
  const int64_t pairs = params.tokens * params.k;
  params.chunks = dispatch_chunks(pairs);
  const dim3 block(kDispatchThreads), grid(1 + dispatch_slices(params.experts), params.chunks);
  if (params.chunks > 1) {
    params.group_counts = scratch;
    params.chunk_counts = reinterpret_cast<uint16_t*>(scratch + params.chunks * kDispatchWarps);
    launch(count_chunks_kernel, LaunchShape{dim3(params.chunks), block}, stream, params);
  }
  const int rounds = dispatch_rounds(pairs);
  const LaunchShape shape{grid, block, dispatch_shared_bytes(rounds)};
  if (rounds == 1) return launch(dispatch_kernel<1>, shape, stream, params);
  if (rounds == 4) return launch(dispatch_kernel<4>, shape, stream, params);
  launch(dispatch_kernel<kMaxRounds>, shape, stream, params);
}

}  // namespace kimi::routing
