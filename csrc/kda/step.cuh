// The arithmetic of one KDA token, shared by decode and verify so that both give the same bits: every rounding is
// written out (no contraction left to the compiler) and every sum has one fixed tree, whatever the split of a head over
// blocks.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "params.h"

namespace kimi::kda {

// Sums each of kCount values over the lanes that differ in the bits below 2 * kMask, in about kCount + 4 shuffles
// instead of 4 * kCount: at every step a lane hands over half of its values and keeps the other half. The tree of each
// sum is that of warp_sum. Returns the sum of value l / (2 * kMask / kCount), l the lane's number among those lanes.
template <int kCount, int kMask>
__device__ __forceinline__ float transposing_sum(float (&values)[kCount], int lane) {
  int mask = kMask;
#pragma unroll
  for (int n = kCount / 2; n >= 1; n /= 2, mask /= 2) {
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

// For what goes into the state, where errors stay: within 2 ulp, and exactly 0 and 1 at the ends.
__device__ __forceinline__ float precise_sigmoid(float x) { return reciprocal_approx(__fadd_rn(1.f, expf(-x))); }

// SiLU of one channel's convolution, not rounded. Raw rows, oldest first.
__device__ __forceinline__ float convolve(float4 weight, float x0, float x1, float x2, float x3) {
  float sum = __fmul_rn(weight.x, x0);
  sum = __fmaf_rn(weight.y, x1, sum);
  sum = __fmaf_rn(weight.z, x2, sum);
  sum = __fmaf_rn(weight.w, x3, sum);
  return __fmul_rn(sum, precise_sigmoid(sum));
}
__device__ __forceinline__ float convolve(float4 weight, __nv_bfloat16 x0, __nv_bfloat16 x1, __nv_bfloat16 x2,
                                          __nv_bfloat16 x3) {
  return convolve(weight, __bfloat162float(x0), __bfloat162float(x1), __bfloat162float(x2), __bfloat162float(x3));
}

// e^g of one key channel, g = lower_bound * sigmoid(e^a_log * (f + dt_bias)).
__device__ __forceinline__ float decay_of(float f, float a_log, float dt_bias, float lower_bound) {
  const float x = __fmul_rn(expf(a_log), __fadd_rn(f, dt_bias));
  return expf(__fmul_rn(lower_bound, precise_sigmoid(x)));
}

// From the sum of squares, and from those of the four 32-channel pieces.
__device__ __forceinline__ float inverse_length(float squares) { return rsqrtf(__fadd_rn(squares, 1e-6f)); }
__device__ __forceinline__ float inverse_length(float4 squares) {
  return inverse_length(__fadd_rn(__fadd_rn(squares.x, squares.y), __fadd_rn(squares.z, squares.w)));
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

// Decays the warp's rows and takes both dots on the decayed state. `v` belongs to row (lane & 15) / (16 / kRows), kq is
// warp_sum(dot4(k, q)).
template <int kRows>
__device__ __forceinline__ RowResult read_rows(float4 (&state)[kRows], float4 q, float4 k, float kq, float4 decay,
                                               float v, float beta, int lane) {
  constexpr int kLanesPerRow = 16 / kRows;
  const bool upper = lane >= 16;
  float dots[kRows];  // S'k in the lower half warp, S'q in the upper
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    state[r] = decayed(state[r], decay);
    const float with_k = dot4(state[r], k), with_q = dot4(state[r], q);
    dots[r] = (upper ? with_q : with_k) + __shfl_xor_sync(kFullWarp, upper ? with_k : with_q, 16);
  }
  const float mine = transposing_sum<kRows, 8>(dots, lane);
  const float other = __shfl_xor_sync(kFullWarp, mine, 16);
  RowResult result;
  result.delta = __fmul_rn(beta, __fsub_rn(v, upper ? other : mine));
  result.o = __fmaf_rn(result.delta, kq, upper ? mine : other);
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

// ---- Exchange between the blocks of a cluster: a remote store counts its bytes on a barrier of the receiver, so that
// nobody waits for a memory fence. With one block it is a store and a block barrier.
// open_exchange, then one cluster_wait before the first send: the receivers' barriers exist. A barrier opens once it
// has counted its bytes.
template <int kCluster>
__device__ __forceinline__ void open_exchange(uint64_t* first, uint32_t first_bytes, uint64_t* second,
                                              uint32_t second_bytes) {
  if constexpr (kCluster > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(first, 1);
      ptx::mbarrier_init(second, 1);
      ptx::mbarrier_init_fence();
    }
    __syncthreads();  // for compute-sanitizer, which sees a race between the two halves of this
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(first, first_bytes);
      ptx::mbarrier_arrive_expect_tx(second, second_bytes);
    }
    ptx::cluster_arrive_relaxed();
  }
}

// One thread: `value` goes to the same place in every block.
template <int kCluster>
__device__ __forceinline__ void send_to_all(float* place, float value, uint64_t* barrier) {
  if constexpr (kCluster > 1) {
#pragma unroll
    for (int to = 0; to < kCluster; ++to) {
      ptx::cluster_store_async(ptx::cluster_address(place, to), value, ptx::cluster_address(barrier, to));
    }
  } else {
    *place = value;
  }
}

// A whole warp that holds the same value: one lane a receiver.
template <int kCluster>
__device__ __forceinline__ void send_from_warp(float* place, float value, uint64_t* barrier, int lane) {
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

// ---- Where a thread stands.
template <class Config>
struct Lane {
  int lane, warp, rank, head;

  __device__ __forceinline__ Lane()
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        rank(blockIdx.x % Config::kCluster),
        head(blockIdx.x / Config::kCluster) {}

  // Value rows: a warp owns kRows; after read_rows a lane holds the results of my_row.
  __device__ __forceinline__ int warp_row() const { return rank * Config::kBlockRows + warp * Config::kRows; }
  __device__ __forceinline__ int my_row() const { return warp_row() + (lane & 15) / (16 / Config::kRows); }
  __device__ __forceinline__ int my_local_row() const { return my_row() - rank * Config::kBlockRows; }
  __device__ __forceinline__ bool owns_row() const { return lane < 16 && lane % (16 / Config::kRows) == 0; }
};

// One channel's work before the recurrence: a convolution (part 0 q, 1 k, 2 v) or a decay (3).
template <class Config>
struct Piece {
  int index, part, channel;  // the channel is within the head
  bool active;

  __device__ __forceinline__ Piece(const Lane<Config>& at, int pass) {
    const int i = at.warp + pass * Config::kWarps, own = i - Config::kQkPieces;
    index = at.rank * Config::kQkPieces + i;  // of the q and k pieces, where it is one
    if (own < 0) {
      part = index / 4, channel = index % 4 * 32 + at.lane, active = true;
    } else {
      part = 2 + own / Config::kOwnPieces;
      channel = at.rank * Config::kBlockRows + own % Config::kOwnPieces * 32 + at.lane;
      active = i < Config::kPieces && (Config::kBlockRows >= 32 || at.lane < Config::kBlockRows);
    }
  }

  __device__ __forceinline__ bool convolves() const { return active && part < 3; }
  __device__ __forceinline__ bool decays() const { return active && part == 3; }

  // The four taps; a decay's a_log and dt_bias.
  __device__ __forceinline__ float4 constants(const DecodeParams& p, int head) const {
    const int column = head * kHeadDim + channel;
    if (convolves()) return __ldg(reinterpret_cast<const float4*>(p.conv_weight) + part * p.heads * kHeadDim + column);
    if (decays()) return {__ldg(p.a_log + head), __ldg(p.dt_bias + column), 0.f, 0.f};
    return {};
  }

  // This channel in one token's q, k, v or f.
  __device__ __forceinline__ const __nv_bfloat16* source(const DecodeParams& p, int64_t token, int head) const {
    const __nv_bfloat16* row = part == 0   ? p.q + token * p.q_stride
                               : part == 1 ? p.k + token * p.k_stride
                               : part == 2 ? p.v + token * p.v_stride
                                           : p.f + token * p.f_stride;
    return row + head * kHeadDim + channel;
  }

  // This channel's column of a slot's convolution rows, which are 3 * width apart.
  __device__ __forceinline__ int conv_column(int head, int width) const {
    return part * width + head * kHeadDim + channel;
  }

  // The finished value to all who need it.
  __device__ __forceinline__ void send(float value, TokenInputs<Config>& to, uint64_t* barrier,
                                       const Lane<Config>& at) const {
    constexpr int kCluster = Config::kCluster;
    if (part < 2) {
      send_to_all<kCluster>(&(part == 0 ? to.q : to.k)[channel], value, barrier);
      const float sum = warp_sum(__fmul_rn(value, value));
      send_from_warp<kCluster>(&to.sum_squares[index], sum, barrier, at.lane);
    } else if (decays()) {
      send_to_all<kCluster>(&to.decay[channel], value, barrier);
    } else if (active) {
      float* const place = &to.v[channel - at.rank * Config::kBlockRows];
      if constexpr (kCluster > 1) {
        ptx::cluster_store_async(ptx::cluster_address(place, at.rank), value, ptx::cluster_address(barrier, at.rank));
      } else {
        *place = value;
      }
    }
  }
};

}  // namespace kimi::kda
