// Launching a kernel: one argument struct by value, the caller's stream, optional cluster, programmatic dependent
// launch.
//
// Padding rule: an operation that takes `num_tokens` gets a device scalar. Its kernel reads it after the dependency
// wait, and rows at or beyond it are answered at once (expert id -1, weight 0, nothing else touched), so that a CUDA
// graph captured for 32 tokens serves 17.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"

namespace kimi {

// KIMI_KERNELS_PDL=0 turns programmatic dependent launch off; read once.
inline bool pdl_enabled() {
  static const bool enabled = [] {
    const char* text = std::getenv("KIMI_KERNELS_PDL");
    if (text == nullptr || std::strcmp(text, "1") == 0) return true;
    if (std::strcmp(text, "0") == 0) return false;
    throw std::invalid_argument(std::string("KIMI_KERNELS_PDL must be 0 or 1, got '") + text + "'");
  }();
  return enabled;
}

inline int sm_count() {
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  constexpr int kMaxDevices = 64;
  static int counts[kMaxDevices] = {};  // a benign race: every writer stores the same number
  if (device < kMaxDevices && counts[device] > 0) return counts[device];
  int count = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kMaxDevices) counts[device] = count;
  return count;
}

// Dynamic shared memory above 48 KiB has to be allowed once per kernel and device.
inline void allow_shared_memory(const void* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({kernel, device}) != 0) return;
  int limit = 0;
  cudaFuncAttributes attributes = {};
  CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  limit -= static_cast<int>(attributes.sharedSizeBytes);  // static variables share the limit
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
  allowed.insert({kernel, device});
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  int cluster = 1;    // CTAs of one cluster, along x
  int carveout = -1;  // a wish: percent of the most shared memory an SM can have, the rest is L1; -1: none
};

// Every kernel is `__global__ void name(const __grid_constant__ Params p)`. A grid of zero blocks is not launched.
template <typename Params>
void launch(void (*kernel)(Params), const LaunchShape& shape, cudaStream_t stream, const Params& params) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  cudaLaunchAttribute attributes[3];
  unsigned count = 0;
  if (pdl_enabled()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (shape.carveout >= 0) {
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = static_cast<unsigned>(shape.carveout);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace kimi
