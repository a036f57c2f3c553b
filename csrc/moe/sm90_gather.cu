#include <algorithm>

#include "../common/launch.h"
#include "launch.h"
#include "sm90_gather.cuh"

namespace kimi::moe {

namespace {

template <Activation kActivation, int kRows>
void launch_rows(const GatherParams& params, int64_t max_tiles, cudaStream_t stream) {
  const int threads = std::min(kGatherThreads, round_up(params.k_blocks * (kBlockColumns / 8), 32));
  const int most = 8 * sm_count();  // blocks: two waves or so
  const int blocks = static_cast<int>(std::min<int64_t>(max_tiles, most));
  const int rows = std::clamp(most / std::max(blocks, 1), 1, std::min(ceil_div(params.work.max_rows, kRows), 64));
  launch(gather_kernel<kActivation, kRows>, LaunchShape{dim3(blocks, rows), dim3(threads)}, stream, params);
}

void launch_once(const GatherParams& params, int64_t max_tiles, cudaStream_t stream) {
  const int threads = std::min(kGatherThreads, round_up(params.k_blocks * (kBlockColumns / 8), 32));
  launch(quantise_kernel, LaunchShape{dim3(std::min(params.tokens, 8 * sm_count())), dim3(threads)}, stream, params);
  const int most = 16 * sm_count();  // blocks: two waves or so
  const int blocks = static_cast<int>(std::min<int64_t>(max_tiles, most));
  const int rows = std::clamp(most / std::max(blocks, 1), 1, ceil_div(params.work.max_rows, kCopyThreads / 32));
  launch(copy_kernel, LaunchShape{dim3(blocks, rows), dim3(kCopyThreads)}, stream, params);
}

}  // namespace

void launch_gather(const GatherParams& params, Activation activation, int64_t max_tiles, cudaStream_t stream) {
  const bool many = params.work.max_rows > 16;
  if (activation == Activation::kFp8) {
    (many ? launch_once : launch_rows<Activation::kFp8, 1>)(params, max_tiles, stream);
  } else {
    (many ? launch_rows<Activation::kBf16, 4> : launch_rows<Activation::kBf16, 1>)(params, max_tiles, stream);
  }
}

}  // namespace kimi::moe
