// sass(sm_90a, sm_100f, sm_103f): F2FP.SATFINITE.E4M3
#include "../common/launch.h"
#include "rms.cuh"

namespace kimi::norm {

void launch_rms(const RmsParams& params, cudaStream_t stream) {
  const RmsTiling tiling = rms_tiling(params.rows, params.width, sm_count());
  const LaunchShape shape{dim3(tiling.blocks), dim3(tiling.threads)};
  if (tiling.vectors == 1) {
    params.weight_f32 ? launch(rms_kernel<1, true>, shape, stream, params)
                      : launch(rms_kernel<1, false>, shape, stream, params);
  } else {
    params.weight_f32 ? launch(rms_kernel<2, true>, shape, stream, params)
                      : launch(rms_kernel<2, false>, shape, stream, params);
  }
}

}  // namespace kimi::norm
