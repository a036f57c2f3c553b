// A short run of tokens a sequence on one read of the state: verify, decode after verify, and commit.
//
// The last run's accepted tokens go into the state first (decay, k and error come from the records, so nothing is
// computed twice and the bits are those of decode), the committed state leaves, and this run's tokens follow in
// registers. Nine tokens twice make arithmetic as long as memory, so instructions count: eight lanes share a row
// instead of a warp, which leaves three exchanges a sum instead of five, for eight sums at once.
#pragma once

#include <cstddef>

#include "verify_parts.cuh"

namespace kimi::kda {

// What the blocks of a head need of each other. A remote store counts its bytes on a barrier of the receiver.
template <class Config>
struct Exchange {
  uint32_t there, channels_barrier;  // from an address here to that in the other block; the barrier there

  __device__ __forceinline__ Exchange(RunShared<Config>& shared, int rank) : there(0), channels_barrier(0) {
    if constexpr (Config::kCluster > 1) {
      there = ptx::cluster_address(&shared, rank ^ 1) - ptx::smem_address(&shared);
      channels_barrier = there + ptx::smem_address(&shared.channels_barrier);
      asm("" : "+r"(there), "+r"(channels_barrier));  // kept, not made again for every token
    }
  }
  // To the same place in every block, before the recurrence.
  __device__ __forceinline__ void put(uint32_t here, float value) const {
    ptx::shared_store(here, value);
    if constexpr (Config::kCluster > 1) ptx::cluster_store_async(there + here, value, channels_barrier);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    run_kernel(const __grid_constant__ RunParams r) {
  constexpr int kCluster = Config::kCluster, kBlockRows = Config::kRows, kThreads = Config::kThreads;
  constexpr uint32_t kRowBytes = kHeadDim * sizeof(float), kStateBytes = kBlockRows * kRowBytes;
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  RunShared<Config>& shared = *reinterpret_cast<RunShared<Config>*>(dynamic_shared);

  const DecodeParams& p = r.token;
  const int sequence = blockIdx.z * gridDim.y + blockIdx.y;
  if (sequence >= r.sequences) return;  // a corner of the grid
  const int head = blockIdx.x / kCluster, rank = blockIdx.x % kCluster, block_row = rank * kBlockRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = p.heads * kHeadDim;
  const RunPiece<Config> pieces[2] = {{0, rank, warp, lane}, {1, rank, warp, lane}};
  float4 constants[2] = {};
  if (p.tokens > 0) constants[0] = pieces[0].constants(p, head), constants[1] = pieces[1].constants(p, head);
  const int64_t state_offset = (int64_t{head} * kHeadDim + block_row) * kHeadDim;
  // Few heads, all of whose blocks may be here before the producer is done: their states come into L2 meanwhile, by the
  // slot that stands in the list. A stale one is harmless: it names a row of the pool.
  constexpr unsigned kOneWave = 132 * Config::kBlocksPerSm;  // on an H200
  if (gridDim.x * gridDim.y <= kOneWave && threadIdx.x == 0) {
    const int slot = *static_cast<const volatile int32_t*>(p.slots + sequence);
    if (slot > 0 && slot < p.num_slots) {
      ptx::prefetch_l2(p.state + slot * p.state_slot_stride + state_offset, kStateBytes);
    }
  }

  ptx::pdl_wait();

  const RunPlan plan = plan_run(r, head, sequence);
  const int count = plan.count, accepted = plan.accepted;
  if (count == 0 && accepted == 0) return;

  // Barriers count bytes: what the other block sends of each token before the recurrence (q or k, half of the decays,
  // four sums) and after it (a sum of squares), and what is copied from memory: the last run's records, and the state.
  const uint32_t loaded_bytes = accepted * 3 * kRowBytes + (plan.fresh ? 0 : kStateBytes);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.channels_barrier, 1);
    ptx::mbarrier_init(&shared.squares_barrier, 1);
    ptx::mbarrier_init(&shared.loads_barrier, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // for compute-sanitizer, which sees a race between the two halves of this
  if (threadIdx.x == 0) {
    if constexpr (kCluster > 1) {
      ptx::mbarrier_arrive_expect_tx(&shared.channels_barrier, count * (kHeadDim + kHeadDim / 2 + 4) * sizeof(float));
      ptx::mbarrier_arrive_expect_tx(&shared.squares_barrier, count * sizeof(float));
    }
    ptx::mbarrier_arrive_expect_tx(&shared.loads_barrier, loaded_bytes);
  }
  if constexpr (kCluster > 1) ptx::cluster_arrive_relaxed();
  const Exchange<Config> exchange(shared, rank);

  __nv_bfloat16* const conv_rows = p.conv_state + plan.slot * p.conv_slot_stride + head * kHeadDim;
  // A head's records: row by row, each with all tokens of the run.
  const int record_pitch = r.run * kHeadDim;
  float* const records =
      r.records == nullptr ? nullptr : r.records + plan.slot * r.record_slot_stride + head * kRecordRows * record_pitch;
  float* const state = p.state + plan.slot * p.state_slot_stride + state_offset;

  // ---- What is needed first is asked for first: inputs, and the window before the run, the three newest rows that are
  // committed, of the convolution state or of the last run's records.
  __nv_bfloat16 raw_beta = {};
  float norm_weight = 0.f;
  if (count > 0) {
    load_inputs(shared, p, plan.first, count, head, rank);
    if (threadIdx.x < count) raw_beta = p.beta[(plan.first + threadIdx.x) * p.beta_stride + head];
    if (threadIdx.x < kBlockRows) norm_weight = p.o_norm[block_row + threadIdx.x];
  }
  ptx::cp_async_commit();
  uint32_t window[2][3] = {};
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const RunPiece<Config>& piece = pieces[pass];
    if (piece.part == 3 || plan.fresh) continue;
    const __nv_bfloat16* const place = conv_rows + (accepted * 3 + piece.part) * width + piece.channel;
    // A record's raw rows are bf16 widened to float: the upper half.
    const float* const record = records + (3 + piece.part) * record_pitch + (accepted - 3) * kHeadDim + piece.channel;
#pragma unroll
    for (int row = 0; row < 3; ++row) {
      const auto* const committed = reinterpret_cast<const uint16_t*>(place + row * 3 * width);
      window[pass][row] =
          accepted + row < 3 ? *committed : reinterpret_cast<const uint16_t*>(record + row * kHeadDim)[1];
    }
  }

  const bool store_first =
      !r.keep && (accepted > 0 || (plan.fresh && count > 0));  // a fresh slot is made to hold zeros
  if (threadIdx.x < count) shared.scalars[threadIdx.x].beta = precise_sigmoid(__bfloat162float(raw_beta));
  if (threadIdx.x < kBlockRows) shared.norm_weight[threadIdx.x] = norm_weight;
  ptx::cp_async_wait<0>();
  if constexpr (kCluster > 1) ptx::cluster_wait();
  __syncthreads();
  // Then what is large, and comes while the convolutions are made: the state, and of the last run's accepted tokens
  // decay, k and errors, the first three rows of the records.
  if (lane == 0 && warp < 3 && accepted > 0) {
    ptx::bulk_load(shared.last[warp], records + warp * record_pitch, accepted * kRowBytes, &shared.loads_barrier);
  }
  if (threadIdx.x == 96 && !plan.fresh) ptx::bulk_load(shared.state, state, kStateBytes, &shared.loads_barrier);

  ptx::pdl_trigger();  // the next kernel's start no longer delays this one's loads

  // ---- Convolutions and decays of all tokens; a channel's rows are read and written by one thread.
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const RunPiece<Config>& piece = pieces[pass];
    const float4 c = constants[pass];
    const int mixed = kCluster == 1 ? piece.part : 0;
    if (piece.part == 3) {
      uint32_t here = ptx::smem_address(&shared.decay[0][piece.channel]);
      asm("" : "+r"(here));
#pragma unroll
      for (int token = 0; token < kMaxRun; ++token) {
        const float f = __bfloat162float(shared.raw.f[token][piece.row]);
        const float decay = decay_of(f, c.x, c.y, p.lower_bound);
        if (token < count) exchange.put(here + token * kRowBytes, decay);
      }
      continue;
    }
    const __nv_bfloat16* const raw =
        pass == 0 ? &shared.raw.mixed[mixed][0][piece.channel] : &shared.raw.v[0][piece.row];
    if (count > 0) {
      float* const record = records + (3 + piece.part) * record_pitch + piece.channel;
      uint32_t here = pass == 0
                          ? ptx::smem_address(&shared.q[0][piece.channel]) + piece.part * uint32_t{sizeof(shared.q)}
                          : ptx::smem_address(&shared.v[0][piece.row]);
      asm("" : "+r"(here));
      float squares[kMaxRun];
      float x0 = widened(window[pass][0]), x1 = widened(window[pass][1]), x2 = widened(window[pass][2]);
#pragma unroll
      for (int token = 0; token < kMaxRun; ++token) {
        const float x3 = __bfloat162float(raw[token * (pass == 0 ? kHeadDim : kBlockRows)]);
        const float x = convolve(c, x0, x1, x2, x3);
        x0 = x1, x1 = x2, x2 = x3;
        squares[token] = __fmul_rn(x, x);
        if (token < count) {
          if (pass == 0) {
            exchange.put(here + token * kRowBytes, x);
          } else {
            ptx::shared_store(here + token * kBlockRows * uint32_t{sizeof(float)}, x);
          }
          if (!r.keep) record[token * kHeadDim] = x3;
        }
      }
      if (pass == 0) {
        const float sum = warp_sum_many<kMaxRun>(squares);
        const int token = warp_sum_many_index<kMaxRun>();
        if (token >= 0 && token < count) {
          exchange.put(ptx::smem_address(&shared.sum_squares[token][4 * piece.part + warp % 4]), sum);
        }
      }
    }
    if (r.keep || store_first) {
      const bool moved = r.keep && count > 0;  // a run that is kept is one token
      auto* const columns = reinterpret_cast<uint16_t*>(conv_rows + piece.part * width + piece.channel);
      columns[0] = static_cast<uint16_t>(moved ? window[pass][1] : window[pass][0]);
      columns[3 * width] = static_cast<uint16_t>(moved ? window[pass][2] : window[pass][1]);
      columns[6 * width] = moved ? __bfloat16_as_ushort(*raw) : static_cast<uint16_t>(window[pass][2]);
    }
  }
  __syncthreads();
  if (kCluster > 1 && count > 0) ptx::mbarrier_wait(&shared.channels_barrier, 0);

  // ---- q and k to their lengths, and k.q: a token a warp, the turns side by side.
  constexpr int kTurns = ceil_div(kMaxRun, kThreads / 32);
  float4 q[kTurns] = {}, k[kTurns] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int token = warp + turn * kThreads / 32;
    if (token >= count) break;
    const float4* const squares = reinterpret_cast<const float4*>(shared.sum_squares[token]);
    q[turn] =
        scale4(*reinterpret_cast<const float4*>(&shared.q[token][lane * 4]), inverse_length(squares[0]) * kQueryScale);
    k[turn] = scale4(*reinterpret_cast<const float4*>(&shared.k[token][lane * 4]), inverse_length(squares[1]));
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int token = warp + turn * kThreads / 32;
    const float kq = warp_sum(dot4(k[turn], q[turn]));
    if (token >= count) continue;
    *reinterpret_cast<float4*>(&shared.q[token][lane * 4]) = q[turn];
    *reinterpret_cast<float4*>(&shared.k[token][lane * 4]) = k[turn];
    if (lane == 0) shared.scalars[token].kq = kq;
  }

  // ---- Commit.
  RunRows rows(warp, lane);
  int delta_at[RunRows::kRows];
#pragma unroll
  for (int i = 0; i < RunRows::kRows; ++i) {
    delta_at[i] = block_row + rows.row(i);
    asm("" : "+r"(delta_at[i]));
  }
  if (loaded_bytes > 0) ptx::mbarrier_wait(&shared.loads_barrier, 0);
  if (plan.fresh) {
    rows.clear();
  } else {
    rows.load(shared.state);
  }
#pragma unroll 1
  for (int token = 0; token < accepted; ++token) {
    rows.decay_by(shared.last[0][token]);
    float delta[RunRows::kRows];
#pragma unroll
    for (int i = 0; i < RunRows::kRows; ++i) delta[i] = shared.last[2][token][delta_at[i]];
    float4 old_k[RunRows::kQuarters];
    rows.read(shared.last[1][token], old_k);
    rows.correct_by(delta, old_k);
  }
  __syncthreads();
  if (store_first || count == 0) rows.store(state, shared.state);

  // ---- This run.
  using Shared = RunShared<Config>;
  static_assert(offsetof(Shared, k) == sizeof(shared.q) && offsetof(Shared, decay) == 2 * sizeof(shared.q) &&
                offsetof(Shared, result) - offsetof(Shared, v) == sizeof(shared.v));
  const float* at = shared.q[0];
  float* mine = &shared.v[0][rows.my_row()];
#pragma unroll 1
  for (int token = 0; token < count; ++token, at += kHeadDim, mine += kBlockRows) {
    rows.decay_by(at + 2 * kMaxRun * kHeadDim);
    float4 now_k[RunRows::kQuarters], now_q[RunRows::kQuarters];
    rows.read(at + kMaxRun * kHeadDim, now_k);
    rows.read(at, now_q);
    const auto scalars = shared.scalars[token];
    const float with_k = rows.dot(now_k), with_q = rows.dot(now_q);
    const float error = __fmul_rn(scalars.beta, __fsub_rn(*mine, with_k));
    mine[kMaxRun * kBlockRows] = error;
    mine[2 * kMaxRun * kBlockRows] = __fmaf_rn(error, scalars.kq, with_q);
    float delta[RunRows::kRows];
    rows.share_out(error, delta);
    rows.correct_by(delta, now_k);
  }
  if (r.keep && count > 0) rows.store(state, shared.state);
  ptx::fence_proxy_async();  // decays and k leave by bulk copies
  __syncthreads();

  // ---- Gated norms, eight values a lane; neighbours are added first, as between the rows, warps and blocks of decode.
  constexpr int kGroup = kBlockRows / 8;
  const int token = threadIdx.x / kGroup, row = threadIdx.x % kGroup * 8, safe = token < count ? token : 0;
  float o[8], squares[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) o[i] = shared.result.o[safe][row + i], squares[i] = __fmul_rn(o[i], o[i]);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; i += 2 * step) squares[i] = __fadd_rn(squares[i], squares[i + step]);
  }
  float sum = squares[0];
#pragma unroll
  for (int mask = 1; mask < kGroup; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, mask));
  if constexpr (kCluster > 1) {
    if (token < count && row == 0) {
      ptx::cluster_store_async(exchange.there + ptx::smem_address(&shared.squares[token]), sum,
                               exchange.there + ptx::smem_address(&shared.squares_barrier));
    }
    if (count > 0) ptx::mbarrier_wait(&shared.squares_barrier, 0);
    sum = __fadd_rn(sum, shared.squares[safe]);
  }
  // All blocks have read the last run's records: the other one sends its squares after its commit. Of two blocks the
  // first one's decays and the second one's k leave, and of each the errors of its rows.
  if (!r.keep && count > 0) {
    if (threadIdx.x == 0) {
      if (rank == 0) ptx::bulk_store(records, shared.decay, count * kRowBytes);
      if (rank == kCluster - 1) ptx::bulk_store(records + record_pitch, shared.k, count * kRowBytes);
      ptx::bulk_commit();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < count * kBlockRows / 4; i += kThreads) {
      const int of = i / (kBlockRows / 4), column = i % (kBlockRows / 4) * 4;
      *reinterpret_cast<float4*>(records + 2 * record_pitch + of * kHeadDim + block_row + column) =
          *reinterpret_cast<const float4*>(&shared.result.error[of][column]);
    }
  }
  if (token < count) {
    struct alignas(16) {
      __nv_bfloat16 x[8];
    } gate, out;
    reinterpret_cast<uint4&>(gate) = *reinterpret_cast<const uint4*>(&shared.gate[token][row]);
#pragma unroll
    for (int i = 0; i < 8; ++i) out.x[i] = gated_norm(o[i], sum, shared.norm_weight[row + i], gate.x[i], p.eps);
    __nv_bfloat16* const place = p.out + int64_t{plan.first + token} * width + head * kHeadDim + block_row + row;
    *reinterpret_cast<uint4*>(place) = reinterpret_cast<const uint4&>(out);
  }
  if (lane == 0) RunRows::wait_stored();
}

}  // namespace kimi::kda
