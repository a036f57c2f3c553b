// Weighted sum of a token's expert rows, and the latent norm.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi::moe {

constexpr int kFinalizeMaxWidth = 8192;
constexpr int kFinalizeMaxTopK = 16;

struct FinalizeParams {
  const void* rows;          // [num_rows, width] bf16, or float32 when rows_f32; row stride in elements
  const int32_t* row_index;  // [tokens, k]: row of choice j, -1: none; with own_rows its expert
  const float* weights;      // [tokens, k]
  const void* norm;          // [width] bf16, or float32 when norm_f32; null: the sum itself
  void* out;                 // [tokens, width], dtype of rows
  int64_t tokens;
  int64_t rows_stride, out_stride;
  int width;  // a multiple of 8
  int k;
  float eps;
  bool rows_f32, norm_f32;
  // Choice j of a token has row token * k + j when its expert is first_expert .. last_expert - 1, else none.
  bool own_rows;
  int first_expert, last_expert;
};

void launch_finalize(const FinalizeParams& params, cudaStream_t stream);

}  // namespace kimi::moe
