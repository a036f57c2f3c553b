// Errors: library code throws, it never exits. pybind11 turns std::runtime_error into RuntimeError and
// std::invalid_argument into ValueError.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace kimi {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a launch error is sticky until read; the next call must not report it again
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
}

}  // namespace kimi

#define CUDA_CHECK(call) ::kimi::check_cuda((call), #call)
