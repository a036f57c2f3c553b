// KDA decode: convolution, gate, delta rule and gated norm of one token a sequence, in one read and one write of the
// state.
//
// Everything but the norm over the 128 value channels is independent between value rows, so a head is split by value
// rows over the blocks of a cluster; they exchange one sum of squares a warp through distributed shared memory.
#pragma once

#include "decode_config.h"
#include "step.cuh"

namespace kimi::kda {

template <class Config, int kMinBlocks, bool kPrefetch>
__global__ void __launch_bounds__(Config::kThreads, kMinBlocks) decode_kernel(const __grid_constant__ DecodeParams p) {
  constexpr int kCluster = Config::kCluster, kWarps = Config::kWarps, kRows = Config::kRows;
  constexpr int kPasses = Config::kConvPasses;
  __shared__ DecodeShared<Config> shared;

  const int head = blockIdx.x / kCluster, token = blockIdx.z * gridDim.y + blockIdx.y;
  if (token >= p.tokens) return;  // a corner of the grid
  const Lane<Config> at{static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32),
                        static_cast<int>(blockIdx.x % kCluster), head, p.heads * kHeadDim};
  const int lane = at.lane;

  // ---- Constants and cache hints, before the producer is waited for.
  float4 weight[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = at.warp + pass * kWarps;
    if (at.active(piece)) weight[pass] = __ldg(reinterpret_cast<const float4*>(p.conv_weight) + at.column(piece));
  }
  float a_log = 0.f, dt_bias = 0.f;
  if (at.gates()) {
    a_log = __ldg(p.a_log + head);
    dt_bias = __ldg(p.dt_bias + head * kHeadDim + at.gate_channel());
  }
  const float norm_weight = __ldg(p.o_norm + at.my_row());
  const int64_t state_offset = (int64_t{head} * kHeadDim + at.warp_row()) * kHeadDim;
  open_exchange<kCluster>(&shared.barrier, Config::kPartials * sizeof(float));
  if constexpr (kPrefetch) {
    // Only a hint, so a stale slot is harmless: it names a row of the pool, and L2 stays coherent with its writers.
    const int guess = *static_cast<const volatile int32_t*>(p.slots + token);
    if (guess > 0 && guess < p.num_slots && lane == 0) {
      ptx::prefetch_l2(p.state + guess * p.state_slot_stride + state_offset, kRows * kHeadDim * sizeof(float));
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int piece = at.warp + pass * kWarps;
        if (piece >= Config::kConvPieces) continue;
        const __nv_bfloat16* column = p.conv_state + guess * p.conv_slot_stride + at.column(piece);
        constexpr int kBytes = (Config::kBlockRows < 32 ? Config::kBlockRows : 32) * sizeof(__nv_bfloat16);
#pragma unroll
        for (int row = 0; row < 3; ++row) ptx::prefetch_l2(column + row * 3 * at.width, kBytes);
      }
    }
  }

  ptx::pdl_wait();

  // ---- Inputs of this token; those that need no slot are asked for first. Padding ends here: its output is 0, nothing
  // else is touched.
  const int num_tokens = p.num_tokens == nullptr ? p.tokens : __ldcg(p.num_tokens);
  const int slot = __ldcg(p.slots + token);
  const bool fresh = p.fresh != nullptr && p.fresh[token];
  __nv_bfloat16 old[kPasses][3] = {}, now[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = at.warp + pass * kWarps;
    if (at.active(piece)) now[pass] = *at.source(p, piece, token);
  }
  __nv_bfloat16 forget = {};
  if (at.gates()) forget = p.f[token * p.f_stride + head * kHeadDim + at.gate_channel()];
  const __nv_bfloat16 raw_beta = p.beta[token * p.beta_stride + head];
  const __nv_bfloat16 raw_gate = p.gate[token * p.gate_stride + head * kHeadDim + at.my_row()];
  __nv_bfloat16* const out = p.out + int64_t{token} * at.width + head * kHeadDim + at.my_row();
  if (token >= num_tokens || slot <= 0 || slot >= p.num_slots) {
    if (at.owns_row()) *out = __nv_bfloat16{};
    ptx::pdl_trigger();
    return;
  }
  __nv_bfloat16* const conv_rows = p.conv_state + slot * p.conv_slot_stride;
  float* const state_rows = p.state + slot * p.state_slot_stride + state_offset + lane * 4;
  float4 state[kRows] = {};
  if (!fresh) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) state[r] = __ldcg(reinterpret_cast<const float4*>(state_rows + r * kHeadDim));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int piece = at.warp + pass * kWarps;
      if (!at.active(piece)) continue;
      const __nv_bfloat16* column = conv_rows + at.column(piece);
#pragma unroll
      for (int row = 0; row < 3; ++row) old[pass][row] = column[row * 3 * at.width];
    }
  }

  // ---- Convolution, sums of squares and decay, shared with the block.
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = at.warp + pass * kWarps;
    float x = 0.f;
    if (at.active(piece)) x = convolve(weight[pass], old[pass][0], old[pass][1], old[pass][2], now[pass]);
    if (piece < 8) {
      (piece < 4 ? shared.q : shared.k)[at.channel(piece)] = x;
      const float sum = warp_sum(__fmul_rn(x, x));
      if (lane == 0) shared.sum_squares[piece] = sum;
    } else if (at.active(piece)) {
      shared.v[(piece - 8) * 32 + lane] = x;
    }
  }
  if (at.gates()) shared.decay[at.gate_channel()] = decay_of(forget, a_log, dt_bias, p.lower_bound);
  __syncthreads();

  const float q_scale = inverse_length(*reinterpret_cast<const float4*>(shared.sum_squares)) * kQueryScale;
  const float k_scale = inverse_length(*reinterpret_cast<const float4*>(shared.sum_squares + 4));
  const float4 q = scale4(*reinterpret_cast<const float4*>(shared.q + lane * 4), q_scale);
  const float4 k = scale4(*reinterpret_cast<const float4*>(shared.k + lane * 4), k_scale);
  const float4 decay = *reinterpret_cast<const float4*>(shared.decay + lane * 4);
  const float v = shared.v[at.my_row() - at.rank * Config::kBlockRows];

  // ---- Delta rule. The sum of squares leaves first, the state goes back while it travels.
  const RowResult row = read_rows<kRows>(state, q, k, decay, v, sigmoid(__bfloat162float(raw_beta)), lane);
  if constexpr (kCluster > 1) ptx::cluster_wait();
  send<kCluster>(&shared.partials[at.rank * kWarps + at.warp], row.squares, &shared.barrier, lane);
  correct_rows<kRows>(state, row.delta, k);
#pragma unroll
  for (int r = 0; r < kRows; ++r) *reinterpret_cast<float4*>(state_rows + r * kHeadDim) = state[r];
  close_exchange<kCluster>(&shared.barrier);

  // ---- Gated norm. The convolution rows move only now: other blocks of the cluster read the q and k channels, too,
  // and have done so when their sums are here.
  const float squares = sum_partials<Config::kPartials>(shared.partials, lane);
  if (at.owns_row()) *out = gated_norm(row.o, squares, norm_weight, raw_gate, p.eps);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = at.warp + pass * kWarps;
    if (!at.active(piece) || !at.writes(piece)) continue;
    __nv_bfloat16* column = conv_rows + at.column(piece);
    column[0] = old[pass][1];
    column[3 * at.width] = old[pass][2];
    column[6 * at.width] = now[pass];
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::kda
