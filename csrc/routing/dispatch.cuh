// From expert ids to the work list of the grouped GEMMs: a stable sort of the pairs by expert, and tiles with the
// fullest experts first. Blocks do not talk to each other. Up to 8192 pairs (512 tokens at k = 16) are one chunk and
// one launch, in which every block counts for itself; more are cut into chunks, which a launch before counts.
//
// A slice block keeps, in order, its chunk's pairs of its 32 experts. Then each warp takes one expert and picks that
// one's pairs from the list by ballots, which keeps their order: no atomics decide anything.
// The tile block sorts the experts by load, 5 bits a pass: one pass as long as no expert has more than 31 pairs.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "dispatch_config.h"

namespace kimi::routing {

__device__ __forceinline__ uint32_t live_pairs(const DispatchParams& p) {
  return static_cast<uint32_t>(live_tokens(p.num_tokens, p.tokens) * p.k);
}

__device__ __forceinline__ unsigned lanes_before() { return (1u << threadIdx.x % 32) - 1; }

// Sum over the warps before this one, of a value that each warp has stored.
__device__ __forceinline__ int sum_before(const int32_t (&of_warp)[kDispatchWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return __reduce_add_sync(kFullWarp, lane < warp ? of_warp[lane] : 0);
}

__device__ __forceinline__ int warp_scan(int value) {  // exclusive
  const int lane = threadIdx.x % 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  return inclusive - value;
}

// Experts (within those that take part; beyond them: no part) of the pairs first, first + kStep, ...
// The ids are asked for before num_tokens has arrived.
template <int kRounds, int kStep>
__device__ __forceinline__ void load_experts(const DispatchParams& p, uint32_t first, unsigned (&expert)[kRounds]) {
  const int32_t* ids = p.ids + first;
  const uint32_t slots = static_cast<uint32_t>(p.tokens * p.k);
  const int left = static_cast<int>(slots - first);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) expert[r] = r * kStep < left ? static_cast<unsigned>(ids[r * kStep]) : ~0u;
  const int live = static_cast<int>(live_pairs(p) - first);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) expert[r] = r * kStep < live ? expert[r] - p.first : ~0u;
}

// ---- slices ----

template <int kRounds>
__device__ __forceinline__ void sort_slice(const DispatchParams& p, unsigned char* memory) {
  SliceShared& shared = *reinterpret_cast<SliceShared*>(memory);
  uint32_t* const list = reinterpret_cast<uint32_t*>(&shared + 1);  // place in the chunk * 32 + expert of the slice
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const unsigned experts = p.experts, chunk = blockIdx.y, slice = blockIdx.x - 1;
  const unsigned first = slice * kSliceExperts, size = min(experts - first, static_cast<unsigned>(kSliceExperts));
  if (thread < 2 * kSliceExperts) (thread < kSliceExperts ? shared.count : shared.before)[lane] = 0;
  __syncthreads();
  ptx::pdl_wait();

  const unsigned chunk_first = chunk * (kRounds * kDispatchThreads);
  const unsigned place = warp * (kRounds * 32) + lane;  // a warp's share of a chunk is contiguous
  unsigned expert[kRounds];
  load_experts<kRounds, 32>(p, chunk_first + place, expert);
  ptx::pdl_trigger();  // early: what depends on this kernel waits for its end all the same

  // ---- how many pairs the slice's experts have, and those before ----
  int below = 0, total = 0;
  if (p.chunks == 1) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      below += expert[r] < first;
      total += expert[r] < experts;
      if (expert[r] - first < size) atomicAdd(&shared.count[expert[r] - first], 1);
    }
    below = __reduce_add_sync(kFullWarp, below);
    total = __reduce_add_sync(kFullWarp, total);
  } else {
    for (unsigned c = warp; c < static_cast<unsigned>(p.chunks); c += kDispatchWarps) {
      const int group = p.group_counts[c * kDispatchWarps + lane];
      const int count = lane < size ? p.chunk_counts[static_cast<int64_t>(c) * experts + first + lane] : 0;
      below += __reduce_add_sync(kFullWarp, lane < slice ? group : 0);
      total += __reduce_add_sync(kFullWarp, group);
      atomicAdd(&shared.count[lane], count);
      if (c < chunk) atomicAdd(&shared.before[lane], count);
    }
  }
  unsigned own[kRounds];
  int sum = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    own[r] = __ballot_sync(kFullWarp, expert[r] - first < size);
    sum += __popc(own[r]);
  }
  if (lane == 0) shared.below[warp] = below, shared.total[warp] = total, shared.own[warp] = sum;
  __syncthreads();

  below = __reduce_add_sync(kFullWarp, shared.below[lane]);
  total = __reduce_add_sync(kFullWarp, shared.total[lane]);
  int at = sum_before(shared.own);
  const int listed = __reduce_add_sync(kFullWarp, shared.own[lane]);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (expert[r] - first < size) {
      list[at + __popc(own[r] & lanes_before())] = (place + r * 32) * kSliceExperts + (expert[r] - first);
    }
    at += __popc(own[r]);
  }
  __syncthreads();

  // ---- a warp an expert ----
  const int start = below + sum_before(shared.count), count = shared.count[warp];
  if (chunk == 0 && warp < size && lane == 0) p.counts[first + warp] = count, p.offsets[first + warp] = start;
  if (chunk == 0 && slice == 0 && thread == 0) p.offsets[experts] = total;
  if (count > 0) {
    int32_t* target = p.pairs + start + shared.before[warp];
#pragma unroll 4
    for (int base = 0; base < listed; base += 32) {
      const uint32_t entry = base + lane < listed ? list[base + lane] : ~0u;
      const bool mine = base + lane < listed && entry % kSliceExperts == static_cast<unsigned>(warp);
      const unsigned all = __ballot_sync(kFullWarp, mine);
      if (mine) target[__popc(all & lanes_before())] = static_cast<int32_t>(chunk_first + entry / kSliceExperts);
      target += __popc(all);
    }
  }
  const int64_t slots = p.tokens * p.k, step = static_cast<int64_t>(gridDim.x - 1) * gridDim.y * kDispatchThreads;
  const int64_t block = static_cast<int64_t>(chunk) * (gridDim.x - 1) + slice;
#pragma unroll 1
  for (int64_t i = total + block * kDispatchThreads + thread; i < slots; i += step) p.pairs[i] = -1;
}

// ---- tiles ----

// Adds a chunk's pairs to shared counters, which are 0 before.
template <int kRounds>
__device__ __forceinline__ void count_chunk(const DispatchParams& p, uint32_t first, int32_t* counts) {
  unsigned expert[kRounds];
  load_experts<kRounds, kDispatchThreads>(p, first + threadIdx.x, expert);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (expert[r] < static_cast<unsigned>(p.experts)) atomicAdd(&counts[expert[r]], 1);
  }
}

// How many threads have a larger digit, or the same and come before. Two block barriers; `lanes` is 0 before and, after
// the next barrier, again.
__device__ __forceinline__ int rank_by_digit(int digit, TileShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = kDigits - 1 - digit;
  atomicOr(&shared.lanes[row][warp], 1u << lane);
  __syncthreads();
  const int among = __popc(shared.lanes[row][warp] & lanes_before());
  const int entry = __popc(shared.lanes[warp][lane]);  // here this warp stands for a digit, its lanes for warps
  const int before = warp_scan(entry);
  shared.before[warp][lane] = before;
  if (lane == 31) shared.digit_total[warp] = before + entry;
  __syncthreads();
  shared.lanes[warp][lane] = 0;
  const int larger = warp_scan(shared.digit_total[lane]);
  return __shfl_sync(kFullWarp, larger, row) + shared.before[row][warp] + among;
}

__device__ __forceinline__ void write_tile(const DispatchParams& p, int tile, int expert, int start, int tokens) {
  int32_t* row = p.tiles + static_cast<int64_t>(tile) * 3;
  row[0] = expert;
  row[1] = start;
  row[2] = tokens;
}

// The general case: by the position in the order of loads, more digits first if loads have them, several tiles for an
// expert. `most` is the largest load; count and start lie in shared memory.
__device__ __forceinline__ void write_sorted_tiles(const DispatchParams& p, int rank, int most, TileShared& shared) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int expert = thread, count;
  for (int shift = kDigitBits;; shift += kDigitBits) {
    shared.sorted[rank] = expert;
    __syncthreads();
    expert = shared.sorted[thread];
    count = shared.count[expert];
    if (shift > 30 || most >> shift == 0) break;
    rank = rank_by_digit(count >> shift & (kDigits - 1), shared);
  }
  const int pieces = ceil_div(count, p.tile_tokens), start = shared.start[expert];
  const int size = pieces > 1 ? round_up(ceil_div(count, pieces), 8) : count;
  int tile = warp_scan(pieces);
  if (lane == 31) shared.warp_pieces[warp] = tile + pieces;
  __syncthreads();
  tile += sum_before(shared.warp_pieces);
  auto write = [&](int of_expert, int of_start, int of_count, int of_size, int of_tile, int piece) {
    const int done = piece * of_size;
    write_tile(p, of_tile + piece, of_expert, of_start + done, min(of_size, of_count - done));
  };
  for (int piece = 0; piece < min(pieces, kOwnPieces); ++piece) write(expert, start, count, size, tile, piece);
  // Crowded experts: the warp writes their other tiles together, so that one expert is no long loop.
  for (unsigned crowded = __ballot_sync(kFullWarp, pieces > kOwnPieces); crowded != 0; crowded &= crowded - 1) {
    auto of = [&](int value) { return __shfl_sync(kFullWarp, value, __ffs(crowded) - 1); };
    const int of_expert = of(expert), of_start = of(start), of_count = of(count), of_size = of(size);
    const int of_tile = of(tile), of_pieces = of(pieces);
    for (int piece = kOwnPieces + lane; piece < of_pieces; piece += 32) {
      write(of_expert, of_start, of_count, of_size, of_tile, piece);
    }
  }
}

template <int kRounds>
__device__ __forceinline__ void make_tiles(const DispatchParams& p, unsigned char* memory) {
  TileShared& shared = *reinterpret_cast<TileShared*>(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  shared.count[thread] = 0;
  shared.lanes[warp][lane] = 0;
  __syncthreads();
  ptx::pdl_wait();

  if (p.clear != nullptr) {
#pragma unroll 1
    for (int i = thread; i < p.num_clear; i += kDispatchThreads) p.clear[i] = 0;
  }
  int count = 0;
  if (p.chunks == 1) {
    count_chunk<kRounds>(p, 0, shared.count);
    __syncthreads();
    count = shared.count[thread];
  } else {
    if (thread < p.experts) {
#pragma unroll 8
      for (int c = 0; c < p.chunks; ++c) count += p.chunk_counts[static_cast<int64_t>(c) * p.experts + thread];
    }
    shared.count[thread] = count;
  }

  ptx::pdl_trigger();

  // ---- where an expert's pairs start; its rank by the load's lowest digit ----
  int start = warp_scan(count);
  const int warp_most = __reduce_max_sync(kFullWarp, count);
  const int pieces = count <= p.tile_tokens ? count > 0 : ceil_div(count, p.tile_tokens);
  const int warp_pieces = __reduce_add_sync(kFullWarp, pieces);
  if (lane == 31) {
    shared.warp_total[warp] = start + count;
    shared.warp_most[warp] = warp_most;
    shared.warp_pieces[warp] = warp_pieces;
  }
  const int rank = rank_by_digit(count % kDigits, shared);
  start += sum_before(shared.warp_total);
  const int most = __reduce_max_sync(kFullWarp, shared.warp_most[lane]);
  const int tiles = __reduce_add_sync(kFullWarp, shared.warp_pieces[lane]);

  if (most < kDigits && most <= p.tile_tokens) {  // a tile an expert, and the rank is its place
    if (count > 0) write_tile(p, rank, thread, start, count);
  } else {
    shared.start[thread] = start;
    write_sorted_tiles(p, rank, most, shared);
  }
  if (thread == 0) *p.num_tiles = tiles;
  const int64_t end = static_cast<int64_t>(p.max_tiles) * 3;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(tiles) * 3 + thread; i < end; i += kDispatchThreads) p.tiles[i] = -1;
}

// ---- kernels ----

// Counts of each chunk, by expert and by 32 of them, when there are several.
__global__ void __launch_bounds__(kDispatchThreads) count_chunks_kernel(const __grid_constant__ DispatchParams p) {
  __shared__ int32_t counts[kMaxExperts];
  const int thread = threadIdx.x;
  counts[thread] = 0;
  __syncthreads();
  ptx::pdl_wait();
  count_chunk<kMaxRounds>(p, blockIdx.x * (kMaxRounds * kDispatchThreads), counts);
  ptx::pdl_trigger();
  __syncthreads();
  const int count = counts[thread], group = __reduce_add_sync(kFullWarp, count);
  if (thread < p.experts) {
    p.chunk_counts[static_cast<int64_t>(blockIdx.x) * p.experts + thread] = static_cast<uint16_t>(count);
  }
  if (thread % 32 == 0) p.group_counts[blockIdx.x * kDispatchWarps + thread / 32] = group;
}

template <int kRounds>
__global__ void __launch_bounds__(kDispatchThreads) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  if (blockIdx.x == 0) {
    if (blockIdx.y == 0) make_tiles<kRounds>(p, memory);
  } else {
    sort_slice<kRounds>(p, memory);
  }
}

}  // namespace kimi::routing
