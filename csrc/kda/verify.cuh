// A short run of tokens a sequence on one read of the state: verify, decode after verify, and commit.
//
// The last run's accepted tokens go into the state first (decay, k and error come from the records, so nothing is
// computed twice and the bits are those of decode), then this run's tokens follow in registers. Arithmetic, not memory,
// is the limit with nine tokens: so one block holds a whole head and exchanges nothing with others, and eight lanes share
// a row instead of a warp, which leaves three exchanges a sum instead of five, for eight sums at once.
#pragma once

#include "decode_config.h"
#include "step.cuh"

namespace kimi::kda {

// A cluster of kCluster blocks holds a head: each has 128 / kCluster value rows, and makes as large a share of the channels.
template <int kCluster_, int kWarps_, int kMinBlocks_>
struct RunConfig {
  static constexpr int kCluster = kCluster_, kWarps = kWarps_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = 32 * kWarps, kBlockRows = kHeadDim / kCluster;
  static constexpr int kRows = kBlockRows / (4 * kWarps);  // of a lane
  static constexpr int kPieces = 16 / kCluster, kPasses = kPieces / kWarps;
  static_assert((kCluster == 1 || kCluster == 2) && kRows >= 1 && kRows <= 4 && kPasses * kWarps == kPieces);
};

// What one sequence does in this launch.
struct RunPlan {
  int slot, first, count, accepted;  // the run's tokens, and how many of the last run's go in before
  bool fresh;
};

// Cuts the run at num_tokens and at what a record holds, and answers the rows that get no token: 0, or NaN beyond the
// longest run that records can hold, a caller's error made visible. A skipped sequence has neither tokens nor a commit.
__device__ __forceinline__ RunPlan plan_run(const RunParams& r, int head, int sequence) {
  const DecodeParams& p = r.token;
  RunPlan plan;
  plan.slot = __ldcg(p.slots + sequence);
  plan.fresh = p.fresh != nullptr && p.fresh[sequence];
  const int live = p.num_tokens == nullptr ? p.tokens : min(p.tokens, __ldcg(p.num_tokens));
  int first = 0, last = 0;
  if (r.cu_seqlens != nullptr) {
    first = __ldcg(r.cu_seqlens + sequence);
    last = __ldcg(r.cu_seqlens + sequence + 1);
  } else if (p.tokens > 0) {
    first = sequence, last = sequence + 1;
  }
  const int longest = min(r.run, kMaxRun);
  const bool skipped = plan.slot <= 0 || plan.slot >= p.num_slots;
  plan.first = first;
  plan.count = skipped ? 0 : max(min(min(last, live) - first, longest), 0);
  plan.accepted = r.accepted == nullptr || plan.fresh || skipped ? 0 : min(__ldcg(r.accepted + sequence), longest);
  if (plan.accepted < 0) plan.accepted = 0;
  // A padded row of decode commits nothing.
  if (r.cu_seqlens == nullptr && p.tokens > 0 && plan.count == 0) plan.accepted = 0;

  const int end = sequence == r.sequences - 1 ? p.tokens : min(last, p.tokens);
  for (int token = first + plan.count; token < end; ++token) {
    const bool lost = !skipped && token < min(last, live);
    if (threadIdx.x < 32) {  // every block of the cluster: the same values
      const float value = lost ? __int_as_float(0x7fffffff) : 0.f;
      __nv_bfloat16* const out = p.out + (int64_t{token} * p.heads + head) * kHeadDim;
      for (int row = threadIdx.x; row < kHeadDim; row += 32) out[row] = __float2bfloat16_rn(value);
    }
  }
  return plan;
}

// A warp owns 4 * kRows rows. Lane 8 * g + j holds, of rows 4 * i + g, the columns 4 * j .. + 3 of each quarter row: what
// lanes j, j + 8, j + 16 and j + 24 hold in decode, so that its tree of a sum needs no exchange for the first two levels.
template <int kRows_>
struct RunRows {
  static constexpr int kRows = kRows_, kQuarters = 4;
  float4 state[kRows][kQuarters];
  int lane, first_row;

  __device__ __forceinline__ RunRows(int block_row, int warp, int lane)
      : lane(lane), first_row(block_row + 4 * kRows * warp + lane / 8) {}

  static __device__ __forceinline__ int column(int lane, int quarter) { return quarter * 32 + lane % 8 * 4; }

  __device__ __forceinline__ float* place(float* head_state, int row, int quarter) const {
    return head_state + (first_row + 4 * row) * kHeadDim + column(lane, quarter);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) state[i][m] = {};
    }
  }
  __device__ __forceinline__ void load(float* head_state) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) {
        state[i][m] = __ldcg(reinterpret_cast<const float4*>(place(head_state, i, m)));
      }
    }
  }
  __device__ __forceinline__ void store(float* head_state) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) *reinterpret_cast<float4*>(place(head_state, i, m)) = state[i][m];
    }
  }

  __device__ __forceinline__ void decay_by(const float* decay) {
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) {
      const float4 d = *reinterpret_cast<const float4*>(decay + column(lane, m));
#pragma unroll
      for (int i = 0; i < kRows; ++i) state[i][m] = decayed(state[i][m], d);
    }
  }
  __device__ __forceinline__ void correct_by(const float (&delta)[kRows], const float* k) {
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) {
      const float4 x = *reinterpret_cast<const float4*>(k + column(lane, m));
#pragma unroll
      for (int i = 0; i < kRows; ++i) state[i][m] = corrected(state[i][m], delta[i], x);
    }
  }
  // This lane's share of the dots of its rows with x: the levels 16 and 8 of the tree.
  __device__ __forceinline__ void share(const float* x, float* sums) const {
    float parts[kRows][kQuarters];
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) {
      const float4 y = *reinterpret_cast<const float4*>(x + column(lane, m));
#pragma unroll
      for (int i = 0; i < kRows; ++i) parts[i][m] = dot4(state[i][m], y);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i] = __fadd_rn(__fadd_rn(parts[i][0], parts[i][2]), __fadd_rn(parts[i][1], parts[i][3]));
    }
  }
  // The eight lanes of a group finish their 2 * kRows sums together: kEach lanes hold the same, the lower four lanes one of
  // the first kind, the upper four one of the second, of this row.
  static constexpr int kEach = 4 / kRows;
  __device__ __forceinline__ int my_row() const { return first_row + 4 * (lane % 4 / kEach); }
  __device__ __forceinline__ bool owns_row() const { return lane % 8 < 4 && lane % kEach == 0; }
  __device__ __forceinline__ int owner(int row) const { return (lane & 24) + row * kEach; }
};

// Sum of the squares of the warp's 128 values, four neighbours a lane: the tree of decode, where a lane has one value of
// each piece of 32 (levels 16, 8, 4 between lanes, 2 and 1 within the four), and the pieces are added last.
__device__ __forceinline__ float sum_of_squares(float4 x, int lane) {
  float squares[4] = {__fmul_rn(x.x, x.x), __fmul_rn(x.y, x.y), __fmul_rn(x.z, x.z), __fmul_rn(x.w, x.w)};
  float sum = transposing_sum<4, 4>(squares, lane);
#pragma unroll
  for (int mask : {4, 2, 8, 16}) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, mask));
  return sum;
}

// Brings into L2 what the block of one head of one sequence, counted through, reads.
__device__ __forceinline__ void prefetch_run(const RunParams& r, int64_t index, int lane) {
  const DecodeParams& p = r.token;
  const int64_t sequence = index / p.heads;
  if (sequence >= r.sequences) return;
  const int head = static_cast<int>(index - sequence * p.heads), slot = __ldcg(p.slots + sequence);
  if (slot <= 0 || slot >= p.num_slots) return;
  if (lane < 16) {
    const float* const state = p.state + slot * p.state_slot_stride + int64_t{head} * kHeadDim * kHeadDim;
    ptx::prefetch_l2(state + lane * 8 * kHeadDim, 8 * kHeadDim * sizeof(float));
  } else if (lane < 25) {  // three rows each of q, k and v
    const __nv_bfloat16* rows = p.conv_state + slot * p.conv_slot_stride + head * kHeadDim;
    ptx::prefetch_l2(rows + (lane - 16) * p.heads * kHeadDim, kHeadDim * sizeof(__nv_bfloat16));
  }
  if (r.accepted != nullptr && lane < min(__ldcg(r.accepted + sequence), min(r.run, kMaxRun))) {
    const float* record = r.records + slot * r.record_slot_stride + (lane * p.heads + head) * kRecordRows * kHeadDim;
    ptx::prefetch_l2(record, 3 * kHeadDim * sizeof(float));
  }
}

// ---- Before the recurrence: pieces of 32 channels, one channel a lane. Of two blocks the first makes q, the second k, and
// each its own rows of v and the same channels of the gate.
template <class Config>
struct RunPiece {
  int part, channel;  // 0 q, 1 k, 2 v, 3 gate; the channel is within the head

  __device__ __forceinline__ RunPiece(int pass, int rank, int warp, int lane) {
    int piece = warp + pass * Config::kWarps;
    if constexpr (Config::kCluster == 2) {
      piece = piece < 4 ? 4 * rank + piece : piece < 6 ? 4 + 2 * rank + piece : 6 + 2 * rank + piece;
    }
    part = piece / 4;
    channel = piece % 4 * 32 + lane;
  }

  __device__ __forceinline__ const __nv_bfloat16* source(const DecodeParams& p, int64_t token, int head) const {
    const __nv_bfloat16* row = part == 0   ? p.q + token * p.q_stride
                               : part == 1 ? p.k + token * p.k_stride
                               : part == 2 ? p.v + token * p.v_stride
                                           : p.f + token * p.f_stride;
    return row + head * kHeadDim + channel;
  }
};

// One value to the same place in all blocks of the cluster.
template <int kCluster>
__device__ __forceinline__ void put(float* place, float value) {
  if constexpr (kCluster > 1) {
#pragma unroll
    for (int to = 0; to < kCluster; ++to) ptx::cluster_store(ptx::cluster_address(place, to), value);
  } else {
    *place = value;
  }
}

template <int kCluster>
__device__ __forceinline__ void sync_head() {
  if constexpr (kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

// kAhead > 0: brings what the head kAhead heads later will read into L2; memory has time for it while this one computes.
template <class Config, int kAhead>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    run_kernel(const __grid_constant__ RunParams r) {
  constexpr int kCluster = Config::kCluster, kWarps = Config::kWarps, kThreads = Config::kThreads;
  constexpr int kPasses = Config::kPasses, kBlockRows = Config::kBlockRows;
  using Rows = RunRows<Config::kRows>;
  using Piece = RunPiece<Config>;
  __shared__ RunShared shared;

  const DecodeParams& p = r.token;
  const int sequence = blockIdx.z * gridDim.y + blockIdx.y;
  if (sequence >= r.sequences) return;  // a corner of the grid
  const int head = blockIdx.x / kCluster, rank = blockIdx.x % kCluster, block_row = rank * kBlockRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = p.heads * kHeadDim;
  if constexpr (kCluster > 1) ptx::cluster_arrive_relaxed();

  ptx::pdl_wait();

  const RunPlan plan = plan_run(r, head, sequence);
  const int count = plan.count, accepted = plan.accepted;
  if (count == 0 && accepted == 0) {
    ptx::pdl_trigger();
    return;
  }
  __nv_bfloat16* const conv_rows = p.conv_state + plan.slot * p.conv_slot_stride + head * kHeadDim;
  // Row 0 of token 0's record; the next token's is a stride further.
  float* const records =
      r.records == nullptr ? nullptr : r.records + plan.slot * r.record_slot_stride + head * kRecordRows * kHeadDim;
  const int record_stride = p.heads * kRecordRows * kHeadDim;

  // The state comes into L2 now and into registers when the convolutions have left them.
  const int64_t index = int64_t{sequence} * p.heads + head;
  if (rank == 0 && warp == 0) prefetch_run(r, index, lane);
  if constexpr (kAhead > 0) {
    if (rank == kCluster - 1 && warp == 1) prefetch_run(r, index + kAhead, lane);
  }

  // ---- Raw rows of this run, and the window before it: the three newest rows that are committed.
  __nv_bfloat16 window[kPasses][3] = {}, raw[kPasses][kMaxRun] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const Piece piece(pass, rank, warp, lane);
#pragma unroll
    for (int token = 0; token < kMaxRun; ++token) {
      if (token < count) raw[pass][token] = *piece.source(p, plan.first + token, head);
    }
    if (piece.part == 3) continue;
#pragma unroll
    for (int row = 0; row < 3; ++row) {
      const int from = accepted + row;
      if (from >= 3) {
        const float* record = records + (from - 3) * record_stride + (3 + piece.part) * kHeadDim;
        window[pass][row] = __float2bfloat16_rn(__ldcg(record + piece.channel));
      } else if (!plan.fresh) {
        window[pass][row] = conv_rows[(from * 3 + piece.part) * width + piece.channel];
      }
    }
  }

  // ---- The last run: decay, k and errors of the accepted tokens lie together.
  constexpr int kFours = 3 * kHeadDim / 4;
  for (int i = threadIdx.x; i < accepted * kFours; i += kThreads) {
    const float* from = records + i / kFours * record_stride + i % kFours * 4;
    reinterpret_cast<float4*>(shared.committed)[i] = __ldcg(reinterpret_cast<const float4*>(from));
  }
  if (threadIdx.x < count) {
    const __nv_bfloat16 raw_beta = p.beta[(plan.first + threadIdx.x) * p.beta_stride + head];
    shared.tokens[threadIdx.x].beta = precise_sigmoid(__bfloat162float(raw_beta));
  }
  for (int i = threadIdx.x; i < count * kBlockRows; i += kThreads) {
    const int token = i / kBlockRows, row = block_row + i % kBlockRows;
    shared.tokens[token].gate[row] = p.gate[(plan.first + token) * p.gate_stride + head * kHeadDim + row];
  }

  // ---- Convolutions and decays of all tokens; a channel's rows are read and written by one thread.
  if constexpr (kCluster > 1) ptx::cluster_wait();
  auto move_window = [&](const Piece& piece, __nv_bfloat16 x0, __nv_bfloat16 x1, __nv_bfloat16 x2) {
    __nv_bfloat16* const columns = conv_rows + piece.part * width + piece.channel;
    columns[0] = x0;
    columns[3 * width] = x1;
    columns[6 * width] = x2;
  };
  const bool store_first = !r.keep && (accepted > 0 || (plan.fresh && count > 0));  // a fresh slot is made to hold zeros
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const Piece piece(pass, rank, warp, lane);
    const int column = head * kHeadDim + piece.channel;
    if (count == 0) {
      if (piece.part < 3) move_window(piece, window[pass][0], window[pass][1], window[pass][2]);
      continue;
    }
    if (piece.part == 3) {
      const float a_log = __ldg(p.a_log + head), dt_bias = __ldg(p.dt_bias + column);
#pragma unroll
      for (int token = 0; token < kMaxRun; ++token) {
        if (token >= count) break;
        put<kCluster>(&shared.tokens[token].decay[piece.channel],
                      decay_of(raw[pass][token], a_log, dt_bias, p.lower_bound));
      }
      continue;
    }
    const float4 weight = __ldg(reinterpret_cast<const float4*>(p.conv_weight) + piece.part * width + column);
    __nv_bfloat16 x0 = window[pass][0], x1 = window[pass][1], x2 = window[pass][2];
#pragma unroll
    for (int token = 0; token < kMaxRun; ++token) {
      const float x = convolve(weight, x0, x1, x2, raw[pass][token]);
      if (token < count) {
        auto& now = shared.tokens[token];
        if (piece.part == 2) {
          now.v[piece.channel] = x;
        } else {
          put<kCluster>(&(piece.part == 0 ? now.q : now.k)[piece.channel], x);
        }
        if (!r.keep) {
          records[token * record_stride + (3 + piece.part) * kHeadDim + piece.channel] =
              __bfloat162float(raw[pass][token]);
        }
        x0 = x1, x1 = x2, x2 = raw[pass][token];
      }
    }
    if (r.keep) {
      move_window(piece, x0, x1, x2);
    } else if (store_first) {
      move_window(piece, window[pass][0], window[pass][1], window[pass][2]);
    }
  }
  float* const head_state = p.state + plan.slot * p.state_slot_stride + int64_t{head} * kHeadDim * kHeadDim;
  Rows rows(block_row, warp, lane);
  if (plan.fresh) {
    rows.clear();
  } else {
    rows.load(head_state);
  }
  // The other block has read the last run's records, too: they may be overwritten.
  sync_head<kCluster>();

  // ---- Lengths and k.q of all tokens, a token a warp.
  for (int token = warp; token < count; token += kWarps) {
    auto& now = shared.tokens[token];
    float4 q = *reinterpret_cast<const float4*>(now.q + lane * 4), k = *reinterpret_cast<const float4*>(now.k + lane * 4);
    q = scale4(q, inverse_length(sum_of_squares(q, lane)) * kQueryScale);
    k = scale4(k, inverse_length(sum_of_squares(k, lane)));
    *reinterpret_cast<float4*>(now.q + lane * 4) = q;
    *reinterpret_cast<float4*>(now.k + lane * 4) = k;
    const float kq = warp_sum(dot4(k, q));
    if (lane == 0) now.kq = kq;
    if (!r.keep && rank == token % kCluster) {
      float* const record = records + token * record_stride + lane * 4;
      *reinterpret_cast<float4*>(record) = *reinterpret_cast<const float4*>(now.decay + lane * 4);
      *reinterpret_cast<float4*>(record + kHeadDim) = k;
    }
  }

  // ---- Commit.
  for (int token = 0; token < accepted; ++token) {
    const auto& old = shared.committed[token];
    rows.decay_by(old.decay);
    float delta[Rows::kRows];
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) delta[i] = old.delta[rows.first_row + 4 * i];
    rows.correct_by(delta, old.k);
  }
  if (store_first || count == 0) rows.store(head_state);
  __syncthreads();

  // ---- This run.
  for (int token = 0; token < count; ++token) {
    auto& now = shared.tokens[token];
    rows.decay_by(now.decay);
    float sums[2 * Rows::kRows];
    rows.share(now.k, sums);
    rows.share(now.q, sums + Rows::kRows);
    const float mine = transposing_sum<2 * Rows::kRows, 4>(sums, lane), other = __shfl_xor_sync(kFullWarp, mine, 4);
    const float error = __fmul_rn(now.beta, __fsub_rn(now.v[rows.my_row()], lane & 4 ? other : mine));
    if (rows.owns_row()) {
      now.o[rows.my_row()] = __fmaf_rn(error, now.kq, other);
      if (!r.keep) records[token * record_stride + 2 * kHeadDim + rows.my_row()] = error;
    }
    float delta[Rows::kRows];
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) delta[i] = __shfl_sync(kFullWarp, error, rows.owner(i));
    rows.correct_by(delta, now.k);
  }
  if (r.keep && count > 0) rows.store(head_state);
  __syncthreads();

  // ---- Gated norms, a token a warp; neighbours are added first, as between the rows, warps and blocks of decode.
  constexpr int kEach = kBlockRows / 32;
  for (int token = warp; token < count; token += kWarps) {
    auto& now = shared.tokens[token];
    float squares[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float o = now.o[block_row + lane * kEach + i];
      squares[i] = __fmul_rn(o, o);
    }
#pragma unroll
    for (int step = 1; step < kEach; step *= 2) {
#pragma unroll
      for (int i = 0; i < kEach; i += 2 * step) squares[i] = __fadd_rn(squares[i], squares[i + step]);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      squares[0] = __fadd_rn(squares[0], __shfl_xor_sync(kFullWarp, squares[0], mask));
    }
    if (lane == 0) put<kCluster>(&now.squares[rank], squares[0]);
  }
  sync_head<kCluster>();
  for (int token = warp; token < count; token += kWarps) {
    const auto& now = shared.tokens[token];
    const float squares = kCluster > 1 ? __fadd_rn(now.squares[0], now.squares[1]) : now.squares[0];
    __nv_bfloat16* const out = p.out + int64_t{plan.first + token} * width + head * kHeadDim;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = block_row + i * 32 + lane;
      out[row] = gated_norm(now.o[row], squares, __ldg(p.o_norm + row), now.gate[row], p.eps);
    }
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::kda
