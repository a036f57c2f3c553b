// From expert ids to the work list of the grouped GEMMs: a stable counting sort, and tiles with the fullest experts
// first.
//
// Pairs are cut into chunks of 8192, one block each. A warp walks its share (at most 256) in order; lanes with the same
// expert find each other with match.any, so a pair's rank among the warp's pairs of its expert is known in one pass.
// Prefix sums over warps, chunks and experts then give its place. With one chunk (512 tokens at k = 16) that is one
// launch; more chunks are counted by a launch before. One block beside the chunks sorts the experts by load and writes
// the tiles.
#pragma once

#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "dispatch_config.h"

namespace kimi::routing {

// Where a warp's pairs of each expert start; uint16 [warps][pitch].
__device__ __forceinline__ uint16_t* warp_counters(DispatchShared& shared) {
  return reinterpret_cast<uint16_t*>(&shared + 1);
}

__device__ __forceinline__ int counter_pitch(const DispatchParams& p) { return round_up(p.experts, 8); }

__device__ __forceinline__ int64_t live_pairs(const DispatchParams& p) {
  return live_tokens(p.num_tokens, p.tokens) * p.k;
}

// Rounds of 32 pairs that each warp walks, from the slots of a chunk: few pairs are spread over 16 warps first.
__device__ __forceinline__ int warp_rounds(const DispatchParams& p) {
  const int64_t slots = p.tokens * p.k;
  return slots >= kChunkPairs / 2 ? kDispatchRounds : static_cast<int>(slots / (kChunkPairs / 2 / kDispatchRounds)) + 1;
}

// Warps that have pairs in this chunk.
__device__ __forceinline__ int busy_warps(const DispatchParams& p, int64_t pairs) {
  const int warps = static_cast<int>(ceil_div<int64_t>(pairs < kChunkPairs ? pairs : kChunkPairs, 32 * warp_rounds(p)));
  return warps > 0 ? warps : 0;
}

__device__ __forceinline__ void clear_counters(const DispatchParams& p, DispatchShared& shared) {
  uint4* words = reinterpret_cast<uint4*>(warp_counters(shared));
  const int count = busy_warps(p, p.tokens * p.k) * counter_pitch(p) / 8;
  for (int i = threadIdx.x; i < count; i += kDispatchThreads) words[i] = make_uint4(0, 0, 0, 0);
}

// This thread's experts (-1: takes no part) and their ranks among the warp's pairs of the same expert; fills counters.
__device__ __forceinline__ void rank_pairs(const DispatchParams& p, int64_t begin, int64_t end,
                                           int (&expert)[kDispatchRounds], int (&rank)[kDispatchRounds],
                                           DispatchShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rounds = warp_rounds(p);
  const int64_t start = begin + warp * rounds * 32;
#pragma unroll
  for (int r = 0; r < kDispatchRounds; ++r) {
    const int64_t pair = start + r * 32 + lane;
    expert[r] = r < rounds && pair < end ? p.ids[pair] - p.first : -1;
    if (expert[r] >= p.experts || expert[r] < 0) expert[r] = -1;
  }
  if (start >= end) return;
  uint16_t* mine = warp_counters(shared) + warp * counter_pitch(p);
#pragma unroll
  for (int r = 0; r < kDispatchRounds; ++r) {
    if (r >= rounds || start + r * 32 >= end) break;
    const unsigned same = __match_any_sync(kFullWarp, expert[r]);
    const int before = expert[r] >= 0 ? mine[expert[r]] : 0;
    const int among = __popc(same & ((1u << lane) - 1));
    rank[r] = before + among;
    __syncwarp();
    if (expert[r] >= 0 && among == 0) mine[expert[r]] = static_cast<uint16_t>(before + __popc(same));
    __syncwarp();
  }
}

// Turns the counters of one expert (a thread each) into starts within the chunk; returns the chunk's count.
__device__ __forceinline__ int scan_warps(const DispatchParams& p, DispatchShared& shared, int warps) {
  const int expert = threadIdx.x;
  if (expert >= p.experts) return 0;
  uint16_t* column = warp_counters(shared) + expert;
  const int pitch = counter_pitch(p);
  int sum = 0;
#pragma unroll 8
  for (int w = 0; w < warps; ++w) {
    const int count = column[w * pitch];
    column[w * pitch] = static_cast<uint16_t>(sum);
    sum += count;
  }
  return sum;
}

// Exclusive prefix sum over the block's threads; shared.total is the sum. Two block barriers.
__device__ __forceinline__ int scan_block(int value, DispatchShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) shared.warp_total[warp] = inclusive;
  __syncthreads();
  int warps = shared.warp_total[lane];
  const int own = warps;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kFullWarp, warps, offset);
    if (lane >= offset) warps += other;
  }
  const int before = __shfl_sync(kFullWarp, warps - own, warp);
  if (threadIdx.x == 31) shared.total = warps;
  __syncthreads();
  return before + inclusive - value;
}

// Pairs of this thread's expert in all chunks, and in the chunks before `chunk`. With one chunk: its own counters.
__device__ __forceinline__ void count_expert(const DispatchParams& p, int chunk, int& all, int& before) {
  all = before = 0;
  if (static_cast<int>(threadIdx.x) >= p.experts) return;
#pragma unroll 8
  for (int c = 0; c < p.chunks; ++c) {
    const int count = p.chunk_counts[static_cast<int64_t>(c) * p.experts + threadIdx.x];
    all += count;
    before += c < chunk ? count : 0;
  }
}

// Sorts one key a thread, largest first, over the first `count` (a power of two) threads. Partners of one warp
// exchange by shuffle, others through two sets of `scratch` in turn: one block barrier a step.
__device__ __forceinline__ uint32_t bitonic_sort(uint32_t key, int count, uint32_t* scratch) {
  const int thread = threadIdx.x;
  int set = 0;
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      uint32_t other;
      if (stride < 32) {
        other = __shfl_xor_sync(kFullWarp, key, stride);
      } else {
        scratch[set * kMaxExperts + thread] = key;
        __syncthreads();
        other = scratch[set * kMaxExperts + (thread ^ stride)];
        set ^= 1;
      }
      const bool keep_larger = ((thread & size) == 0) == ((thread & stride) == 0);
      if (thread < count) key = keep_larger ? max(key, other) : min(key, other);
    }
  }
  return key;
}

// Tiles of all experts from their counts (a thread each) and starts: fullest expert first, ties to the lower expert.
__device__ __forceinline__ void write_tiles(const DispatchParams& p, int count, int start, DispatchShared& shared) {
  uint32_t* keys = reinterpret_cast<uint32_t*>(&shared + 1);
  const int thread = threadIdx.x, lane = thread % 32;
  __syncthreads();  // the counters' space is taken over
  if (thread < p.experts) shared.base[thread] = start, shared.count[thread] = count;
  const int place = scan_block(count > 0 ? 1 : 0, shared);
  const int used = shared.total;
  int slots = 1;
  while (slots < used) slots *= 2;
  // Load above expert in one word; loads that do not fit are all "most".
  const uint32_t load = min(static_cast<uint32_t>(count), 0xffffffffu / kMaxExperts);
  keys[thread] = 0;
  __syncthreads();
  if (count > 0) keys[place] = load * kMaxExperts + (kMaxExperts - 1 - thread);
  __syncthreads();
  const uint32_t key = keys[thread];
  __syncthreads();
  const uint32_t sorted = bitonic_sort(key, slots, keys);
  const int expert = kMaxExperts - 1 - static_cast<int>(sorted % kMaxExperts);
  const int tokens = sorted > 0 ? shared.count[expert] : 0;
  const int pieces = ceil_div(tokens, p.tile_tokens);
  const int size = pieces > 0 ? round_up(ceil_div(tokens, pieces), 8) : 0;
  const int first_tile = scan_block(pieces, shared);
  const int num_tiles = shared.total;
  auto write = [&](int of_expert, int of_tokens, int of_size, int of_tile, int piece) {
    int32_t* row = p.tiles + static_cast<int64_t>(of_tile + piece) * 3;
    row[0] = of_expert;
    row[1] = shared.base[of_expert] + piece * of_size;
    row[2] = min(of_size, of_tokens - piece * of_size);
  };
  for (int piece = 0; piece < min(pieces, kOwnPieces); ++piece) write(expert, tokens, size, first_tile, piece);
  // Crowded experts: the warp writes their other tiles together, so that one expert is no long loop.
  for (unsigned crowded = __ballot_sync(kFullWarp, pieces > kOwnPieces); crowded != 0; crowded &= crowded - 1) {
    const int source = __ffs(crowded) - 1;
    const int of_expert = __shfl_sync(kFullWarp, expert, source), of_tokens = __shfl_sync(kFullWarp, tokens, source);
    const int of_size = __shfl_sync(kFullWarp, size, source), of_tile = __shfl_sync(kFullWarp, first_tile, source);
    const int of_pieces = __shfl_sync(kFullWarp, pieces, source);
    for (int piece = kOwnPieces + lane; piece < of_pieces; piece += 32) {
      write(of_expert, of_tokens, of_size, of_tile, piece);
    }
  }
  for (int64_t i = static_cast<int64_t>(num_tiles) * 3 + thread; i < static_cast<int64_t>(p.max_tiles) * 3;
       i += kDispatchThreads) {
    p.tiles[i] = -1;
  }
  if (thread == 0) *p.num_tiles = num_tiles;
  if (p.clear != nullptr) {
    for (int i = thread; i < p.num_clear; i += kDispatchThreads) p.clear[i] = 0;
  }
}

// Counts of each chunk, when there are several.
__global__ void __launch_bounds__(kDispatchThreads) count_chunks_kernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  DispatchShared& shared = *reinterpret_cast<DispatchShared*>(memory);
  clear_counters(p, shared);
  __syncthreads();
  ptx::pdl_wait();

  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunkPairs;
  const int64_t live = live_pairs(p), end = begin + kChunkPairs < live ? begin + kChunkPairs : live;
  int expert[kDispatchRounds], rank[kDispatchRounds];
  rank_pairs(p, begin, end, expert, rank, shared);
  __syncthreads();
  const int count = scan_warps(p, shared, busy_warps(p, end - begin));
  if (static_cast<int>(threadIdx.x) < p.experts) {
    p.chunk_counts[static_cast<int64_t>(blockIdx.x) * p.experts + threadIdx.x] = static_cast<uint16_t>(count);
  }
  ptx::pdl_trigger();
}

// Blocks 0 .. chunks-1 place their pairs; block `chunks` writes the tiles.
__global__ void __launch_bounds__(kDispatchThreads) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  DispatchShared& shared = *reinterpret_cast<DispatchShared*>(memory);
  clear_counters(p, shared);
  __syncthreads();
  ptx::pdl_wait();

  const bool tiles = static_cast<int>(blockIdx.x) == p.chunks;
  const int chunk = blockIdx.x;
  const int64_t live = live_pairs(p);
  // The tile block of a single chunk counts that chunk again: cheaper than waiting for the other block.
  const int64_t begin = tiles ? 0 : static_cast<int64_t>(chunk) * kChunkPairs;
  const int64_t end = begin + kChunkPairs < live ? begin + kChunkPairs : live;
  int expert[kDispatchRounds], rank[kDispatchRounds];
  int all = 0, before = 0;
  if (!tiles || p.chunks == 1) {
    rank_pairs(p, begin, end, expert, rank, shared);
    __syncthreads();
    all = scan_warps(p, shared, busy_warps(p, end - begin));
  }
  if (p.chunks > 1) count_expert(p, chunk, all, before);
  const int start = scan_block(all, shared);
  const int total = shared.total;
  if (tiles) {
    write_tiles(p, all, start, shared);
    ptx::pdl_trigger();
    return;
  }

  const int thread = threadIdx.x;
  if (thread < p.experts) {
    shared.base[thread] = start + before;
    if (chunk == 0) p.counts[thread] = all, p.offsets[thread] = start;
  }
  if (chunk == 0 && thread == 0) p.offsets[p.experts] = total;
  __syncthreads();
  const int warp = thread / 32, lane = thread % 32;
  const uint16_t* mine = warp_counters(shared) + warp * counter_pitch(p);
  const int64_t first_pair = begin + warp * warp_rounds(p) * 32 + lane;
#pragma unroll
  for (int r = 0; r < kDispatchRounds; ++r) {
    const int64_t pair = first_pair + r * 32;
    if (expert[r] >= 0) {
      p.pairs[shared.base[expert[r]] + mine[expert[r]] + rank[r]] = static_cast<int32_t>(pair);
    }
  }
  const int64_t slots = p.tokens * p.k;
  for (int64_t i = total + static_cast<int64_t>(chunk) * kDispatchThreads + thread; i < slots;
       i += static_cast<int64_t>(p.chunks) * kDispatchThreads) {
    p.pairs[i] = -1;
  }
  ptx::pdl_trigger();
}

}  // namespace kimi::routing
