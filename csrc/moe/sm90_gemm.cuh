// The grouped GEMM of the experts on sm_90a, weights as the M operand.
//
// One producer thread keeps a ring of stages full: a block of packed weights and the matching activations, two
// contiguous bulk copies. Two warpgroups own 64 weight rows each: they turn packed weights into A registers, multiply
// with the activations in shared memory, and add each block's accumulators, times the activation scales, to fp32 sums.
// While the tensor cores work on block k, the weights of block k + 1 are decoded. A persistent grid walks (piece, row
// tile) in order.
//
// The order of K, the promotions and the scale groups are the same for every N: a row's result does not depend on its
// piece.
#pragma once

#include "../common/ptx.cuh"
#include "sm90_config.h"
#include "sm90_epilogue.cuh"
#include "sm90_fragment.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_wgmma.cuh"
#include "work.cuh"

namespace kimi::moe {

// sums += part * scale[column] (* the weights' block scales)
template <class Config, int kN>
__device__ __forceinline__ void promote(float (&sums)[kN / 2], float (&part)[kN / 2], uint32_t scales, float block_top,
                                        float block_bottom) {
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    float2 s = make_float2(1.f, 1.f);
    if constexpr (Config::kFp8) s = load_shared_float2(scales + 32 * j);
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

// Issues the products of steps kFirst..kLast-1 of a block (FP8: 4 steps, BF16: 8). `activations`: their descriptor;
// `fresh`: start from zero.
template <class Config, int kN, int kFirst, int kLast, int kRegisters>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const uint32_t (&a)[kRegisters], uint32_t activations,
                                         int padded, bool fresh) {
#pragma unroll
  for (int s = kFirst; s < kLast; ++s) {
    const int accumulate = s > kFirst || !fresh;
    const uint32_t* fragment = a + 4 * (s - kFirst);
    if constexpr (Config::kFp8) {
      WgmmaFp8<kN>::mma(d, fragment, swizzled(activations + 2 * s), accumulate);
    } else {
      const uint32_t half = activations + (s >= 4 ? padded * 8 : 0);
      WgmmaBf16<kN>::mma(d, fragment, swizzled(half + 2 * (s % 4)), accumulate);
    }
  }
}

// Reads the packed words of the next block in the ring.
template <class Config>
__device__ __forceinline__ void fetch(Packed<Config::kFormat>& packed, Pipeline<Config>& pipe,
                                      const FragmentPlace& place) {
  pipe.wait_full();
  load_packed(packed, pipe.at(pipe.stage) + Config::kWeightOffset + Config::kHeaderBytes, place);
  pipe.advance();
}

// One block, in `stage`: multiply with `current`, get the next block's weights into `next` (the same registers when
// decoding comes afterwards), promote, free the stage. `left`: blocks of this tile after it.
template <class Config, int kN>
__device__ __forceinline__ void block_step(Pipeline<Config>& pipe, int& stage, uint32_t table,
                                           const FragmentPlace& place, float (&sums)[kN / 2], int padded, bool first,
                                           int left, const uint32_t (&current)[kFragmentRegisters<Config::kActivation>],
                                           uint32_t (&next)[kFragmentRegisters<Config::kActivation>],
                                           Packed<Config::kFormat>& packed) {
  constexpr int kSteps = Config::kFp8 ? 4 : 8;
  constexpr bool kSplit = Config::kPromotions == 2;  // the halves of the block have scales of their own
  constexpr bool kBoth = kSplit && kN <= 24;         // both halves in flight at once
  constexpr Decode kDecode = Config::decode(kN);
  const uint32_t base = pipe.at(stage);
  const uint32_t activations = descriptor_of(base);
  const uint32_t scales = base + padded * kBlockColumns + 8 * place.quad();
  float block_top = 1.f, block_bottom = 1.f;
  if constexpr (Config::kFormat == WeightFormat::kFp8) {
    const float2 both = load_shared_float2(base + Config::kWeightOffset + kTileRows * kBlockColumns);
    block_top = both.x, block_bottom = both.y;
  }
  auto meanwhile = [&] {
    if (left < 1) return;
    if constexpr (kDecode == Decode::kMeanwhileFetched) {
      decode<Config::kActivation>(next, packed, table);
      if (left > 1) fetch<Config>(packed, pipe, place);
    } else {
      fetch<Config>(packed, pipe, place);
      if constexpr (kDecode == Decode::kMeanwhile) decode<Config::kActivation>(next, packed, table);
    }
  };

  if constexpr (Config::kPromotions == 0) {
    pin(sums);
    take_turn<Config>(place.slab);
    wgmma_fence();
    multiply<Config, kN, 0, kSteps>(sums, current, activations, padded, first);
    wgmma_commit();
    pass_turn<Config>(place.slab);
    meanwhile();
    wgmma_wait<0>();
    pin(sums);
  } else if constexpr (!kSplit) {
    float part[kN / 2];
    take_turn<Config>(place.slab);
    wgmma_fence();
    multiply<Config, kN, 0, kSteps>(part, current, activations, padded, true);
    wgmma_commit();
    pass_turn<Config>(place.slab);
    meanwhile();
    wgmma_wait<0>();
    pin(part);
    promote<Config, kN>(sums, part, scales, block_top, block_bottom);
  } else if constexpr (kBoth) {
    float part[2][kN / 2];
    take_turn<Config>(place.slab);
    wgmma_fence();
    multiply<Config, kN, 0, 2>(part[0], reinterpret_cast<const uint32_t (&)[8]>(current[0]), activations, padded, true);
    multiply<Config, kN, 2, 4>(part[1], reinterpret_cast<const uint32_t (&)[8]>(current[8]), activations, padded, true);
    wgmma_commit();
    pass_turn<Config>(place.slab);
    meanwhile();
    wgmma_wait<0>();
    pin(part[0]);
    pin(part[1]);
    promote<Config, kN>(sums, part[0], scales, block_top, block_bottom);
    promote<Config, kN>(sums, part[1], scales + 4 * padded, block_top, block_bottom);
  } else {
    float part[kN / 2];
    take_turn<Config>(place.slab);
    wgmma_fence();
    multiply<Config, kN, 0, 2>(part, reinterpret_cast<const uint32_t (&)[8]>(current[0]), activations, padded, true);
    wgmma_commit();
    pass_turn<Config>(place.slab);
    meanwhile();
    wgmma_wait<0>();
    pin(part);
    promote<Config, kN>(sums, part, scales, block_top, block_bottom);
    take_turn<Config>(place.slab);
    wgmma_fence();
    multiply<Config, kN, 2, 4>(part, reinterpret_cast<const uint32_t (&)[8]>(current[8]), activations, padded, true);
    wgmma_commit();
    pass_turn<Config>(place.slab);
    wgmma_wait<0>();
    pin(part);
    promote<Config, kN>(sums, part, scales + 4 * padded, block_top, block_bottom);
  }
  pipe.release(stage, place.lane);
  if (++stage == Config::kStages) stage = 0;
  if constexpr (kDecode == Decode::kAfterwards) {
    if (left > 0) decode<Config::kActivation>(next, packed, table);
  }
}

// A tile whose E8M0 scales spread over more than 14 binades: every scale group of 32 columns is multiplied alone,
// unscaled, and promoted with its own scale. Four times the products; exact.
template <class Config, int kN>
__device__ __forceinline__ void wide_tile(Pipeline<Config>& pipe, uint32_t table, const FragmentPlace& place,
                                          float (&sums)[kN / 2], int padded, int k_blocks) {
  constexpr int kHalfSteps = Config::kFp8 ? 2 : 4;
  for (int k = 0; k < k_blocks; ++k) {
    pipe.wait_full();
    const uint32_t base = pipe.at(pipe.stage), activations = descriptor_of(base);
    const uint32_t weights = base + Config::kWeightOffset + Config::kHeaderBytes;
    const uint32_t scale_words = weights + kTileRows * kBlockColumns / 2;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll 1
      for (int group = 0; group < 2; ++group) {
        uint32_t a[kFragmentRegisters<Config::kActivation> / 2];
        load_mxfp4_group<Config::kActivation>(a, weights, table, place, q, group);
        const uint32_t word = load_shared_32(scale_words + 4 * place.scale_word(group));
        const float top = exponent_value((word >> (8 * q)) & 0xff),
                    bottom = exponent_value((word >> (16 + 8 * q)) & 0xff);
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
        const uint32_t scales =
            base + padded * kBlockColumns + (Config::kPromotions == 2 ? q * 4 * padded : 0) + 8 * place.quad();
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          float2 s = make_float2(1.f, 1.f);
          if constexpr (Config::kFp8) s = load_shared_float2(scales + 32 * j);
          sums[4 * j] = fmaf(part[4 * j], top * s.x, sums[4 * j]);
          sums[4 * j + 1] = fmaf(part[4 * j + 1], top * s.y, sums[4 * j + 1]);
          sums[4 * j + 2] = fmaf(part[4 * j + 2], bottom * s.x, sums[4 * j + 2]);
          sums[4 * j + 3] = fmaf(part[4 * j + 3], bottom * s.y, sums[4 * j + 3]);
        }
      }
    }
    pipe.release(pipe.stage, place.lane);
    pipe.advance();
  }
}

template <class Config, int kN>
__device__ __forceinline__ void consume_tile(const GemmParams& p, Pipeline<Config>& pipe, uint32_t table,
                                             uint8_t* epilogue, const FragmentPlace& place, const Piece& piece,
                                             int tile) {
  constexpr Decode kDecode = Config::decode(kN);
  float sums[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) sums[i] = 0.f;
  const int padded = round_up(piece.count, 8);
  float scale_top = 1.f, scale_bottom = 1.f;
  bool wide = false;

  pipe.wait_full();
  if constexpr (Config::kFormat == WeightFormat::kMxfp4) {
    const uint32_t header = pipe.at(pipe.stage) + Config::kWeightOffset;
    const uint32_t bases = header + place.slab * 64 + place.warp * 16 + place.group();
    wide = load_shared_byte(header + kTileRows) != 0;
    if (!wide) {
      scale_top = exponent_value(load_shared_byte(bases) + kRemainderBias<Config::kActivation>);
      scale_bottom = exponent_value(load_shared_byte(bases + 8) + kRemainderBias<Config::kActivation>);
    }
  }
  if (Config::kFormat == WeightFormat::kMxfp4 && wide) {
    wide_tile<Config, kN>(pipe, table, place, sums, padded, p.k_blocks);
  } else {
    int stage = pipe.stage, left = p.k_blocks - 1;
    uint32_t a[kFragmentRegisters<Config::kActivation>];
    Packed<Config::kFormat> packed;
    fetch<Config>(packed, pipe, place);
    decode<Config::kActivation>(a, packed, table);
    if constexpr (kDecode == Decode::kAfterwards) {
      for (bool first = true; left >= 0; --left, first = false) {
        block_step<Config, kN>(pipe, stage, table, place, sums, padded, first, left, a, a, packed);
      }
    } else {
      if (kDecode == Decode::kMeanwhileFetched && left > 0) fetch<Config>(packed, pipe, place);
      uint32_t b[kFragmentRegisters<Config::kActivation>];
      for (bool first = true; left >= 0; left -= 2, first = false) {
        block_step<Config, kN>(pipe, stage, table, place, sums, padded, first, left, a, b, packed);
        if (left == 0) break;
        block_step<Config, kN>(pipe, stage, table, place, sums, padded, false, left - 1, b, a, packed);
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
__device__ __forceinline__ void choose_tile(const GemmParams& p, Pipeline<Config>& pipe, uint32_t table,
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
__global__ void __launch_bounds__(Config::kThreads, Config::kCtas) experts_gemm(const __grid_constant__ GemmParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // a build without sm_90a still compiles the host part of these files
  extern __shared__ uint8_t dynamic[];
  __shared__ alignas(8) uint64_t full[Config::kStages], empty[Config::kStages];
  __shared__ alignas(8) uint8_t table_bytes[kTableEntries * 8];
  uint8_t* stages = dynamic + (1024 - ptx::smem_address(dynamic) % 1024) % 1024;
  uint8_t* epilogue = stages + Config::kStages * Config::kStageBytes;

  if (threadIdx.x < kTableEntries * 8) table_bytes[threadIdx.x] = table_byte(threadIdx.x / 8, threadIdx.x % 8);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, kConsumerThreads / 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::pdl_wait();

  Pipeline<Config> pipe{ptx::smem_address(stages), ptx::smem_address(full), ptx::smem_address(empty)};
  uint32_t table = ptx::smem_address(table_bytes);
  // From here on they are numbers in registers: the compiler would work them out again in every block.
  asm volatile("" : "+r"(pipe.stages), "+r"(pipe.full), "+r"(pipe.empty), "+r"(table));
  if (threadIdx.x >= kConsumerThreads) {
    if constexpr (Config::kMoveRegisters) ptx::set_max_registers_down<Config::kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) produce<Config>(p, pipe);
    __syncwarp();
  } else {
    if constexpr (Config::kMoveRegisters) ptx::set_max_registers_up<Config::kConsumerRegisters>();
    const int warp = threadIdx.x / 32;
    const FragmentPlace place{warp / 4, warp % 4, static_cast<int>(threadIdx.x % 32)};
    if (place.slab == 1) pass_turn<Config>(1);  // the first turn is slab 0's
    const int items = *p.work.num_tiles * p.row_tiles;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const Piece tile = load_tile(p.work, item / p.row_tiles);
      for (int row = 0; row < tile.count; row += Config::kMaxRows) {
        choose_tile<Config, kLadder...>(p, pipe, table, epilogue, place, tile.part(row, Config::kMaxRows),
                                        item % p.row_tiles);
      }
    }
  }
  ptx::pdl_trigger();
#endif
}

}  // namespace kimi::moe
