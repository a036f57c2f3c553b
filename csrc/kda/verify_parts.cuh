// What verify's kernel is made of: what a sequence does, a warp's rows of the state, and the channels before the
// recurrence.
#pragma once

#include "../common/math.h"
#include "decode_config.h"
#include "step.cuh"

namespace kimi::kda {

// What one sequence does in this launch.
struct RunPlan {
  int slot, first, count, accepted;  // the run's tokens, and how many of the last run's go in before
  bool fresh;
};

// Cuts the run at num_tokens and at what a record holds, and answers the rows that get no token: 0, or NaN beyond the
// longest run that records can hold, a caller's error made visible. A skipped sequence has neither tokens nor a commit.
__device__ __forceinline__ RunPlan plan_run(const RunParams& r, int head, int sequence) {
  const DecodeParams& p = r.token;
  // All loads first, none waits for another.
  const int slot = __ldcg(p.slots + sequence);
  const bool fresh = p.fresh != nullptr && p.fresh[sequence];
  const int num_tokens = p.num_tokens == nullptr ? p.tokens : __ldcg(p.num_tokens);
  const int accepted = r.accepted == nullptr ? 0 : __ldcg(r.accepted + sequence);
  int first = 0, last = 0;
  if (r.cu_seqlens != nullptr) {
    first = __ldcg(r.cu_seqlens + sequence);
    last = __ldcg(r.cu_seqlens + sequence + 1);
  } else if (p.tokens > 0) {
    first = sequence, last = sequence + 1;
  }
  const int live = min(p.tokens, num_tokens), longest = min(r.run, kMaxRun);
  const bool skipped = slot <= 0 || slot >= p.num_slots;
  RunPlan plan = {slot, first, 0, 0, fresh};
  if (!skipped) {
    plan.count = max(min(min(last, live) - first, longest), 0);
    // A fresh slot has no last run, and a padded row of decode commits nothing.
    const bool padded = r.cu_seqlens == nullptr && p.tokens > 0 && plan.count == 0;
    if (!fresh && !padded) plan.accepted = max(min(accepted, longest), 0);
  }
  const int end = sequence == r.sequences - 1 ? p.tokens : min(last, p.tokens);
#pragma unroll 1
  for (int token = first + plan.count; token < end; ++token) {
    const bool lost = !skipped && token < min(last, live);
    const __nv_bfloat16 value = __float2bfloat16_rn(lost ? __int_as_float(0x7fffffff) : 0.f);
    __nv_bfloat16* const out = p.out + (int64_t{token} * p.heads + head) * kHeadDim;
    if (threadIdx.x < 64) out[threadIdx.x] = out[threadIdx.x + 64] = value;  // the same in every block of a cluster
  }
  return plan;
}

// A warp's 16 value rows in registers. Lane 8 * g + j holds, of rows 4 * i + g, the columns 4 * j .. + 3 of each
// quarter row: what lanes j, j + 8, j + 16 and j + 24 hold in decode, so that its tree of a sum needs no exchange for
// two levels. Which i a register holds differs between lanes: register r has i = r ^ (lane / 2 % 4), so that a lane
// that hands sums of half its rows over always hands over the same registers, and no selection is needed.
struct RunRows {
  static constexpr int kRows = 4, kQuarters = 4;
  float4 state[kRows][kQuarters];
  int lane, first_row, first_column;  // within the block

  __device__ __forceinline__ RunRows(int warp, int lane)
      : lane(lane), first_row(warp * 16 + lane / 8), first_column(lane % 8 * 4) {}

  __device__ __forceinline__ int row(int r) const { return first_row + 4 * (r ^ (lane / 2 % 4)); }
  // The row whose sums end in this lane, and in its neighbour.
  __device__ __forceinline__ int my_row() const { return row(0); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) state[r][m] = {};
    }
  }
  __device__ __forceinline__ void load(const float (*staging)[kHeadDim]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* const own = &staging[row(r)][first_column];
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) {
        state[r][m] = *reinterpret_cast<const float4*>(own + m * 32);
      }
    }
  }
  // By way of shared memory and one asynchronous copy a warp: 16 plain stores a thread would hold up the loads of the
  // run that follows. Before the block ends, wait_stored.
  __device__ __forceinline__ void store(float* block_rows, float (*staging)[kHeadDim]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float* const own = &staging[row(r)][first_column];
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) {
        *reinterpret_cast<float4*>(own + m * 32) = state[r][m];
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_store(block_rows + first_row * kHeadDim, staging[first_row], 16 * kHeadDim * sizeof(float));
      ptx::bulk_commit();
    }
  }
  static __device__ __forceinline__ void wait_stored() { ptx::bulk_wait<0, true>(); }

  __device__ __forceinline__ void decay_by(const float* decay) {
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) {
      const float4 d = *reinterpret_cast<const float4*>(decay + (m * 32 + first_column));
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[r][m] = decayed(state[r][m], d);
    }
  }
  __device__ __forceinline__ void read(const float* x, float4 (&own)[kQuarters]) const {
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) own[m] = *reinterpret_cast<const float4*>(x + (m * 32 + first_column));
  }
  __device__ __forceinline__ void correct_by(const float (&delta)[kRows], const float4 (&k)[kQuarters]) {
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[r][m] = corrected(state[r][m], delta[r], k[m]);
    }
  }
  // The dot of my_row with x, in all lanes of a row's pair alike: decode's tree.
  __device__ __forceinline__ float dot(const float4 (&x)[kQuarters]) const {
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float even = __fadd_rn(dot4(state[r][0], x[0]), dot4(state[r][2], x[2]));
      sums[r] = __fadd_rn(even, __fadd_rn(dot4(state[r][1], x[1]), dot4(state[r][3], x[3])));
    }
    sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kFullWarp, sums[2], 4));
    sums[1] = __fadd_rn(sums[1], __shfl_xor_sync(kFullWarp, sums[3], 4));
    sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kFullWarp, sums[1], 2));
    return __fadd_rn(sums[0], __shfl_xor_sync(kFullWarp, sums[0], 1));
  }
  // From my_row's value to those of this lane's rows.
  __device__ __forceinline__ void share_out(float mine, float (&of_rows)[kRows]) const {
    of_rows[0] = mine;
#pragma unroll
    for (int r = 1; r < kRows; ++r) of_rows[r] = __shfl_xor_sync(kFullWarp, mine, 2 * r);
  }
};

// Before the recurrence each warp makes 32 channels, one a lane, of q or k (pass 0), and 32 of v or of the forget gate
// (pass 1). Of two blocks the first makes q, the second k, and each its own rows of v and the same channels of the
// gate.
template <class Config>
struct RunPiece {
  static constexpr int kHalf = Config::kThreads / 64;  // warps of v, and of the gate
  int part, channel;                                   // 0 q, 1 k, 2 v, 3 forget gate; the channel is within the head
  int row;                                             // the channel within the block's rows, in pass 1

  __device__ __forceinline__ RunPiece(int pass, int rank, int warp, int lane)
      : part(pass == 0 ? rank + warp / 4 : 2 + warp / kHalf), row(warp % kHalf * 32 + lane) {
    channel = pass == 0 ? warp % 4 * 32 + lane : rank * Config::kRows + row;
    asm("" : "+r"(part), "+r"(channel));  // else the compiler works them out again for every token
  }
  // The four taps; a decay's a_log and dt_bias.
  __device__ __forceinline__ float4 constants(const DecodeParams& p, int head) const {
    const int column = head * kHeadDim + channel;
    if (part < 3) return __ldg(reinterpret_cast<const float4*>(p.conv_weight) + part * p.heads * kHeadDim + column);
    return {__ldg(p.a_log + head), __ldg(p.dt_bias + column), 0.f, 0.f};
  }
};

// Asks for this block's inputs of `count` tokens in pieces of 16 bytes, of which a token has kPieces; a thread takes
// the same piece of every kStep-th token.
template <class Config>
__device__ __forceinline__ void load_inputs(RunShared<Config>& shared, const DecodeParams& p, int64_t first, int count,
                                            int head, int rank) {
  constexpr int kHead = kHeadDim / 8, kMixed = Config::kMixed * kHead, kRows = Config::kRows / 8;
  constexpr int kPieces = kMixed + 3 * kRows, kStep = Config::kThreads / kPieces;
  const int start = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  if (start >= kStep) return;
  const __nv_bfloat16* from;
  __nv_bfloat16* to;
  int64_t stride;
  int column = (piece - kMixed) % kRows * 8, pitch = Config::kRows;
  if (piece < kMixed) {
    const int which = piece / kHead;
    from = rank + which == 0 ? p.q : p.k, stride = rank + which == 0 ? p.q_stride : p.k_stride;
    column = piece % kHead * 8, pitch = kHeadDim, to = &shared.raw.mixed[which][0][column];
  } else if (piece < kMixed + kRows) {
    from = p.v, stride = p.v_stride, to = &shared.raw.v[0][column], column += rank * Config::kRows;
  } else if (piece < kMixed + 2 * kRows) {
    from = p.f, stride = p.f_stride, to = &shared.raw.f[0][column], column += rank * Config::kRows;
  } else {
    from = p.gate, stride = p.gate_stride, to = &shared.gate[0][column], column += rank * Config::kRows;
  }
  from += (first + start) * stride + head * kHeadDim + column;
  to += start * pitch;
  const bool aligned = ((reinterpret_cast<uintptr_t>(from) | stride * sizeof(*from)) & 15) == 0;
#pragma unroll
  for (int i = 0; i < ceil_div(kMaxRun, kStep); ++i, from += kStep * stride, to += kStep * pitch) {
    if (start + i * kStep >= count) break;
    if (aligned) {
      ptx::cp_async_16(to, from);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8; ++e) to[e] = from[e];
    }
  }
}

__device__ __forceinline__ float widened(uint32_t bf16_bits) { return __uint_as_float(bf16_bits << 16); }

}  // namespace kimi::kda
