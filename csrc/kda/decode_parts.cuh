// What decode's kernel is made of: a warp's pass over its rows, the exchange between the blocks of a cluster, and the
// channels before the recurrence.
#pragma once

#include "decode_config.h"
#include "step.cuh"

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
