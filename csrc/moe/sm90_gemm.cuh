// The grouped GEMM of the experts on sm_90a, weights as the M operand.
//
// One producer thread keeps a ring of stages full: a block of packed weights and the matching activations, two contiguous
// bulk copies. Two warpgroups own 64 weight rows each: they turn packed weights into A registers, multiply with the
// activations in shared memory, and add each block's accumulators, times the activation scales, to fp32 sums. While the tensor
// cores work on block k, the weights of block k + 1 are decoded. A persistent grid walks (piece, row tile) in order.
//
// The order of K, the promotions and the scale groups are the same for every N: a row's result does not depend on its piece.
#pragma once

#include "../common/ptx.cuh"
#include "sm90_config.h"
#include "sm90_epilogue.cuh"
#include "sm90_fragment.cuh"
#include "sm90_wgmma.cuh"
#include "work.cuh"

namespace kimi::moe {

template <class Config>
struct Pipeline {
  uint8_t* stages;
  uint64_t* full;   // bytes have landed
  uint64_t* empty;  // all consumer warps are done
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Config::kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ uint8_t* at(int index) const { return stages + index * Config::kStageBytes; }
};

template <class Config>
__device__ __forceinline__ void produce(const GemmParams& p, Pipeline<Config> pipe, int items) {
  const int64_t tile_bytes = Config::kHeaderBytes + int64_t(p.k_blocks) * Config::kBlockBytes;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Piece tile = load_tile(p.work, item / p.row_tiles);
    for (int row = 0; row < tile.count; row += Config::kMaxRows) {
      const Piece piece = tile.part(row, Config::kMaxRows);
      const uint8_t* weights = p.weights + (int64_t(piece.expert) * p.row_tiles + item % p.row_tiles) * tile_bytes;
      const uint8_t* blob = p.blobs + int64_t(piece.padded_row) * p.k_blocks * Config::kRowBytes;
      const uint32_t blob_bytes = round_up(piece.count, 8) * Config::kRowBytes;
#pragma unroll 1
      for (int k = 0; k < p.k_blocks; ++k) {
        ptx::mbarrier_wait(pipe.empty + pipe.stage, pipe.phase ^ 1);
        uint64_t* full = pipe.full + pipe.stage;
        uint8_t* stage = pipe.at(pipe.stage);
        const int header = k == 0 ? Config::kHeaderBytes : 0;
        ptx::mbarrier_arrive_expect_tx(full, blob_bytes + Config::kBlockBytes + header);
        ptx::bulk_load(stage + Config::kWeightOffset + Config::kHeaderBytes - header, weights,
                       Config::kBlockBytes + header, full);
        ptx::bulk_load(stage, blob, blob_bytes, full);
        weights += Config::kBlockBytes + header;
        blob += blob_bytes;
        pipe.advance();
      }
    }
  }
}

// sums += part * scale[column] (* the weights' block scales)
template <class Config, int kN>
__device__ __forceinline__ void promote(float (&sums)[kN / 2], float (&part)[kN / 2], const float* scales, int quad,
                                        float block_top, float block_bottom) {
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    float2 s = make_float2(1.f, 1.f);
    if constexpr (Config::kFp8) s = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * quad);
    if constexpr (Config::kFormat == WeightFormat::kFp8) {
      sums[4 * j] = fmaf(part[4 * j], s.x * block_top, sums[4 * j]);
      sums[4 * j + 1] = fmaf(part[4 * j + 1], s.y * block_top, sums[4 * j + 1]);
      sums[4 * j + 2] = fmaf(part[4 * j + 2], s.x * block_bottom, sums[4 * j + 2]);
      sums[4 * j + 3] = fmaf(part[4 * j + 3], s.y * block_bottom, sums[4 * j + 3]);
    } else {
      sums[4 * j] = fmaf(part[4 * j], s.x, sums[4 * j]);
      sums[4 * j + 1] = fmaf(part[4 * j + 1], s.y, sums[4 * j + 1]);
      sums[4 * j + 2] = fmaf(part[4 * j + 2], s.x, sums[4 * j + 2]);
      sums[4 * j + 3] = fmaf(part[4 * j + 3], s.y, sums[4 * j + 3]);
    }
  }
}

// Issues the products of steps kFirst..kLast-1 of a block (FP8: 4 steps, BF16: 8). `fresh`: start from zero.
template <class Config, int kN, int kFirst, int kLast, int kRegisters>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const uint32_t (&a)[kRegisters], uint32_t activations,
                                         int padded, bool fresh) {
#pragma unroll
  for (int s = kFirst; s < kLast; ++s) {
    const int accumulate = s > kFirst || !fresh;
    const uint32_t* fragment = a + 4 * (s - kFirst);
    if constexpr (Config::kFp8) {
      WgmmaFp8<kN>::mma(d, fragment, swizzled_descriptor(activations + 32 * s), accumulate);
    } else {
      const uint32_t half = activations + (s >= 4 ? padded * 128 : 0);
      WgmmaBf16<kN>::mma(d, fragment, swizzled_descriptor(half + 32 * (s % 4)), accumulate);
    }
  }
}

template <class Config>
__device__ __forceinline__ void load_fragment(uint32_t (&a)[kFragmentRegisters<Config::kActivation>],
                                              const uint8_t* weights, const uint2* table, const FragmentPlace& place) {
  if constexpr (Config::kFormat == WeightFormat::kMxfp4) {
    load_mxfp4<Config::kActivation>(a, weights, table, place);
  } else {
    load_fp8<Config::kActivation>(a, weights, place);
  }
}

// One block: multiply with `current`, decode the next block's weights into `next` meanwhile (afterwards, where registers are
// too few for both), promote, free the stage.
template <class Config, int kN>
__device__ __forceinline__ void block_step(Pipeline<Config>& pipe, const uint2* table, const FragmentPlace& place,
                                           float (&sums)[kN / 2], int padded, bool first, bool last,
                                           const uint32_t (&current)[kFragmentRegisters<Config::kActivation>],
                                           uint32_t (&next)[kFragmentRegisters<Config::kActivation>]) {
  constexpr int kSteps = Config::kFp8 ? 4 : 8;
  constexpr bool kSplit = Config::kPromotions == 2;         // the halves of the block have scales of their own
  constexpr bool kBoth = kSplit && kN <= 24;                // both halves in flight at once
  constexpr bool kAhead = kN <= Config::kDecodeAheadRows;
  const int stage = pipe.stage;
  uint8_t* base = pipe.at(stage);
  const uint32_t activations = ptx::smem_address(base);
  const float* scales = reinterpret_cast<const float*>(base + padded * kBlockColumns);
  float block_top = 1.f, block_bottom = 1.f;
  if constexpr (Config::kFormat == WeightFormat::kFp8) {
    const float2 both =
        *reinterpret_cast<const float2*>(base + Config::kWeightOffset + kTileRows * kBlockColumns);
    block_top = both.x, block_bottom = both.y;
  }
  pipe.advance();
  auto fetch_next = [&] {
    if (last) return;
    ptx::mbarrier_wait(pipe.full + pipe.stage, pipe.phase);
    load_fragment<Config>(next, pipe.at(pipe.stage) + Config::kWeightOffset + Config::kHeaderBytes, table, place);
  };

  if constexpr (Config::kPromotions == 0) {
    pin(sums);
    wgmma_fence();
    multiply<Config, kN, 0, kSteps>(sums, current, activations, padded, first);
    wgmma_commit();
    if constexpr (kAhead) fetch_next();
    wgmma_wait<0>();
    pin(sums);
  } else if constexpr (!kSplit) {
    float part[kN / 2];
    wgmma_fence();
    multiply<Config, kN, 0, kSteps>(part, current, activations, padded, true);
    wgmma_commit();
    if constexpr (kAhead) fetch_next();
    wgmma_wait<0>();
    pin(part);
    promote<Config, kN>(sums, part, scales, place.quad(), block_top, block_bottom);
  } else if constexpr (kBoth) {
    float part[2][kN / 2];
    wgmma_fence();
    multiply<Config, kN, 0, 2>(part[0], reinterpret_cast<const uint32_t(&)[8]>(current[0]), activations, padded, true);
    multiply<Config, kN, 2, 4>(part[1], reinterpret_cast<const uint32_t(&)[8]>(current[8]), activations, padded, true);
    wgmma_commit();
    if constexpr (kAhead) fetch_next();
    wgmma_wait<0>();
    pin(part[0]);
    pin(part[1]);
    promote<Config, kN>(sums, part[0], scales, place.quad(), block_top, block_bottom);
    promote<Config, kN>(sums, part[1], scales + padded, place.quad(), block_top, block_bottom);
  } else {
    float part[kN / 2];
    wgmma_fence();
    multiply<Config, kN, 0, 2>(part, reinterpret_cast<const uint32_t(&)[8]>(current[0]), activations, padded, true);
    wgmma_commit();
    if constexpr (kAhead) fetch_next();
    wgmma_wait<0>();
    pin(part);
    promote<Config, kN>(sums, part, scales, place.quad(), block_top, block_bottom);
    wgmma_fence();
    multiply<Config, kN, 2, 4>(part, reinterpret_cast<const uint32_t(&)[8]>(current[8]), activations, padded, true);
    wgmma_commit();
    wgmma_wait<0>();
    pin(part);
    promote<Config, kN>(sums, part, scales + padded, place.quad(), block_top, block_bottom);
  }
  __syncwarp();
  if (place.lane == 0) ptx::mbarrier_arrive(pipe.empty + stage);
  if constexpr (!kAhead) fetch_next();
}

// A tile whose E8M0 scales spread over more than 14 binades: every scale group of 32 columns is multiplied alone, unscaled, and
// promoted with its own scale. Four times the products; exact.
template <class Config, int kN>
__device__ __forceinline__ void wide_tile(Pipeline<Config>& pipe, const uint2* table, const FragmentPlace& place,
                                       float (&sums)[kN / 2], int padded, int k_blocks) {
  constexpr int kHalfSteps = Config::kFp8 ? 2 : 4;
  for (int k = 0; k < k_blocks; ++k) {
    if (k > 0) ptx::mbarrier_wait(pipe.full + pipe.stage, pipe.phase);
    uint8_t* base = pipe.at(pipe.stage);
    const uint8_t* weights = base + Config::kWeightOffset + Config::kHeaderBytes;
    const uint32_t* scale_words = reinterpret_cast<const uint32_t*>(weights + kTileRows * kBlockColumns / 2);
    const float* scales = reinterpret_cast<const float*>(base + padded * kBlockColumns);
    const uint32_t activations = ptx::smem_address(base);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll 1
      for (int group = 0; group < 2; ++group) {
        uint32_t a[kFragmentRegisters<Config::kActivation> / 2];
        load_mxfp4_group<Config::kActivation>(a, weights, table, place, q, group);
        const uint32_t word = scale_words[place.scale_word(group)];
        const float top = exponent_value((word >> (8 * q)) & 0xff), bottom = exponent_value((word >> (16 + 8 * q)) & 0xff);
        float part[kN / 2];
        wgmma_fence();
        if (q == 0) {
          multiply<Config, kN, 0, kHalfSteps>(part, a, activations, padded, true);
        } else {
          multiply<Config, kN, kHalfSteps, 2 * kHalfSteps>(part, a, activations, padded, true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(part);
        const float* column_scales = scales + (Config::kPromotions == 2 ? q * padded : 0);
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          float s = i & 2 ? bottom : top;
          if constexpr (Config::kFp8) s *= column_scales[8 * (i / 4) + 2 * place.quad() + (i & 1)];
          sums[i] = fmaf(part[i], s, sums[i]);
        }
      }
    }
    __syncwarp();
    if (place.lane == 0) ptx::mbarrier_arrive(pipe.empty + pipe.stage);
    pipe.advance();
  }
}

template <class Config, int kN>
__device__ __forceinline__ void consume_tile(const GemmParams& p, Pipeline<Config>& pipe, const uint2* table,
                                             uint8_t* epilogue, const FragmentPlace& place, const Piece& piece,
                                             int tile) {
  float sums[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) sums[i] = 0.f;
  const int padded = round_up(piece.count, 8);
  float scale_top = 1.f, scale_bottom = 1.f;
  bool wide = false;

  ptx::mbarrier_wait(pipe.full + pipe.stage, pipe.phase);
  const uint8_t* weights = pipe.at(pipe.stage) + Config::kWeightOffset;
  if constexpr (Config::kFormat == WeightFormat::kMxfp4) {
    const uint8_t* bases = weights + place.slab * 64 + place.warp * 16 + place.group();
    wide = weights[kTileRows] != 0;
    if (!wide) {
      scale_top = exponent_value(bases[0] + kRemainderBias<Config::kActivation>);
      scale_bottom = exponent_value(bases[8] + kRemainderBias<Config::kActivation>);
    }
  }
  if (Config::kFormat == WeightFormat::kMxfp4 && wide) {
    wide_tile<Config, kN>(pipe, table, place, sums, padded, p.k_blocks);
  } else {
    uint32_t a[kFragmentRegisters<Config::kActivation>];
    load_fragment<Config>(a, weights + Config::kHeaderBytes, table, place);
    if constexpr (kN <= Config::kDecodeAheadRows) {
      uint32_t b[kFragmentRegisters<Config::kActivation>];
      for (int k = 0; k < p.k_blocks; k += 2) {
        block_step<Config, kN>(pipe, table, place, sums, padded, k == 0, k + 1 == p.k_blocks, a, b);
        if (k + 1 == p.k_blocks) break;
        block_step<Config, kN>(pipe, table, place, sums, padded, false, k + 2 == p.k_blocks, b, a);
      }
    } else {
      for (int k = 0; k < p.k_blocks; ++k) {
        block_step<Config, kN>(pipe, table, place, sums, padded, k == 0, k + 1 == p.k_blocks, a, a);
      }
    }
  }
  if constexpr (Config::kGemm == 1) {
    store_hidden<Config, kN>(p, piece, tile, sums, scale_top, scale_bottom, epilogue, place);
  } else {
    store_rows<Config, kN>(p, piece, tile, sums, scale_top, scale_bottom, place);
  }
}

// Runs the smallest N of the ladder that holds the piece.
template <class Config, int kN, int... kLarger>
__device__ __forceinline__ void choose_tile(const GemmParams& p, Pipeline<Config>& pipe, const uint2* table,
                                            uint8_t* epilogue, const FragmentPlace& place, const Piece& piece,
                                            int tile) {
  if constexpr (sizeof...(kLarger) == 0) {
    consume_tile<Config, kN>(p, pipe, table, epilogue, place, piece, tile);
  } else {
    if (piece.count <= kN) {
      consume_tile<Config, kN>(p, pipe, table, epilogue, place, piece, tile);
    } else {
      choose_tile<Config, kLarger...>(p, pipe, table, epilogue, place, piece, tile);
    }
  }
}

template <class Config, int... kLadder>
__global__ void __launch_bounds__(kGemmThreads, Config::kCtas) experts_gemm(const __grid_constant__ GemmParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // a build without sm_90a still compiles the host part of these files
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t full[Config::kStages], empty[Config::kStages];
  __shared__ alignas(8) uint8_t table[kTableEntries * 8];
  uint8_t* stages = dynamic + (1024 - ptx::smem_address(dynamic) % 1024) % 1024;
  uint8_t* epilogue = stages + Config::kStages * Config::kStageBytes;

  if (threadIdx.x < kTableEntries * 8) table[threadIdx.x] = table_byte(threadIdx.x / 8, threadIdx.x % 8);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, kConsumerThreads / 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::pdl_wait();

  const int items = *p.work.num_tiles * p.row_tiles;
  Pipeline<Config> pipe{stages, full, empty};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x >= kConsumerThreads) {
    ptx::set_max_registers_down<Config::kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) produce<Config>(p, pipe, items);
  } else {
    ptx::set_max_registers_up<Config::kConsumerRegisters>();
    const FragmentPlace place{warp / 4, warp % 4, static_cast<int>(threadIdx.x % 32)};
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const Piece tile = load_tile(p.work, item / p.row_tiles);
      for (int row = 0; row < tile.count; row += Config::kMaxRows) {
        choose_tile<Config, kLadder...>(p, pipe, reinterpret_cast<const uint2*>(table), epilogue, place,
                                        tile.part(row, Config::kMaxRows), item % p.row_tiles);
      }
    }
  }
  ptx::pdl_trigger();
#endif
}

}  // namespace kimi::moe
