#include "../common/launch.h"
#include "topk.cuh"

namespace kimi::routing {

void launch_topk(const TopkParams& params, cudaStream_t stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(params.tokens)), dim3(kTopkThreads)};
  if (params.experts <= 7 * kTopkThreads) {  // K3's 896
    launch(topk_kernel<7>, shape, stream, params);
  } else {
    launch(topk_kernel<8>, shape, stream, params);
  }
}

}  // namespace kimi::routing
