// Arguments of the attention-residual mix. Strides are in elements, rows are contiguous and 16-byte aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi::attn_res {

constexpr int kMaxBlocks = 15;

// p = partial + delta (rounded to bf16); x = rms(sum_j softmax(score)_j source_j) * out_norm over the sources
// blocks[0..num_blocks) and p, with score_j = sum(source_j * norm * proj) / sqrt(mean(source_j^2) + eps).
struct MixParams {
  const __nv_bfloat16* blocks;   // [num_blocks, tokens, width], strides block_stride and block_row_stride
  const __nv_bfloat16* partial;  // [tokens, width]
  const __nv_bfloat16* delta;    // [tokens, width] or null
  const void* norm;              // [width] bf16, or float32 where the flag says so
  const void* proj;
  const void* out_norm;
  __nv_bfloat16* partial_out;  // [tokens, width]: receives p; null when nobody asks for it
  __nv_bfloat16* x;            // [tokens, width]
  int64_t tokens;
  int64_t block_stride, block_row_stride, partial_stride, delta_stride, partial_out_stride, x_stride;
  int num_blocks;
  int width;  // a multiple of 8
  float eps;
  bool norm_f32, proj_f32, out_norm_f32;
  // Set by launch_mix.
  int split;        // few: CTAs a token
  int stages;       // many: rows in the ring
  int ring_offset;  // many: where the ring starts in shared memory
};

void launch_mix(const MixParams& params, cudaStream_t stream);

}  // namespace kimi::attn_res
