// KDA decode: convolution, gate, delta rule and gated norm of one token a sequence, in one read and one write of the
// state.
//
// Everything but the norm over the 128 value channels is independent between value rows, so a head is split by value
// rows over the blocks of a cluster; they exchange one sum of squares a warp through distributed shared memory.
// Every sum has one fixed tree, the same for each split, so the split never changes a bit of the result.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "decode_config.h"

namespace kimi::kda {

// Sums each of 2 * kRows values over the warp in about 2 * kRows + 4 shuffles instead of 10 * kRows: at every step a
// lane hands over half of its values and keeps the other half. The tree of each sum is that of warp_sum.
// Returns, in lane l, the sum of value [(l >> 4) * kRows + ((l & 15) >> kShift)], kShift = 4 - log2(kRows).
template <int kRows>
__device__ __forceinline__ float transposing_sum(float (&values)[2 * kRows], int lane) {
  int mask = 16;
#pragma unroll
  for (int n = kRows; n >= 1; n /= 2, mask /= 2) {
    const bool upper = lane & mask;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float give = upper ? values[i] : values[i + n];
      const float keep = upper ? values[i + n] : values[i];
      values[i] = keep + __shfl_xor_sync(kFullWarp, give, mask);
    }
  }
#pragma unroll
  for (; mask > 0; mask /= 2) values[0] += __shfl_xor_sync(kFullWarp, values[0], mask);
  return values[0];
}

__device__ __forceinline__ float dot4(float4 a, float4 b) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}

__device__ __forceinline__ float4 scale4(float4 a, float b) {
  return {__fmul_rn(a.x, b), __fmul_rn(a.y, b), __fmul_rn(a.z, b), __fmul_rn(a.w, b)};
}

__device__ __forceinline__ float4 decayed(float4 s, float4 decay) {
  return {__fmul_rn(s.x, decay.x), __fmul_rn(s.y, decay.y), __fmul_rn(s.z, decay.z), __fmul_rn(s.w, decay.w)};
}

__device__ __forceinline__ float4 corrected(float4 s, float delta, float4 k) {
  return {__fmaf_rn(delta, k.x, s.x), __fmaf_rn(delta, k.y, s.y), __fmaf_rn(delta, k.z, s.z),
          __fmaf_rn(delta, k.w, s.w)};
}

// Sums 128 / kRows partials (one a warp of the cluster) with the tree that pairs neighbours first.
template <int kCount>
__device__ __forceinline__ float sum_partials(const float* partials, int lane) {
  constexpr int kEach = kCount >= 32 ? kCount / 32 : 1;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = partials[(lane * kEach + i) % kCount];
#pragma unroll
  for (int step = 1; step < kEach; step *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; i += 2 * step) x[i] += x[i + step];
  }
#pragma unroll
  for (int mask = 1; mask < kCount / kEach; mask *= 2) x[0] += __shfl_xor_sync(kFullWarp, x[0], mask);
  return x[0];
}

// One channel of the convolution: its taps, the three old raw rows and the new one.
struct ConvChannel {
  float4 weight;
  __nv_bfloat16 old[3];
  __nv_bfloat16 now;

  // SiLU of the convolution, rounded to bf16 as the unfused operations would leave it.
  __device__ __forceinline__ float apply() const {
    float sum = __fmul_rn(weight.x, __bfloat162float(old[0]));
    sum = __fmaf_rn(weight.y, __bfloat162float(old[1]), sum);
    sum = __fmaf_rn(weight.z, __bfloat162float(old[2]), sum);
    sum = __fmaf_rn(weight.w, __bfloat162float(now), sum);
    return __bfloat162float(__float2bfloat16_rn(silu(sum)));
  }
};

template <class Config, int kMinBlocks, bool kPrefetch>
__global__ void __launch_bounds__(Config::kThreads, kMinBlocks) decode_kernel(const __grid_constant__ DecodeParams p) {
  constexpr int kCluster = Config::kCluster, kWarps = Config::kWarps, kRows = Config::kRows;
  constexpr int kBlockRows = Config::kBlockRows, kPasses = Config::kConvPasses;
  constexpr int kLanesPerRow = 16 / kRows;  // lanes that hold the same row's dot after transposing_sum, per half warp
  __shared__ DecodeShared<Config> shared;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = kCluster == 1 ? 0 : blockIdx.x % kCluster;
  const int item = blockIdx.x / kCluster;
  const int token = item / p.heads, head = item - token * p.heads;
  const int width = p.heads * kHeadDim;

  // Which channel each convolution pass of this lane handles: 0..127 q, 128..255 k, then this block's v rows.
  auto conv_piece = [&](int pass) { return warp + pass * kWarps; };
  auto conv_active = [&](int piece) {
    if (piece >= Config::kConvPieces) return false;
    return kBlockRows >= 32 || piece < 8 || lane < kBlockRows;
  };
  auto conv_channel = [&](int piece) {  // within the head's 128 channels of q, k or v
    return piece < 8 ? (piece % 4) * 32 + lane : rank * kBlockRows + (piece - 8) * 32 + lane;
  };
  auto conv_column = [&](int piece) {  // within the 3 * heads * 128 channels
    const int part = piece < 4 ? 0 : piece < 8 ? 1 : 2;
    return part * width + head * kHeadDim + conv_channel(piece);
  };
  const bool gate_warp = warp >= Config::kFirstGateWarp;
  const int gate_channel = (warp - Config::kFirstGateWarp) * 32 + lane;

  // ---- Constants and cache hints, before the producer is waited for.
  ConvChannel conv[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = conv_piece(pass);
    if (conv_active(piece))
      conv[pass].weight = __ldg(reinterpret_cast<const float4*>(p.conv_weight) + conv_column(piece));
  }
  float a_log = 0.f, dt_bias = 0.f;
  if (gate_warp) {
    a_log = __ldg(p.a_log + head);
    dt_bias = __ldg(p.dt_bias + head * kHeadDim + gate_channel);
  }
  const int warp_row = rank * kBlockRows + warp * kRows;     // the first value row of this warp
  const int my_row = warp_row + (lane & 15) / kLanesPerRow;  // the row whose dots this lane will hold
  const float norm_weight = __ldg(p.o_norm + my_row);
  if constexpr (kCluster > 1) ptx::cluster_arrive();  // waited for before the first remote write
  if constexpr (kPrefetch) {
    // Only a hint, so a stale slot is harmless: it names a row of the pool, and L2 stays coherent with its writers.
    const int guess = *static_cast<const volatile int32_t*>(p.slots + token);
    if (guess > 0 && guess < p.num_slots && lane == 0) {
      ptx::prefetch_l2(p.state + guess * p.state_slot_stride + (int64_t{head} * kHeadDim + warp_row) * kHeadDim,
                       kRows * kHeadDim * sizeof(float));
    }
  }

  ptx::pdl_wait();

  // ---- Inputs of this token; those that need no slot are asked for first. Padding ends here, with nothing touched.
  const int num_tokens = p.num_tokens == nullptr ? p.tokens : __ldcg(p.num_tokens);
  const int slot = __ldcg(p.slots + token);
  const bool fresh = p.fresh != nullptr && p.fresh[token];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = conv_piece(pass);
    if (!conv_active(piece)) continue;
    const __nv_bfloat16* source = piece < 4   ? p.q + token * p.q_stride
                                  : piece < 8 ? p.k + token * p.k_stride
                                              : p.v + token * p.v_stride;
    conv[pass].now = source[head * kHeadDim + conv_channel(piece)];
  }
  float forget = 0.f;
  if (gate_warp) forget = __bfloat162float(p.f[token * p.f_stride + head * kHeadDim + gate_channel]);
  const float raw_beta = __bfloat162float(p.beta[token * p.beta_stride + head]);
  const float raw_gate = __bfloat162float(p.gate[token * p.gate_stride + head * kHeadDim + my_row]);
  if (token >= num_tokens || slot <= 0 || slot >= p.num_slots) return;

  __nv_bfloat16* const conv_rows = p.conv_state + slot * p.conv_slot_stride;
  float* const state_rows =
      p.state + slot * p.state_slot_stride + (int64_t{head} * kHeadDim + warp_row) * kHeadDim + lane * 4;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = conv_piece(pass);
    if (!conv_active(piece)) continue;
#pragma unroll
    for (int row = 0; row < 3; ++row) {
      conv[pass].old[row] = fresh ? __nv_bfloat16{} : conv_rows[int64_t{row} * 3 * width + conv_column(piece)];
    }
  }
  float4 state[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    state[r] = fresh ? float4{} : __ldcg(reinterpret_cast<const float4*>(state_rows + r * kHeadDim));
  }

  // ---- Convolution, sums of squares and decay, shared with the block.
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = conv_piece(pass);
    if (piece >= Config::kConvPieces) continue;
    if (piece < 8) {
      const float x = conv[pass].apply();
      (piece < 4 ? shared.q : shared.k)[conv_channel(piece)] = x;
      const float sum = warp_sum(x * x);
      if (lane == 0) shared.sum_squares[piece] = sum;
    } else if (conv_active(piece)) {
      shared.v[(piece - 8) * 32 + lane] = conv[pass].apply();
    }
  }
  if (gate_warp) {
    const float g = p.lower_bound * sigmoid(__expf(a_log) * (forget + dt_bias));
    shared.decay[gate_channel] = __expf(g);
  }
  __syncthreads();

  const float4 q_squares = *reinterpret_cast<const float4*>(shared.sum_squares);
  const float4 k_squares = *reinterpret_cast<const float4*>(shared.sum_squares + 4);
  const float q_scale =
      rsqrtf((q_squares.x + q_squares.y) + (q_squares.z + q_squares.w) + 1e-6f) * 0.08838834764831845f;
  const float k_scale = rsqrtf((k_squares.x + k_squares.y) + (k_squares.z + k_squares.w) + 1e-6f);
  const float4 q = scale4(*reinterpret_cast<const float4*>(shared.q + lane * 4), q_scale);
  const float4 k = scale4(*reinterpret_cast<const float4*>(shared.k + lane * 4), k_scale);
  const float4 decay = *reinterpret_cast<const float4*>(shared.decay + lane * 4);
  const float v = shared.v[my_row - rank * kBlockRows];
  const float kq = warp_sum(dot4(k, q));

  // ---- Delta rule: both dots are taken on the decayed state, S'k and S'q; o = S'q + delta (k.q).
  float dots[2 * kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    state[r] = decayed(state[r], decay);
    dots[r] = dot4(state[r], k);
    dots[r + kRows] = dot4(state[r], q);
  }
  const float mine = transposing_sum<kRows>(dots, lane);
  const float other = __shfl_xor_sync(kFullWarp, mine, 16);
  const float delta = sigmoid(raw_beta) * (v - (lane < 16 ? mine : other));
  const float o = __fmaf_rn(delta, kq, lane < 16 ? other : mine);
  float squares = o * o;
#pragma unroll
  for (int mask = kLanesPerRow; mask < 16; mask *= 2) squares += __shfl_xor_sync(kFullWarp, squares, mask);
  if constexpr (kCluster > 1) {
    ptx::cluster_wait();
    if (lane < kCluster)
      ptx::cluster_store(ptx::cluster_address(&shared.partials[rank * kWarps + warp], lane), squares);
    ptx::cluster_arrive();
  } else if (lane == 0) {
    shared.partials[warp] = squares;
  }

  // ---- The state goes back while the sums travel.
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float row_delta = __shfl_sync(kFullWarp, delta, r * kLanesPerRow);
    *reinterpret_cast<float4*>(state_rows + r * kHeadDim) = corrected(state[r], row_delta, k);
  }
  if constexpr (kCluster > 1) {
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }

  // ---- Gated norm. The convolution rows move only now: other blocks of the cluster read the q and k channels, too.
  const float mean = sum_partials<Config::kPartials>(shared.partials, lane) * (1.f / kHeadDim);
  if (lane < 16 && lane % kLanesPerRow == 0) {
    const float y = o * rsqrtf(mean + p.eps) * norm_weight * sigmoid(raw_gate);
    p.out[int64_t{token} * width + head * kHeadDim + my_row] = __float2bfloat16_rn(y);
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int piece = conv_piece(pass);
    if (!conv_active(piece)) continue;
    if (piece < 8 && conv_channel(piece) / kBlockRows != rank) continue;
    __nv_bfloat16* column = conv_rows + conv_column(piece);
    column[0] = conv[pass].old[1];
    column[int64_t{3} * width] = conv[pass].old[2];
    column[int64_t{6} * width] = conv[pass].now;
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::kda
