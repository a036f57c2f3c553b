// sass(sm_90a): QGMMA
// sass(sm_90a): UBLKCP
#include "sm90_launch.cuh"

namespace kimi::moe {

void launch_gemm_mxfp4_fp8(const GemmParams& params, int gemm, TileClass tiles, int64_t max_items,
                           cudaStream_t stream) {
  constexpr WeightFormat kFormat = WeightFormat::kMxfp4;
  constexpr Activation kActivation = Activation::kFp8;
  if (gemm == 1) {
    launch_class<kFormat, kActivation, 1>(params, tiles, max_items, stream);
  } else {
    launch_class<kFormat, kActivation, 2>(params, tiles, max_items, stream);
  }
}

}  // namespace kimi::moe
