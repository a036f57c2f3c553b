#include "../common/launch.h"
#include "rms.cuh"

namespace kimi::norm {

void launch_rms(const RmsParams& params, cudaStream_t stream) {
  const RmsTiling tiling = rms_tiling(params.rows, params.width, sm_count());
  const LaunchShape shape{dim3(tiling.blocks), dim3(tiling.threads)};
  switch (tiling.vectors) {
    case 1:
      return launch(rms_kernel<1>, shape, stream, params);
    case 2:
      return launch(rms_kernel<2>, shape, stream, params);
    default:
      return launch(rms_kernel<4>, shape, stream, params);
  }
}

}  // namespace kimi::norm
