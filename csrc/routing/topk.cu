#include "../common/launch.h"
#include "topk.cuh"

namespace kimi::routing {

void launch_topk(const TopkParams& params, cudaStream_t stream) {
  LaunchShape shape{dim3(static_cast<unsigned>(ceil_div<int64_t>(params.tokens, kTopkWarps))), dim3(kTopkThreads)};
  if (params.topk_groups < params.num_groups) {
    shape.shared_bytes = kTopkWarps * sizeof(GroupShared);
    launch(topk_kernel<32, false, true>, shape, stream, params);
  } else if (params.experts == 28 * 32) {  // K3's 896
    launch(topk_kernel<28, true, false>, shape, stream, params);
  } else {
    launch(topk_kernel<32, false, false>, shape, stream, params);
  }
}

}  // namespace kimi::routing
