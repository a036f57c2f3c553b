#include <algorithm>

#include "../common/launch.h"
#include "step.cuh"

namespace kimi::meta {

void launch_step(const StepParams& params, cudaStream_t stream) {
  const int64_t work = std::max({params.max_tokens, static_cast<int64_t>(params.max_seqs) + 1,
                                 static_cast<int64_t>(params.max_seqs) * params.max_blocks});
  const int64_t blocks = std::min<int64_t>(ceil_div<int64_t>(work, kStepThreads), 4 * sm_count());
  launch(step_kernel, LaunchShape{dim3(static_cast<unsigned>(blocks)), dim3(kStepThreads)}, stream, params);
}

}  // namespace kimi::meta
