// The ring of shared-memory stages between the producer thread and the consumer warps. Shared memory is named by 32-bit
// addresses here: generic pointers would be turned back into addresses in every block.
#pragma once

#include "../common/ptx.cuh"
#include "sm90_config.h"
#include "work.cuh"

namespace kimi::moe {

__device__ __forceinline__ uint32_t load_shared_32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_shared_64(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ uint4 load_shared_128(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
  const uint2 v = load_shared_64(address);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}\n" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the same barrier of CTA `rank` of the cluster. No fence: what follows it there is a copy into memory that this
// side has only read (.release.cluster would fence the whole GPU's memory, in every block).
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_in(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Into the same place of every CTA of the mask, counted on each one's barrier.
__device__ __forceinline__ void copy_in_all(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                            uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(mask)
      : "memory");
}

// The consumer warpgroups' turns at the tensor cores: `slab` waits for its turn, and passes it on once its products are
// issued.
template <class Config>
__device__ __forceinline__ void take_turn(int slab) {
  if constexpr (Config::kTakeTurns) ptx::named_barrier_sync(kTurnBarrier + slab, kConsumerThreads);
}
template <class Config>
__device__ __forceinline__ void pass_turn(int slab) {
  if constexpr (Config::kTakeTurns) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kTurnBarrier + 1 - slab), "n"(kConsumerThreads) : "memory");
  }
}

// Where a CTA's next block comes from: both sides walk the stages in step.
template <class Config>
struct Pipeline {
  uint32_t stages;
  uint32_t full;   // [kStages] barriers: bytes have landed
  uint32_t empty;  // [kStages] barriers: the consumer warps, of all CTAs that share activations, are done
  int stage = 0;   // the next block to be filled (producer) or read
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Config::kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ uint32_t at(int index) const { return stages + index * Config::kStageBytes; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * stage, phase); }
  __device__ __forceinline__ void release(int index, int lane) const {
    __syncwarp();
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty + 8 * index);
    } else {
      if (lane < Config::kCluster) barrier_arrive_at(empty + 8 * index, lane);
    }
  }
};

// Items: tiles of the work list x groups of kCluster row tiles. The CTAs of a cluster take neighbouring row tiles of
// the same rows and share their activations.
template <class Config>
struct Schedule {
  int groups, rank;
  int first, stride, items;

  __device__ __forceinline__ explicit Schedule(const GemmParams& p)
      : groups(ceil_div(p.row_tiles, Config::kCluster)),
        rank(Config::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_rank())),
        first(blockIdx.x / Config::kCluster),
        stride(gridDim.x / Config::kCluster),
        items(__ldcg(p.work.num_tiles) * groups) {}
  // May be one past the last: such a CTA keeps its cluster's copies going, and stores nothing.
  __device__ __forceinline__ int row_tile(int item) const { return item % groups * Config::kCluster + rank; }
};

// Fills the stages. The weights of the first ones are asked for before the kernel waits for its predecessor: nobody
// writes them, and the work list is older (a predecessor lets this kernel start only after its own wait).
template <class Config>
__device__ __forceinline__ void produce(const GemmParams& p, Pipeline<Config> pipe) {
  const Schedule<Config> schedule(p);
  const int64_t tile_bytes = Config::kHeaderBytes + int64_t(p.k_blocks) * Config::kBlockBytes;
  auto weights_of = [&](const Piece& piece, int item) {
    const int row_tile = min(schedule.row_tile(item), p.row_tiles - 1);
    return p.weights + (int64_t(piece.expert) * p.row_tiles + row_tile) * tile_bytes;
  };
  // Arms a stage for block k of a piece and starts the copy of its weights.
  auto begin = [&](int at, const uint8_t*& weights, int padded, int k) {
    const uint32_t full = pipe.full + 8 * at;
    const int header = k == 0 ? Config::kHeaderBytes : 0;
    const int scales = Config::kFp8 && k == p.k_blocks - 1 ? 4 * padded : 0;
    barrier_expect(full, padded * Config::kRowBytes + Config::kBlockBytes + header + scales);
    copy_in(pipe.at(at) + Config::kWeightOffset + Config::kHeaderBytes - header, weights, Config::kBlockBytes + header,
            full);
    weights += Config::kBlockBytes + header;
  };

  int begun = 0;  // stages
  if (schedule.first < schedule.items) {
    const Piece piece = load_tile<true>(p.work, schedule.first / schedule.groups).part(0, Config::kMaxRows);
    const uint8_t* weights = weights_of(piece, schedule.first);
    for (; begun < min(Config::kStages, p.k_blocks); ++begun) begin(begun, weights, round_up(piece.count, 8), begun);
  }
  ptx::pdl_wait();
  for (int item = schedule.first; item < schedule.items; item += schedule.stride) {
    const Piece tile = load_tile<true>(p.work, item / schedule.groups);
    for (int row = 0; row < tile.count; row += Config::kMaxRows) {
      const Piece piece = tile.part(row, Config::kMaxRows);
      const int padded = round_up(piece.count, 8);
      const uint8_t* weights = weights_of(piece, item);
      weights += begun > 0 ? Config::kHeaderBytes + int64_t(begun) * Config::kBlockBytes : 0;
      const uint32_t blob_bytes = padded * Config::kRowBytes;
      const uint8_t* blob = p.blobs + int64_t(piece.padded_row) * p.k_blocks * Config::kRowBytes;
#pragma unroll 1
      for (int k = 0; k < p.k_blocks; ++k) {
        if (begun > 0) {
          --begun;
        } else {
          barrier_wait(pipe.empty + 8 * pipe.stage, pipe.phase ^ 1);
          begin(pipe.stage, weights, padded, k);
        }
        const uint32_t full = pipe.full + 8 * pipe.stage, stage = pipe.at(pipe.stage);
        if (Config::kFp8 && k == p.k_blocks - 1) {
          copy_in(stage + Config::kScaleOffset, p.scales + piece.padded_row, 4 * padded, full);
        }
        if constexpr (Config::kCluster == 1) {
          copy_in(stage, blob, blob_bytes, full);
        } else {  // this CTA's share, for all
          const uint32_t share = blob_bytes / Config::kCluster, offset = schedule.rank * share;
          copy_in_all(stage + offset, blob + offset, share, full, (1 << Config::kCluster) - 1);
        }
        blob += blob_bytes;
        pipe.advance();
      }
    }
  }
}

}  // namespace kimi::moe
