// Arguments of the norm kernels. Strides are in elements; a row is contiguous; rows start at multiples of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi::norm {

// y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.
struct RmsParams {
  const __nv_bfloat16* x;  // [rows, width], row stride x_stride
  const void* weight;      // [width] bf16, or float32 when weight_f32
  __nv_bfloat16* out;      // [rows, width]; null when only the FP8 output is wanted
  uint8_t* q;              // [rows, width] E4M3, or null
  float* scale;            // [rows, ceil(width / 128)] float32, or null
  int64_t rows;
  int64_t x_stride, out_stride, q_stride, scale_stride;
  int width;  // a multiple of 8
  float eps;
  bool weight_f32;
};

// out = rms(x, weight) * sigmoid(gate), each piece of 128 columns normalised by itself.
struct RmsGatedParams {
  const __nv_bfloat16* x;     // [rows, heads * 128]
  const __nv_bfloat16* gate;  // [rows, heads * 128]
  const void* weight;         // [128] float32, or bf16 when not weight_f32
  __nv_bfloat16* out;         // [rows, heads * 128]
  int64_t rows;
  int64_t x_stride, gate_stride, out_stride;
  int heads;
  float eps;
  bool weight_f32;
};

void launch_rms(const RmsParams& params, cudaStream_t stream);
void launch_rms_gated(const RmsGatedParams& params, cudaStream_t stream);

}  // namespace kimi::norm
