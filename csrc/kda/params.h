// Arguments of the KDA kernels. Strides are in elements; every offset that contains a slot or a token is 64-bit.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace kimi::kda {

constexpr int kHeadDim = 128;  // both the key and the value width of a head
constexpr int kConvWidth = 4;  // taps; the conv state holds the last kConvWidth - 1 raw rows
constexpr int kMaxHeads = 96;

struct DecodeParams {
  // One row a token, heads * 128 wide (beta: heads wide); rows may be slices of one wider projection.
  const __nv_bfloat16* q;
  const __nv_bfloat16* k;
  const __nv_bfloat16* v;
  const __nv_bfloat16* f;     // raw forget gate
  const __nv_bfloat16* gate;  // raw output gate
  const __nv_bfloat16* beta;  // raw
  int64_t q_stride, k_stride, v_stride, f_stride, gate_stride, beta_stride;

  const float* conv_weight;  // [3 * heads * 128, 4]: q, k, then v channels; the last tap is the current token
  const float* a_log;        // [>= heads]
  const float* dt_bias;      // [heads * 128]
  const float* o_norm;       // [128]

  float* state;               // [slots, heads, 128 v, 128 k], updated in place
  __nv_bfloat16* conv_state;  // [slots, 3, 3 * heads * 128], oldest row first, updated in place
  int64_t state_slot_stride, conv_slot_stride;

  const int32_t* slots;       // [tokens]; outside 1 .. num_slots - 1: the row is skipped
  const bool* fresh;          // [tokens] or null; true: the state starts at zero and nothing of it is read
  const int32_t* num_tokens;  // [1] or null; rows from here on are skipped

  __nv_bfloat16* out;  // [tokens, heads * 128], contiguous
  int32_t tokens, heads, num_slots;
  float lower_bound, eps;
};

}  // namespace kimi::kda
