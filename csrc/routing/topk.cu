#include "../common/launch.h"
#include "topk.cuh"

namespace kimi::routing {
namespace {

template <bool kGroups>
void launch_for(const TopkParams& params, const LaunchShape& shape, cudaStream_t stream) {
  switch (topk_registers(params.experts)) {
    case 8:
      return launch(topk_kernel<8, kGroups>, shape, stream, params);
    case 16:
      return launch(topk_kernel<16, kGroups>, shape, stream, params);
    case 28:
      return launch(topk_kernel<28, kGroups>, shape, stream, params);
    default:
      return launch(topk_kernel<32, kGroups>, shape, stream, params);
  }
}

}  // namespace

void launch_topk(const TopkParams& params, cudaStream_t stream) {
  const bool groups = params.topk_groups < params.num_groups;
  const int warps = topk_warps(params.tokens, sm_count());
  const size_t shared = warps * (sizeof(TopkShared) + (groups ? sizeof(GroupShared) : 0));
  const LaunchShape shape{dim3(static_cast<unsigned>(ceil_div<int64_t>(params.tokens, warps))), dim3(warps * 32),
                          shared};
  groups ? launch_for<true>(params, shape, stream) : launch_for<false>(params, shape, stream);
}

}  // namespace kimi::routing
