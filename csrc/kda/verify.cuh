// A short run of tokens a sequence on one read of the state: verify, decode after verify, and commit.
//
// The last run's accepted tokens go into the state first (decay, k and error come from the records, so nothing is
// computed twice and the bits are those of decode), then this run's tokens follow in registers. Everything a token
// needs before the recurrence is made for all tokens at once; within the recurrence warps do not wait for each other,
// and one cluster barrier serves the norms of the whole run.
#pragma once

#include "decode_config.h"
#include "step.cuh"

namespace kimi::kda {

template <class Config, int kMinBlocks>
__global__ void __launch_bounds__(Config::kThreads, kMinBlocks) run_kernel(const __grid_constant__ RunParams r) {
  constexpr int kCluster = Config::kCluster, kWarps = Config::kWarps, kRows = Config::kRows;
  constexpr int kBlockRows = Config::kBlockRows;
  __shared__ RunShared<Config> shared;

  const DecodeParams& p = r.token;
  const int head = blockIdx.x / kCluster, sequence = blockIdx.z * gridDim.y + blockIdx.y;
  if (sequence >= r.sequences) return;  // a corner of the grid
  const Lane<Config> at{static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32),
                        static_cast<int>(blockIdx.x % kCluster), head, p.heads * kHeadDim};
  const int lane = at.lane, local_row = at.my_row() - at.rank * kBlockRows;

  ptx::pdl_wait();

  // ---- Which tokens: the sequence's own, cut at num_tokens and at what a record holds.
  const int slot = __ldcg(p.slots + sequence);
  const bool fresh = p.fresh != nullptr && p.fresh[sequence];
  const int live = p.num_tokens == nullptr ? p.tokens : min(p.tokens, __ldcg(p.num_tokens));
  int first = 0, last = 0;
  if (r.cu_seqlens != nullptr) {
    first = __ldcg(r.cu_seqlens + sequence);
    last = __ldcg(r.cu_seqlens + sequence + 1);
  } else if (p.tokens > 0) {
    first = sequence, last = sequence + 1;
  }
  const bool skipped = slot <= 0 || slot >= p.num_slots;
  const int run = skipped ? 0 : min(min(last, live) - first, min(r.run, kMaxRun));
  const int count = max(run, 0);
  int accepted =
      r.accepted == nullptr || fresh || skipped ? 0 : min(__ldcg(r.accepted + sequence), min(r.run, kMaxRun));
  if (accepted < 0) accepted = 0;
  if (r.cu_seqlens == nullptr && p.tokens > 0 && count == 0) accepted = 0;  // a padded row of decode commits nothing

  // ---- Rows that get no token: 0; beyond the longest run that records can hold: NaN, a caller's error made visible.
  const int end = sequence == r.sequences - 1 ? p.tokens : min(last, p.tokens);
  for (int token = first + count; token < end; ++token) {
    const bool lost = !skipped && token < min(last, live);
    for (int row = threadIdx.x; row < kBlockRows; row += Config::kThreads) {
      p.out[int64_t{token} * at.width + head * kHeadDim + at.rank * kBlockRows + row] =
          __float2bfloat16_rn(lost ? __int_as_float(0x7fffffff) : 0.f);
    }
  }
  if (count == 0 && accepted == 0) {
    ptx::pdl_trigger();
    return;
  }

  __nv_bfloat16* const conv_rows = p.conv_state + slot * p.conv_slot_stride;
  float* const state_rows =
      p.state + slot * p.state_slot_stride + (int64_t{head} * kHeadDim + at.warp_row()) * kHeadDim + lane * 4;
  float* const records = r.records == nullptr ? nullptr : r.records + slot * r.record_slot_stride;
  auto record = [&](int token, int row) {
    return records + ((int64_t{token} * p.heads + head) * kRecordRows + row) * kHeadDim;
  };
  float4 state[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    state[row] = fresh ? float4{} : __ldcg(reinterpret_cast<const float4*>(state_rows + row * kHeadDim));
  }

  // ---- The last run: decay, k and this block's errors of the accepted tokens.
  for (int i = threadIdx.x; i < accepted * 32; i += Config::kThreads) {
    const int token = i / 32, four = i % 32 * 4;
    auto copy = [&](float* to, const float* from) {
      *reinterpret_cast<float4*>(to) = __ldcg(reinterpret_cast<const float4*>(from));
    };
    copy(shared.committed[token].decay + four, record(token, 0) + four);
    copy(shared.committed[token].k + four, record(token, 1) + four);
    if (four < kBlockRows) {
      copy(shared.committed[token].delta + four, record(token, 2) + at.rank * kBlockRows + four);
    }
  }

  // ---- Convolutions of all tokens. The window starts with the three newest rows that are committed.
  __nv_bfloat16 window[Config::kConvPasses][3], raw[Config::kConvPasses][kMaxRun];
#pragma unroll
  for (int pass = 0; pass < Config::kConvPasses; ++pass) {
    const int piece = at.warp + pass * kWarps;
    if (!at.active(piece)) continue;
#pragma unroll
    for (int row = 0; row < 3; ++row) {
      const int from = accepted + row;
      if (from >= 3) {
        const int part = piece < 4 ? 3 : piece < 8 ? 4 : 5;
        window[pass][row] = __float2bfloat16_rn(record(from - 3, part)[at.channel(piece)]);
      } else {
        window[pass][row] = fresh ? __nv_bfloat16{} : conv_rows[from * 3 * at.width + at.column(piece)];
      }
    }
#pragma unroll
    for (int token = 0; token < kMaxRun; ++token) {
      if (token < count) raw[pass][token] = *at.source(p, piece, first + token);
    }
  }
#pragma unroll
  for (int pass = 0; pass < Config::kConvPasses; ++pass) {
    const int piece = at.warp + pass * kWarps;
    if (piece >= Config::kConvPieces || count == 0) continue;
    float4 weight = {};
    if (at.active(piece)) weight = __ldg(reinterpret_cast<const float4*>(p.conv_weight) + at.column(piece));
    __nv_bfloat16 x0 = window[pass][0], x1 = window[pass][1], x2 = window[pass][2];
#pragma unroll
    for (int token = 0; token < kMaxRun; ++token) {
      if (token >= count) break;
      float x = 0.f;
      if (at.active(piece)) x = convolve(weight, x0, x1, x2, raw[pass][token]);
      x0 = x1, x1 = x2, x2 = raw[pass][token];
      if (piece < 8) {
        (piece < 4 ? shared.tokens[token].q : shared.tokens[token].k)[at.channel(piece)] = x;
        const float sum = warp_sum(__fmul_rn(x, x));
        if (lane == 0) shared.tokens[token].sum_squares[piece] = sum;
      } else if (at.active(piece)) {
        shared.tokens[token].v[(piece - 8) * 32 + lane] = x;
      }
    }
    if (r.keep) window[pass][0] = x0, window[pass][1] = x1, window[pass][2] = x2;
  }
  if (at.gates() && count > 0) {
    const int channel = head * kHeadDim + at.gate_channel();
    const float a_log = __ldg(p.a_log + head), dt_bias = __ldg(p.dt_bias + channel);
    __nv_bfloat16 forget[kMaxRun];
#pragma unroll
    for (int token = 0; token < kMaxRun; ++token) {
      if (token < count) forget[token] = p.f[(first + token) * p.f_stride + channel];
    }
#pragma unroll
    for (int token = 0; token < kMaxRun; ++token) {
      if (token >= count) break;
      shared.tokens[token].decay[at.gate_channel()] = decay_of(forget[token], a_log, dt_bias, p.lower_bound);
    }
  }
  if (threadIdx.x < count) {
    const __nv_bfloat16 raw_beta = p.beta[(first + threadIdx.x) * p.beta_stride + head];
    shared.tokens[threadIdx.x].beta = sigmoid(__bfloat162float(raw_beta));
  }
  for (int i = threadIdx.x; i < count * kBlockRows; i += Config::kThreads) {
    const int token = i / kBlockRows, row = i % kBlockRows;
    shared.tokens[token].gate[row] =
        p.gate[(first + token) * p.gate_stride + head * kHeadDim + at.rank * kBlockRows + row];
  }
  __syncthreads();
  // All blocks of the cluster have read the records and convolution rows; from here on they may be overwritten, and
  // remote shared memory is there.
  open_exchange<kCluster>(&shared.barrier, count * Config::kPartials * sizeof(float));
  if constexpr (kCluster > 1) ptx::cluster_wait();

  // ---- Commit.
  for (int token = 0; token < accepted; ++token) {
    const auto& old = shared.committed[token];
    const float4 decay = *reinterpret_cast<const float4*>(old.decay + lane * 4);
    const float4 k = *reinterpret_cast<const float4*>(old.k + lane * 4);
#pragma unroll
    for (int row = 0; row < kRows; ++row) state[row] = decayed(state[row], decay);
    correct_rows<kRows>(state, old.delta[local_row], k);
  }
  const bool store_first = !r.keep && (accepted > 0 || (fresh && count > 0));  // a fresh slot is made to hold zeros
  if (store_first) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) *reinterpret_cast<float4*>(state_rows + row * kHeadDim) = state[row];
  }

  // ---- This run.
  for (int token = 0; token < count; ++token) {
    auto& now = shared.tokens[token];
    const float q_scale = inverse_length(*reinterpret_cast<const float4*>(now.sum_squares)) * kQueryScale;
    const float k_scale = inverse_length(*reinterpret_cast<const float4*>(now.sum_squares + 4));
    const float4 q = scale4(*reinterpret_cast<const float4*>(now.q + lane * 4), q_scale);
    const float4 k = scale4(*reinterpret_cast<const float4*>(now.k + lane * 4), k_scale);
    const float4 decay = *reinterpret_cast<const float4*>(now.decay + lane * 4);
    const RowResult row = read_rows<kRows>(state, q, k, decay, now.v[local_row], now.beta, lane);
    correct_rows<kRows>(state, row.delta, k);
    if (at.owns_row()) now.o[local_row] = row.o;
    send<kCluster>(&now.partials[at.rank * kWarps + at.warp], row.squares, &shared.barrier, lane);
    if (!r.keep) {
      if (at.owns_row()) record(token, 2)[at.my_row()] = row.delta;
      if (at.warp == token % kWarps && at.rank == token % kCluster) {
        *reinterpret_cast<float4*>(record(token, 0) + lane * 4) = decay;
        *reinterpret_cast<float4*>(record(token, 1) + lane * 4) = k;
      }
    }
  }
  if (r.keep) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) *reinterpret_cast<float4*>(state_rows + row * kHeadDim) = state[row];
  }

  // ---- Convolution rows: what is committed into the state, this run's into the records.
#pragma unroll
  for (int pass = 0; pass < Config::kConvPasses; ++pass) {
    const int piece = at.warp + pass * kWarps;
    if (!at.active(piece) || !at.writes(piece)) continue;
    if (r.keep || store_first) {
#pragma unroll
      for (int row = 0; row < 3; ++row) {
        conv_rows[row * 3 * at.width + at.column(piece)] = window[pass][row];
      }
    }
    if (!r.keep) {
      const int part = piece < 4 ? 3 : piece < 8 ? 4 : 5;
#pragma unroll
      for (int token = 0; token < kMaxRun; ++token) {
        if (token < count) record(token, part)[at.channel(piece)] = __bfloat162float(raw[pass][token]);
      }
    }
  }
  close_exchange<kCluster>(&shared.barrier);
  if constexpr (kCluster > 1) __syncthreads();  // o comes from other warps of this block

  // ---- Gated norms, a token a warp.
  for (int token = at.warp; token < count; token += kWarps) {
    const auto& now = shared.tokens[token];
    const float squares = sum_partials<Config::kPartials>(now.partials, lane);
    for (int row = lane; row < kBlockRows; row += 32) {
      const int channel = at.rank * kBlockRows + row;
      p.out[int64_t{first + token} * at.width + head * kHeadDim + channel] =
          gated_norm(now.o[row], squares, __ldg(p.o_norm + channel), now.gate[row], p.eps);
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::kda
