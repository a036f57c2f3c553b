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
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_in(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
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
  uint32_t empty;  // [kStages] barriers: the consumer warps are done
  int stage = 0;   // the next block to be filled (producer) or read
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Config::kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ uint32_t at(int index) const { return stages + index * Config::kStageBytes; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * stage, phase); }
  __device__ __forceinline__ void release(int index, int lane) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * index);
  }
};

template <class Config>
__device__ __forceinline__ void produce(const GemmParams& p, Pipeline<Config> pipe) {
  const int items = *p.work.num_tiles * p.row_tiles;
  const int64_t tile_bytes = Config::kHeaderBytes + int64_t(p.k_blocks) * Config::kBlockBytes;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Piece tile = load_tile(p.work, item / p.row_tiles);
    const int row_tile = item % p.row_tiles;
    for (int row = 0; row < tile.count; row += Config::kMaxRows) {
      const Piece piece = tile.part(row, Config::kMaxRows);
      const uint8_t* weights = p.weights + (int64_t(piece.expert) * p.row_tiles + row_tile) * tile_bytes;
      const int padded = round_up(piece.count, 8);
      const uint8_t* blob = p.blobs + int64_t(piece.padded_row) * p.k_blocks * Config::kRowPitch;
      const uint32_t blob_bytes = padded * Config::kRowBytes;
#pragma unroll 1
      for (int k = 0; k < p.k_blocks; ++k) {
        barrier_wait(pipe.empty + 8 * pipe.stage, pipe.phase ^ 1);
        const uint32_t full = pipe.full + 8 * pipe.stage, stage = pipe.at(pipe.stage);
        const int header = k == 0 ? Config::kHeaderBytes : 0;
        barrier_expect(full, blob_bytes + Config::kBlockBytes + header);
        copy_in(stage + Config::kWeightOffset + Config::kHeaderBytes - header, weights, Config::kBlockBytes + header,
                full);
        copy_in(stage, blob, blob_bytes, full);
        weights += Config::kBlockBytes + header;
        blob += padded * Config::kRowPitch;
        pipe.advance();
      }
    }
  }
}

}  // namespace kimi::moe
