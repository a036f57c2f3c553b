#include "../common/launch.h"
#include "slots.cuh"

namespace kimi::kda {

void launch_slots(const SlotParams& params, cudaStream_t stream) {
  const int64_t blocks = slot_pieces(params) * params.count;
  launch(slots_kernel, LaunchShape{dim3(static_cast<unsigned>(blocks)), dim3(kSlotThreads)}, stream, params);
}

}  // namespace kimi::kda
