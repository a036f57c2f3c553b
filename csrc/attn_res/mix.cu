// sass(sm_90a, sm_100f, sm_103f): UBLKCP
// sass(sm_90a, sm_100f, sm_103f): UCGABAR_WAIT
#include <algorithm>

#include "../common/launch.h"
#include "mix_few.cuh"
#include "mix_many.cuh"
#include "mix_wide.cuh"

namespace kimi::attn_res {
namespace {

int shared_limit() {
  int device = 0, limit = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return limit;
}

template <int kSources>
void launch_fast(MixParams params, cudaStream_t stream) {
  const int sms = sm_count();
  if (params.tokens * kFewTokens <= sms || params.width > kManyWidth) {
    params.split = few_split(params.tokens, params.width, sms);
    const int threads = round_up(ceil_div(params.width / params.split, kVector), 32);
    const LaunchShape shape{dim3(static_cast<unsigned>(params.tokens * params.split)), dim3(threads), 0, params.split};
    if (threads <= kFewThreads) return launch(mix_few_kernel<kSources, kFewThreads>, shape, stream, params);
    return launch(mix_few_kernel<kSources, kFewMaxThreads>, shape, stream, params);
  }
  params.stages = many_stages(params.width, shared_limit());
  params.ring_offset = static_cast<int>(many_ring_offset(params.width));
  const int threads = many_consumers(params.width) + 32;
  const LaunchShape shape{dim3(static_cast<unsigned>(std::min<int64_t>(params.tokens, sms))), dim3(threads),
                          many_shared_bytes(params.width, params.stages)};
  launch(mix_many_kernel<kSources>, shape, stream, params);
}

}  // namespace

void launch_mix(const MixParams& params, cudaStream_t stream) {
  if (params.num_blocks >= kFastSources || params.width > kFewWidth) {
    const LaunchShape shape{dim3(static_cast<unsigned>(params.tokens)), dim3(kWideThreads),
                            static_cast<size_t>(params.width) * sizeof(float)};
    return launch(mix_wide_kernel, shape, stream, params);
  }
  switch (params.num_blocks) {
    case 0:
      return launch_fast<1>(params, stream);
    case 1:
      return launch_fast<2>(params, stream);
    case 2:
      return launch_fast<3>(params, stream);
    case 3:
      return launch_fast<4>(params, stream);
    case 4:
      return launch_fast<5>(params, stream);
    case 5:
      return launch_fast<6>(params, stream);
    case 6:
      return launch_fast<7>(params, stream);
    case 7:
      return launch_fast<8>(params, stream);
    default:
      return launch_fast<9>(params, stream);
  }
}

}  // namespace kimi::attn_res
