// Arguments of the KDA kernels. Strides are in elements; every offset that contains a slot or a token is 64-bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

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

  __nv_bfloat16* out;  // [tokens, heads * 128], contiguous; 0 in skipped rows
  int32_t tokens, heads, num_slots;
  float lower_bound, eps;
};

constexpr int kMaxRun = 9;      // tokens of one run: one and eight drafts
constexpr int kRecordRows = 6;  // of 128 floats: decay, normalised k, beta-weighted error, raw q, k, v

// Runs of 0 .. kMaxRun tokens a sequence. slots, fresh and accepted are [sequences].
struct RunParams {
  DecodeParams token;
  const int32_t* cu_seqlens;  // [sequences + 1], or null: sequence i is token i (none when token.tokens is 0)
  float* records;             // [slots, heads, 6, run, 128], contiguous within a slot
  int64_t record_slot_stride;
  const int32_t* accepted;  // [sequences] or null: tokens of the slot's last run to commit first
  int32_t sequences, run;
  bool keep;  // true: the run's tokens go into the states at once (decode); false: they are recorded (verify)
};

// Both states of some slots set to zero, or copied from other slots. `inner` and strides are in bytes, multiples of 16.
struct SlotParams {
  char* state;
  char* conv_state;
  int64_t state_inner, conv_inner;  // one slot's contiguous piece
  int64_t state_slot_stride, conv_slot_stride;
  const int32_t* source;  // [count], or null: zero
  const int32_t* target;  // [count]; a pair with a slot outside 1 .. num_slots - 1 is skipped
  int32_t count, num_slots;
};

void launch_decode(const DecodeParams& params, cudaStream_t stream);
void launch_run(const RunParams& params, cudaStream_t stream);
void launch_slots(const SlotParams& params, cudaStream_t stream);

}  // namespace kimi::kda
