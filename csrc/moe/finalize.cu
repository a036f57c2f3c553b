#include "../common/launch.h"
#include "finalize.cuh"

namespace kimi::moe {

namespace {

template <bool kF32>
void launch_for(const FinalizeParams& params, cudaStream_t stream) {
  const int threads = round_up(ceil_div(params.width, 8), 32);
  const LaunchShape shape{dim3(static_cast<unsigned>(params.tokens)), dim3(threads)};
  if (params.tokens <= sm_count() && threads <= kFewThreads) {
    launch(finalize_kernel<kF32, kFewThreads, kFewBytes>, shape, stream, params);
  } else {
    launch(finalize_kernel<kF32, kManyThreads, kManyBytes>, shape, stream, params);
  }
}

}  // namespace

void launch_finalize(const FinalizeParams& params, cudaStream_t stream) {
  params.rows_f32 ? launch_for<true>(params, stream) : launch_for<false>(params, stream);
}

}  // namespace kimi::moe
