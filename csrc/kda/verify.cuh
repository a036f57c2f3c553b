// A short run of tokens a sequence on one read of the state: verify, decode after verify, and commit.
//
// The last run's accepted tokens go into the state first (decay, k and error come from the records, so nothing is
// computed twice and the bits are those of decode), the committed state leaves, and this run's tokens follow in
// registers. Nine tokens twice make arithmetic as long as memory, so instructions count: eight lanes share a row
// instead of a warp, which leaves three exchanges a sum instead of five, for eight sums at once.
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
// two levels.
struct RunRows {
  static constexpr int kRows = 4, kQuarters = 4;
  float4 state[kRows][kQuarters];
  int lane, first_row;  // within the block

  __device__ __forceinline__ RunRows(int warp, int lane) : lane(lane), first_row(warp * 16 + lane / 8) {}

  __device__ __forceinline__ int column(int quarter) const { return quarter * 32 + lane % 8 * 4; }
  // After a sum over rows of both kinds of dots: of this row, in lanes j and j + 4 alike.
  __device__ __forceinline__ int my_row() const { return first_row + 4 * (lane % 4); }
  __device__ __forceinline__ int owner(int row) const { return (lane & 24) + row; }

  // The block's rows; null: zero.
  __device__ __forceinline__ void load(const float* block_rows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) {
        const float* const place = block_rows + (first_row + 4 * i) * kHeadDim + column(m);
        state[i][m] = block_rows == nullptr ? float4{} : __ldcg(reinterpret_cast<const float4*>(place));
      }
    }
  }
  // By way of shared memory and one asynchronous copy a warp: 16 plain stores a thread would hold up the loads of the
  // run that follows. Before the block ends, wait_stored.
  __device__ __forceinline__ void store(float* block_rows, float (*staging)[kHeadDim]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int m = 0; m < kQuarters; ++m) {
        *reinterpret_cast<float4*>(&staging[first_row + 4 * i][column(m)]) = state[i][m];
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
      const float4 d = *reinterpret_cast<const float4*>(decay + column(m));
#pragma unroll
      for (int i = 0; i < kRows; ++i) state[i][m] = decayed(state[i][m], d);
    }
  }
  __device__ __forceinline__ void correct_by(const float (&delta)[kRows], const float* k) {
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) {
      const float4 x = *reinterpret_cast<const float4*>(k + column(m));
#pragma unroll
      for (int i = 0; i < kRows; ++i) state[i][m] = corrected(state[i][m], delta[i], x);
    }
  }
  // This lane's share of the dots of its rows with x: the levels 16 and 8 of the tree.
  __device__ __forceinline__ void share(const float* x, float (&sums)[kRows]) const {
    float parts[kRows][kQuarters];
#pragma unroll
    for (int m = 0; m < kQuarters; ++m) {
      const float4 y = *reinterpret_cast<const float4*>(x + column(m));
#pragma unroll
      for (int i = 0; i < kRows; ++i) parts[i][m] = dot4(state[i][m], y);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i] = __fadd_rn(__fadd_rn(parts[i][0], parts[i][2]), __fadd_rn(parts[i][1], parts[i][3]));
    }
  }
  // The dots of my_row with k and q. The upper four lanes of eight take both the other way round, so that a lane keeps
  // the first four of its sums and hands over the others, whichever it is: the level 4 of the tree. The rest is shared
  // out.
  __device__ __forceinline__ float2 dots(const float* k, const float* q) const {
    const bool upper = lane & 4;
    float first[kRows], second[kRows];
    share(upper ? q : k, first);
    share(upper ? k : q, second);
#pragma unroll
    for (int i = 0; i < kRows; ++i) first[i] = __fadd_rn(first[i], __shfl_xor_sync(kFullWarp, second[i], 4));
    const float mine = transposing_sum<kRows, 2>(first, lane), other = __shfl_xor_sync(kFullWarp, mine, 4);
    return upper ? float2{other, mine} : float2{mine, other};
  }
};

// Before the recurrence each warp makes 32 channels, one a lane, of q or k (pass 0), and 32 of v or of the forget gate
// (pass 1). The first block makes q, the second k, and each its own rows of v and the same channels of the gate.
struct RunPiece {
  int part, channel;  // 0 q, 1 k, 2 v, 3 forget gate; the channel is within the head

  __device__ __forceinline__ RunPiece(int pass, int rank, int warp, int lane)
      : part(pass == 0 ? rank : 2 + warp / 2), channel((pass == 0 ? warp : 2 * rank + warp % 2) * 32 + lane) {
    asm("" : "+r"(part), "+r"(channel));  // else the compiler works them out again for every token
  }
  __device__ __forceinline__ int64_t stride(const DecodeParams& p) const {
    return part == 0 ? p.q_stride : part == 1 ? p.k_stride : part == 2 ? p.v_stride : p.f_stride;
  }
  __device__ __forceinline__ const __nv_bfloat16* source(const DecodeParams& p, int64_t token, int head) const {
    const __nv_bfloat16* rows = part == 0 ? p.q : part == 1 ? p.k : part == 2 ? p.v : p.f;
    return rows + token * stride(p) + head * kHeadDim + channel;
  }
  // The four taps; a decay's a_log and dt_bias.
  __device__ __forceinline__ float4 constants(const DecodeParams& p, int head) const {
    const int column = head * kHeadDim + channel;
    if (part < 3) return __ldg(reinterpret_cast<const float4*>(p.conv_weight) + part * p.heads * kHeadDim + column);
    return {__ldg(p.a_log + head), __ldg(p.dt_bias + column), 0.f, 0.f};
  }
  __device__ __forceinline__ const float* place(const RunShared::Token& token) const {
    return part == 0   ? token.q + channel
           : part == 1 ? token.k + channel
           : part == 2 ? token.v + channel % kRunRows
                       : token.decay + channel;
  }
};

// One channel of the first `count` rows.
template <int kMost>
__device__ __forceinline__ void load_rows(const __nv_bfloat16* source, int64_t stride, int count,
                                          __nv_bfloat16 (&values)[kMost]) {
  const char* place = reinterpret_cast<const char*>(source);  // in bytes: no shift of a 64-bit offset for every row
#pragma unroll
  for (int i = 0; i < kMost; ++i, place += stride * sizeof(__nv_bfloat16)) {
    if (i < count) values[i] = *reinterpret_cast<const __nv_bfloat16*>(place);
  }
}

// What both blocks of a head need. A remote store counts its bytes on the receiver's barrier.
struct Exchange {
  RunShared& shared;
  uint32_t there;  // from an address here to that in the other block

  __device__ __forceinline__ Exchange(RunShared& shared, int rank)
      : shared(shared), there(ptx::cluster_address(&shared, rank ^ 1) - ptx::smem_address(&shared)) {}

  __device__ __forceinline__ void send(uint32_t place, float value, const uint64_t* barrier) const {
    ptx::cluster_store_async(there + place, value, there + ptx::smem_address(barrier));
  }
  // To the same place in both blocks, before the recurrence.
  __device__ __forceinline__ void put(uint32_t place, float value) const {
    ptx::shared_store(place, value);
    send(place, value, &shared.channels_barrier);
  }
};

constexpr unsigned kGuessedBlocks = 528;  // four on each of an H200's 132 SMs

__global__ void __launch_bounds__(kRunThreads, 4) run_kernel(const __grid_constant__ RunParams r) {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  RunShared& shared = *reinterpret_cast<RunShared*>(dynamic_shared);

  const DecodeParams& p = r.token;
  const int sequence = blockIdx.z * gridDim.y + blockIdx.y;
  if (sequence >= r.sequences) return;  // a corner of the grid
  const int head = blockIdx.x / 2, rank = blockIdx.x % 2, block_row = rank * kRunRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = p.heads * kHeadDim;
  const RunPiece pieces[2] = {{0, rank, warp, lane}, {1, rank, warp, lane}};
  float4 constants[2] = {};
  if (p.tokens > 0) constants[0] = pieces[0].constants(p, head), constants[1] = pieces[1].constants(p, head);
  // Few heads, all of whose blocks may be here before the producer is done: their states come into L2 meanwhile, by the
  // slot that stands in the list. A stale one is harmless: it names a row of the pool.
  if (gridDim.x * gridDim.y <= kGuessedBlocks && threadIdx.x == 0) {
    const int slot = *static_cast<const volatile int32_t*>(p.slots + sequence);
    if (slot > 0 && slot < p.num_slots) {
      const int64_t first_row = int64_t{head} * kHeadDim + block_row;
      ptx::prefetch_l2(p.state + slot * p.state_slot_stride + first_row * kHeadDim,
                       kRunRows * kHeadDim * sizeof(float));
    }
  }

  ptx::pdl_wait();

  const RunPlan plan = plan_run(r, head, sequence);
  const int count = plan.count, accepted = plan.accepted;
  if (count == 0 && accepted == 0) return;
  // The other block sends, for each token, q or k, half of the decays, four sums, and later its sum of squares.
  const Exchange exchange(shared, rank);
  open_exchange<2>(&shared.channels_barrier, count * (kHeadDim + kHeadDim / 2 + 4) * sizeof(float),
                   &shared.squares_barrier, count * sizeof(float));
  __nv_bfloat16* const conv_rows = p.conv_state + plan.slot * p.conv_slot_stride + head * kHeadDim;
  // Row 0 of token 0's record; the next token's is a stride further.
  float* const records =
      r.records == nullptr ? nullptr : r.records + plan.slot * r.record_slot_stride + head * kRecordRows * kHeadDim;
  const int record_stride = p.heads * kRecordRows * kHeadDim;
  float* const state = p.state + plan.slot * p.state_slot_stride + (int64_t{head} * kHeadDim + block_row) * kHeadDim;

  // ---- Everything is asked for at once, what is needed first before what is large. Raw rows of this run, and the
  // window before it: the three newest rows that are committed, of the convolution state or of the last run's records.
  __nv_bfloat16 raw_beta = {}, raw[2][kMaxRun] = {}, window[2][3] = {}, gates[ceil_div(kMaxRun, 2)] = {};
  if (threadIdx.x < count) raw_beta = p.beta[(plan.first + threadIdx.x) * p.beta_stride + head];
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const RunPiece& piece = pieces[pass];
    load_rows(piece.source(p, plan.first, head), piece.stride(p), count, raw[pass]);
    if (piece.part == 3 || plan.fresh) continue;
    const __nv_bfloat16* place = conv_rows + (accepted * 3 + piece.part) * width + piece.channel;
    // A record's raw rows are bf16 widened to float: the upper half.
    const float* record = records + (accepted - 3) * record_stride + (3 + piece.part) * kHeadDim + piece.channel;
#pragma unroll
    for (int row = 0; row < 3; ++row, place += 3 * width, record += record_stride) {
      window[pass][row] = accepted + row < 3 ? *place : reinterpret_cast<const __nv_bfloat16*>(record)[1];
    }
  }
  // The output gate of this block's rows, every other token a thread.
  const int gate_token = threadIdx.x / kRunRows, gate_row = threadIdx.x % kRunRows;
  load_rows(p.gate + (plan.first + gate_token) * p.gate_stride + head * kHeadDim + block_row + gate_row,
            2 * p.gate_stride, (count - gate_token + 1) / 2, gates);
  // Of the last run's accepted tokens decay, k and the errors of this block's rows.
  if (threadIdx.x < sizeof(RunShared::Record) / sizeof(float4)) {
    const float* record = records + 4 * threadIdx.x + (threadIdx.x < kHeadDim / 2 ? 0 : block_row);
#pragma unroll 1
    for (int token = 0; token < accepted; ++token, record += record_stride) {
      ptx::cp_async_16(shared.committed[token].decay + 4 * threadIdx.x, record);
    }
  }
  ptx::cp_async_commit();
  if (threadIdx.x == 0 && !plan.fresh) {  // the state: into registers when the convolutions have left them
    ptx::prefetch_l2(state, kRunRows * kHeadDim * sizeof(float));
  }

  ptx::pdl_trigger();  // the next kernel's start no longer delays this one's loads

  // ---- Convolutions and decays of all tokens; a channel's rows are read and written by one thread.
  const bool store_first =
      !r.keep && (accepted > 0 || (plan.fresh && count > 0));  // a fresh slot is made to hold zeros
  if (threadIdx.x < count) shared.tokens[threadIdx.x].beta = precise_sigmoid(__bfloat162float(raw_beta));
  ptx::cluster_wait();
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const RunPiece& piece = pieces[pass];
    const float4 c = constants[pass];
    uint32_t to = ptx::smem_address(piece.place(shared.tokens[0]));
    asm("" : "+r"(to));
    if (piece.part == 3) {
#pragma unroll
      for (int token = 0; token < kMaxRun; ++token) {
        if (token >= count) break;
        exchange.put(to + token * sizeof(RunShared::Token), decay_of(raw[pass][token], c.x, c.y, p.lower_bound));
      }
      continue;
    }
    float* record = records + (3 + piece.part) * kHeadDim + piece.channel;
    float squares[kMaxRun];
    __nv_bfloat16 x0 = window[pass][0], x1 = window[pass][1], x2 = window[pass][2];
#pragma unroll
    for (int token = 0; token < kMaxRun; ++token) {
      const float x = convolve(c, x0, x1, x2, raw[pass][token]);
      x0 = x1, x1 = x2, x2 = raw[pass][token];
      squares[token] = __fmul_rn(x, x);
      if (token >= count) continue;
      if (pass == 0) {
        exchange.put(to + token * sizeof(RunShared::Token), x);
      } else {
        ptx::shared_store(to + token * sizeof(RunShared::Token), x);
      }
      if (!r.keep) *record = __bfloat162float(raw[pass][token]), record += record_stride;
    }
    if (pass == 0) {
      const float sum = warp_sum_many<kMaxRun>(squares);
      const int token = warp_sum_many_index<kMaxRun>();
      if (token >= 0 && token < count) {
        exchange.put(ptx::smem_address(shared.tokens[token].sum_squares + 4 * rank + warp), sum);
      }
    }
    if (r.keep || store_first) {
      const bool moved = r.keep && count > 0;  // a run that is kept is one token
      __nv_bfloat16* const columns = conv_rows + piece.part * width + piece.channel;
      columns[0] = moved ? window[pass][1] : window[pass][0];
      columns[3 * width] = moved ? window[pass][2] : window[pass][1];
      columns[6 * width] = moved ? raw[pass][0] : window[pass][2];
    }
  }
#pragma unroll
  for (int i = 0; i < ceil_div(kMaxRun, 2); ++i) {
    if (gate_token + 2 * i < count) shared.tokens[gate_token + 2 * i].gate[gate_row] = gates[i];
  }
  RunRows rows(warp, lane);
  rows.load(plan.fresh ? nullptr : state);
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (count > 0) ptx::mbarrier_wait(&shared.channels_barrier, 0);

  // ---- q and k to their lengths, and k.q: a token a warp, the turns side by side.
  constexpr int kTurns = ceil_div(kMaxRun, kRunThreads / 32);
  float4 q[kTurns] = {}, k[kTurns] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int token = warp + turn * kRunThreads / 32;
    if (token >= count) break;
    const auto& now = shared.tokens[token];
    q[turn] = scale4(*reinterpret_cast<const float4*>(now.q + lane * 4),
                     inverse_length(*reinterpret_cast<const float4*>(now.sum_squares)) * kQueryScale);
    k[turn] = scale4(*reinterpret_cast<const float4*>(now.k + lane * 4),
                     inverse_length(*reinterpret_cast<const float4*>(now.sum_squares + 4)));
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int token = warp + turn * kRunThreads / 32;
    const float kq = warp_sum(dot4(k[turn], q[turn]));
    if (token >= count) continue;
    auto& now = shared.tokens[token];
    *reinterpret_cast<float4*>(now.q + lane * 4) = q[turn];
    *reinterpret_cast<float4*>(now.k + lane * 4) = k[turn];
    if (lane == 0) now.kq = kq;
  }

  // ---- Commit.
#pragma unroll 1
  for (int token = 0; token < accepted; ++token) {
    const auto& old = shared.committed[token];
    rows.decay_by(old.decay);
    float delta[RunRows::kRows];
#pragma unroll
    for (int i = 0; i < RunRows::kRows; ++i) delta[i] = old.delta[rows.first_row + 4 * i];
    rows.correct_by(delta, old.k);
  }
  __syncthreads();
  if (store_first || count == 0) rows.store(state, shared.leaving);

  // ---- This run.
#pragma unroll 1
  for (int token = 0; token < count; ++token) {
    auto& now = shared.tokens[token];
    rows.decay_by(now.decay);
    const float2 dots = rows.dots(now.k, now.q);
    const float error = __fmul_rn(now.beta, __fsub_rn(now.v[rows.my_row()], dots.x));
    now.o[rows.my_row()] = __fmaf_rn(error, now.kq, dots.y);
    now.error[rows.my_row()] = error;
    float delta[RunRows::kRows];
#pragma unroll
    for (int i = 0; i < RunRows::kRows; ++i) delta[i] = __shfl_sync(kFullWarp, error, rows.owner(i));
    rows.correct_by(delta, now.k);
  }
  if (r.keep && count > 0) rows.store(state, shared.leaving);
  __syncthreads();

  // ---- Gated norms, eight lanes a token; neighbours are added first, as between the rows, warps and blocks of decode.
  constexpr int kGroup = kRunRows / 8;
  const int token = threadIdx.x / kGroup, row = threadIdx.x % kGroup * 8;
  auto& now = shared.tokens[token < count ? token : 0];
  float o[8], squares[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) o[i] = now.o[row + i], squares[i] = __fmul_rn(o[i], o[i]);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; i += 2 * step) squares[i] = __fadd_rn(squares[i], squares[i + step]);
  }
  float sum = squares[0];
#pragma unroll
  for (int mask = 1; mask < kGroup; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, mask));
  if (token < count && row == 0) exchange.send(ptx::smem_address(&now.squares), sum, &shared.squares_barrier);
  if (count > 0) ptx::mbarrier_wait(&shared.squares_barrier, 0);
  if (token < count) {
    sum = __fadd_rn(sum, now.squares);
    struct alignas(16) {
      __nv_bfloat16 x[8];
    } gate, out;
    reinterpret_cast<uint4&>(gate) = *reinterpret_cast<const uint4*>(now.gate + row);
    const float* const weight = p.o_norm + block_row + row;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.x[i] = gated_norm(o[i], sum, __ldg(weight + i), gate.x[i], p.eps);
    __nv_bfloat16* const place = p.out + int64_t{plan.first + token} * width + head * kHeadDim + block_row + row;
    *reinterpret_cast<uint4*>(place) = reinterpret_cast<const uint4&>(out);
  }
  // Decay (first block) or k (second), and the errors of this block's rows. The other block has read the last run's
  // records long ago: it sends its squares after its commit.
  if (!r.keep && threadIdx.x < (kHeadDim + kRunRows) / 4) {
    const bool is_error = threadIdx.x >= kHeadDim / 4;
    const int column = is_error ? block_row + 4 * threadIdx.x - kHeadDim : 4 * threadIdx.x;
    const auto& from = shared.tokens[0];
    const float* source = (is_error ? from.error - block_row : rank == 0 ? from.decay : from.k) + column;
    float* record = records + (is_error ? 2 : rank) * kHeadDim + column;
#pragma unroll 3
    for (int at = 0; at < count; ++at, source += sizeof(RunShared::Token) / sizeof(float), record += record_stride) {
      *reinterpret_cast<float4*>(record) = *reinterpret_cast<const float4*>(source);
    }
  }
  if (lane == 0) RunRows::wait_stored();
}

}  // namespace kimi::kda
