#include "../common/launch.h"
#include "rms_gated.cuh"

namespace kimi::norm {

void launch_rms_gated(const RmsGatedParams& params, cudaStream_t stream) {
  const int64_t blocks = ceil_div<int64_t>(params.rows * params.heads, kGatedGroups);
  const int64_t most = static_cast<int64_t>(sm_count()) * 8 * 16;
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks < most ? blocks : most)), dim3(kGatedThreads)};
  params.weight_f32 ? launch(rms_gated_kernel<true>, shape, stream, params)
                    : launch(rms_gated_kernel<false>, shape, stream, params);
}

}  // namespace kimi::norm
