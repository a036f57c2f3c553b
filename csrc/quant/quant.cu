// sass(sm_90a, sm_100f, sm_103f): F2FP.SATFINITE.E4M3
#include "../common/launch.h"
#include "quant.cuh"

namespace kimi::quant {
namespace {

// Enough blocks for every warp to have one piece, at most 16 waves of the machine.
LaunchShape shape_for(int64_t warps) {
  const int64_t most = static_cast<int64_t>(sm_count()) * 8 * 16;
  const int64_t blocks = ceil_div<int64_t>(warps, kWarps);
  return LaunchShape{dim3(static_cast<unsigned>(blocks < most ? blocks : most)), dim3(kThreads)};
}

template <Format kFormat>
void launch_quant(const QuantParams& params, cudaStream_t stream) {
  const LaunchShape shape = shape_for(params.rows * ceil_div(params.width, kWarpColumns));
  switch (group_lanes(params)) {
    case 4:
      return launch(quant_kernel<kFormat, 4>, shape, stream, params);
    case 8:
      return launch(quant_kernel<kFormat, 8>, shape, stream, params);
    case 16:
      return launch(quant_kernel<kFormat, 16>, shape, stream, params);
    case 32:
      return launch(quant_kernel<kFormat, 32>, shape, stream, params);
    default:
      return launch(quant_general_kernel<kFormat>, shape_for(params.rows * params.groups), stream, params);
  }
}

}  // namespace

void launch_fp8(const QuantParams& params, cudaStream_t stream) { launch_quant<Format::kFp8>(params, stream); }

void launch_mxfp8(const QuantParams& params, cudaStream_t stream) { launch_quant<Format::kMxfp8>(params, stream); }

}  // namespace kimi::quant
