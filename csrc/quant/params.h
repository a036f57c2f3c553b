// Arguments of the quantisation kernels. Strides are in elements; rows are contiguous.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi::quant {

struct QuantParams {
  const void* x;      // [rows, width] bf16, or float32 when x_f32
  uint8_t* values;    // [rows, width] E4M3, dense
  float* scale;       // FP8: [rows, groups], dense
  uint8_t* exponent;  // MXFP8: [rows, groups] E8M0, dense
  int64_t rows;
  int64_t x_stride;
  int width;
  int group;   // columns that share a scale; the last group may be shorter
  int groups;  // ceil(width / group)
  bool x_f32;
  bool vector;  // rows start at multiples of 16 bytes and width is a multiple of 8
};

void launch_fp8(const QuantParams& params, cudaStream_t stream);
void launch_mxfp8(const QuantParams& params, cudaStream_t stream);

}  // namespace kimi::quant
