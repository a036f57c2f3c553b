// KDA decode: convolution, gate, delta rule and gated norm of one token a sequence, in one read and one write of the
// state.
//
// Everything but the norm over the 128 value channels is independent between value rows, so a head is split by value
// rows over the blocks of a cluster. Each channel before the recurrence is made once and sent to all of them; after it
// they exchange one sum of squares a warp.
#pragma once

#include "decode_parts.cuh"

namespace kimi::kda {

// Hints that bring what a block will read into L2. A stale slot is harmless: it names a row of the pool, and L2 stays
// coherent with its writers.
template <class Config>
__device__ __forceinline__ void prefetch_states(const DecodeParams& p, const Lane<Config>& at, int slot) {
  if (slot <= 0 || slot >= p.num_slots) return;
  if (at.lane == 0) {
    const int64_t row = int64_t{at.head} * kHeadDim + at.warp_row();
    ptx::prefetch_l2(p.state + slot * p.state_slot_stride + row * kHeadDim, Config::kRows * kHeadDim * sizeof(float));
  }
  if (at.rank == 0 && at.warp == 0 && at.lane < 9) {  // three rows each of q, k and v
    const __nv_bfloat16* rows = p.conv_state + slot * p.conv_slot_stride + at.head * kHeadDim;
    ptx::prefetch_l2(rows + at.lane * p.heads * kHeadDim, kHeadDim * sizeof(__nv_bfloat16));
  }
}

// kGuess: prefetches by the slot that stands in the list before the producer is done. kOnce: tells the cache that the
// state is used once. kAskFirst: lets the next kernel start when this block has asked for its data, not at once.
template <class Config, int kMinBlocks, bool kGuess, bool kOnce, bool kAskFirst>
__global__ void __launch_bounds__(Config::kThreads, kMinBlocks) decode_kernel(const __grid_constant__ DecodeParams p) {
  constexpr int kCluster = Config::kCluster, kRows = Config::kRows, kPasses = Config::kPasses;
  __shared__ DecodeShared<Config> shared;

  const int token = blockIdx.z * gridDim.y + blockIdx.y;
  if (token >= p.tokens) return;  // a corner of the grid
  const Lane<Config> at;
  const int head = at.head, lane = at.lane, width = p.heads * kHeadDim;

  // ---- Constants and cache hints, before the producer is waited for.
  float4 constants[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) constants[pass] = Piece<Config>(at, pass).constants(p, head);
  const float norm_weight = __ldg(p.o_norm + at.my_row());
  open_exchange<kCluster>(&shared.inputs_barrier, TokenInputs<Config>::kBytes, &shared.partials_barrier,
                          Config::kPartials * sizeof(float));
  if constexpr (kGuess) prefetch_states(p, at, *static_cast<const volatile int32_t*>(p.slots + token));

  ptx::pdl_wait();
  if constexpr (!kAskFirst) ptx::pdl_trigger();

  // ---- Inputs of this token; those that need no slot are asked for first. Padding ends here: its output is 0, nothing
  // else is touched.
  const int num_tokens = p.num_tokens == nullptr ? p.tokens : __ldcg(p.num_tokens);
  const int slot = __ldcg(p.slots + token);
  const bool fresh = p.fresh != nullptr && p.fresh[token];
  const __nv_bfloat16 raw_beta = p.beta[token * p.beta_stride + head];
  const __nv_bfloat16 raw_gate = p.gate[token * p.gate_stride + head * kHeadDim + at.my_row()];
  __nv_bfloat16 now[kPasses] = {}, old[kPasses][3] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const Piece<Config> piece(at, pass);
    if (piece.active) now[pass] = *piece.source(p, token, head);
  }
  __nv_bfloat16* const out = p.out + int64_t{token} * width + head * kHeadDim + at.my_row();
  if (token >= num_tokens || slot <= 0 || slot >= p.num_slots) {
    if (at.owns_row()) *out = __nv_bfloat16{};
    return;
  }
  __nv_bfloat16* const conv_rows = p.conv_state + slot * p.conv_slot_stride;
  float* const state_rows =
      p.state + slot * p.state_slot_stride + (int64_t{head} * kHeadDim + at.warp_row()) * kHeadDim + lane * 4;
  float4 state[kRows] = {};
  if (!fresh) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const Piece<Config> piece(at, pass);
      if (!piece.convolves()) continue;
      const __nv_bfloat16* column = conv_rows + piece.conv_column(head, width);
#pragma unroll
      for (int row = 0; row < 3; ++row) old[pass][row] = column[row * 3 * width];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto* const place = reinterpret_cast<const float4*>(state_rows + r * kHeadDim);
      state[r] = kOnce ? __ldcs(place) : __ldcg(place);
    }
  }

  if constexpr (kAskFirst) ptx::pdl_trigger();

  // ---- Convolutions and decay.
  if constexpr (kCluster > 1) ptx::cluster_wait();
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const Piece<Config> piece(at, pass);
    const float4 c = constants[pass];
    float value = 0.f;
    if (piece.convolves()) {
      value = convolve(c, __bfloat162float(old[pass][0]), __bfloat162float(old[pass][1]),
                       __bfloat162float(old[pass][2]), __bfloat162float(now[pass]));
    } else if (piece.decays()) {
      value = decay_of(__bfloat162float(now[pass]), c.x, c.y, p.lower_bound);
    }
    piece.send(value, shared.inputs, &shared.inputs_barrier, at);
  }
  close_exchange<kCluster>(&shared.inputs_barrier);

  const TokenInputs<Config>& inputs = shared.inputs;
  const float q_scale = inverse_length(*reinterpret_cast<const float4*>(inputs.sum_squares)) * kQueryScale;
  const float k_scale = inverse_length(*reinterpret_cast<const float4*>(inputs.sum_squares + 4));
  const float4 q = scale4(*reinterpret_cast<const float4*>(inputs.q + lane * 4), q_scale);
  const float4 k = scale4(*reinterpret_cast<const float4*>(inputs.k + lane * 4), k_scale);
  const float4 decay = *reinterpret_cast<const float4*>(inputs.decay + lane * 4);
  const float beta = precise_sigmoid(__bfloat162float(raw_beta)), kq = warp_sum(dot4(k, q));

  // ---- Delta rule. The sum of squares leaves first, the state goes back while it travels.
  const RowResult row = read_rows<kRows>(state, q, k, kq, decay, inputs.v[at.my_local_row()], beta, lane);
  send_from_warp<kCluster>(&shared.partials[at.rank * Config::kWarps + at.warp], row.squares, &shared.partials_barrier,
                           lane);
  correct_rows<kRows>(state, row.delta, k);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    auto* const place = reinterpret_cast<float4*>(state_rows + r * kHeadDim);
    if constexpr (kOnce) {
      __stcs(place, state[r]);
    } else {
      *place = state[r];
    }
  }
  close_exchange<kCluster>(&shared.partials_barrier);

  // ---- Gated norm.
  const float squares = sum_partials<Config::kPartials>(shared.partials, lane);
  if (at.owns_row()) *out = gated_norm(row.o, squares, norm_weight, raw_gate, p.eps);
  // A channel's convolution rows are read and written by one thread.
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const Piece<Config> piece(at, pass);
    if (!piece.convolves()) continue;
    __nv_bfloat16* column = conv_rows + piece.conv_column(head, width);
    column[0] = old[pass][1];
    column[3 * width] = old[pass][2];
    column[6 * width] = now[pass];
  }
}

}  // namespace kimi::kda
