// The arithmetic of one KDA token, shared by decode and verify so that both give the same bits: every rounding is
// written out (no contraction left to the compiler) and every sum has one fixed tree, whatever the split of a head over
// blocks.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "params.h"

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

// SiLU of one channel's convolution, not rounded: a fused operation has no bf16 tensor in between, and that rounding is
// the largest share of a layer's bf16 noise. Raw rows, oldest first.
__device__ __forceinline__ float convolve(float4 weight, __nv_bfloat16 x0, __nv_bfloat16 x1, __nv_bfloat16 x2,
                                          __nv_bfloat16 x3) {
  float sum = __fmul_rn(weight.x, __bfloat162float(x0));
  sum = __fmaf_rn(weight.y, __bfloat162float(x1), sum);
  sum = __fmaf_rn(weight.z, __bfloat162float(x2), sum);
  sum = __fmaf_rn(weight.w, __bfloat162float(x3), sum);
  return silu(sum);
}

// e^g of one key channel, g = lower_bound * sigmoid(e^a_log * (f + dt_bias)). The accurate exponential: a state lives
// through thousands of decays close to 1, where a bias of the fast one would add up.
__device__ __forceinline__ float decay_of(__nv_bfloat16 f, float a_log, float dt_bias, float lower_bound) {
  const float x = __fmul_rn(expf(a_log), __fadd_rn(__bfloat162float(f), dt_bias));
  return expf(__fmul_rn(lower_bound, sigmoid(x)));
}

// 1 / sqrt(sum of squares + 1e-6) from the sums of the four 32-channel pieces.
__device__ __forceinline__ float inverse_length(float4 squares) {
  const float sum = __fadd_rn(__fadd_rn(squares.x, squares.y), __fadd_rn(squares.z, squares.w));
  return rsqrtf(__fadd_rn(sum, 1e-6f));
}

constexpr float kQueryScale = 0.08838834764831845f;  // 128^-0.5

// The gated norm of one output channel; `squares` is the sum of o^2 over the head.
__device__ __forceinline__ __nv_bfloat16 gated_norm(float o, float squares, float weight, __nv_bfloat16 gate,
                                                    float eps) {
  const float scale = rsqrtf(__fmaf_rn(squares, 1.f / kHeadDim, eps));
  return __float2bfloat16_rn(__fmul_rn(__fmul_rn(__fmul_rn(o, scale), weight), sigmoid(__bfloat162float(gate))));
}

// What a lane gets out of one token's pass over its warp's rows.
struct RowResult {
  float delta;    // beta * (v - S'k) of my row, S' the decayed state
  float o;        // S'q + delta * (k.q): the state after the update, read with q
  float squares;  // sum of o^2 over the warp's rows, the same in all lanes
};

// Decays the warp's rows and takes both dots on the decayed state. `v` belongs to row (lane & 15) / (16 / kRows).
template <int kRows>
__device__ __forceinline__ RowResult read_rows(float4 (&state)[kRows], float4 q, float4 k, float4 decay, float v,
                                               float beta, int lane) {
  constexpr int kLanesPerRow = 16 / kRows;
  const float kq = warp_sum(dot4(k, q));
  float dots[2 * kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    state[r] = decayed(state[r], decay);
    dots[r] = dot4(state[r], k);
    dots[r + kRows] = dot4(state[r], q);
  }
  const float mine = transposing_sum<kRows>(dots, lane);
  const float other = __shfl_xor_sync(kFullWarp, mine, 16);
  RowResult result;
  result.delta = __fmul_rn(beta, __fsub_rn(v, lane < 16 ? mine : other));
  result.o = __fmaf_rn(result.delta, kq, lane < 16 ? other : mine);
  result.squares = __fmul_rn(result.o, result.o);
#pragma unroll
  for (int mask = kLanesPerRow; mask < 16; mask *= 2) {
    result.squares = __fadd_rn(result.squares, __shfl_xor_sync(kFullWarp, result.squares, mask));
  }
  return result;
}

// Adds the correction to the rows, which are already decayed.
template <int kRows>
__device__ __forceinline__ void correct_rows(float4 (&state)[kRows], float delta, float4 k) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    state[r] = corrected(state[r], __shfl_sync(kFullWarp, delta, r * (16 / kRows)), k);
  }
}

// ---- Sums of squares between the blocks of a cluster: each block has a barrier that counts the bytes it is sent, so
// that nobody waits for a memory fence. open_exchange, then cluster_wait before the first send.
template <int kCluster>
__device__ __forceinline__ void open_exchange(uint64_t* barrier, uint32_t bytes) {
  if constexpr (kCluster > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barrier, 1);
      ptx::mbarrier_arrive_expect_tx(barrier, bytes);
      ptx::mbarrier_init_fence();
    }
    ptx::cluster_arrive_relaxed();
  }
}

// Called by a whole warp: `value` goes to the same place in every block of the cluster.
template <int kCluster>
__device__ __forceinline__ void send(float* place, float value, uint64_t* barrier, int lane) {
  if constexpr (kCluster > 1) {
    if (lane < kCluster) {
      ptx::cluster_store_async(ptx::cluster_address(place, lane), value, ptx::cluster_address(barrier, lane));
    }
  } else {
    if (lane == 0) *place = value;
  }
}

template <int kCluster>
__device__ __forceinline__ void close_exchange(uint64_t* barrier) {
  if constexpr (kCluster > 1) {
    ptx::mbarrier_wait(barrier, 0);
  } else {
    __syncthreads();
  }
}

// ---- Where a warp's piece of the convolutions lies: pieces of 32 channels, one a lane. 0..3 are q, 4..7 k, the others
// this block's own value rows. The gate's four pieces are dealt to the last warps, which have the fewest convolutions.
template <class Config>
struct Lane {
  int lane, warp, rank, head, width;

  __device__ __forceinline__ bool active(int piece) const {
    if (piece >= Config::kConvPieces) return false;
    return Config::kBlockRows >= 32 || piece < 8 || lane < Config::kBlockRows;
  }
  // Within the head's 128 channels of q, k or v.
  __device__ __forceinline__ int channel(int piece) const {
    return piece < 8 ? (piece % 4) * 32 + lane : rank * Config::kBlockRows + (piece - 8) * 32 + lane;
  }
  // Within the 3 * heads * 128 channels of the convolution.
  __device__ __forceinline__ int column(int piece) const {
    const int part = piece < 4 ? 0 : piece < 8 ? 1 : 2;
    return part * width + head * kHeadDim + channel(piece);
  }
  // Every block of a cluster convolves all q and k channels; one of them writes a channel's rows back.
  __device__ __forceinline__ bool writes(int piece) const {
    return piece >= 8 || channel(piece) / Config::kBlockRows == rank;
  }
  // The row of this channel in one token's q, k or v.
  __device__ __forceinline__ const __nv_bfloat16* source(const DecodeParams& p, int piece, int64_t token) const {
    const __nv_bfloat16* row = piece < 4   ? p.q + token * p.q_stride
                               : piece < 8 ? p.k + token * p.k_stride
                                           : p.v + token * p.v_stride;
    return row + head * kHeadDim + channel(piece);
  }
  __device__ __forceinline__ bool gates() const { return warp >= Config::kFirstGateWarp; }
  __device__ __forceinline__ int gate_channel() const { return (warp - Config::kFirstGateWarp) * 32 + lane; }

  // ---- Value rows: a warp owns kRows, after read_rows a lane holds the results of my_row.
  __device__ __forceinline__ int warp_row() const { return rank * Config::kBlockRows + warp * Config::kRows; }
  __device__ __forceinline__ int my_row() const { return warp_row() + (lane & 15) / (16 / Config::kRows); }
  __device__ __forceinline__ bool owns_row() const { return lane < 16 && lane % (16 / Config::kRows) == 0; }
};

}  // namespace kimi::kda
