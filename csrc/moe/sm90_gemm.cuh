// The grouped GEMM of the experts on sm_90a, weights as the M operand.
//
// One producer thread keeps a ring of stages full: a block of packed weights and the matching activations, two
// contiguous bulk copies; of the activations, each CTA of a cluster fetches a share for all. Two warpgroups own 64
// weight rows each: they turn packed weights into A registers, multiply with the activations in shared memory, and add
// the accumulators of a few blocks to fp32 sums. While the tensor cores work on block k, the weights of block k + 1 are
// decoded. A row's scale is applied at the end of the tile. A persistent grid walks (piece, row tile) in order.
//
// The order of K and the promotions are the same for every N: a row's result does not depend on its piece.
#pragma once

#include "../common/ptx.cuh"
#include "sm90_config.h"
#include "sm90_epilogue.cuh"
#include "sm90_fragment.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_wgmma.cuh"
#include "work.cuh"

namespace kimi::moe {

// sums += part (times the weights' block scales)
template <class Config, int kN>
__device__ __forceinline__ void promote(float (&sums)[kN / 2], const float (&part)[kN / 2], float block_top,
                                        float block_bottom) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    if constexpr (Config::kFormat == WeightFormat::kFp8) {
      sums[i] = fmaf(part[i], i % 4 < 2 ? block_top : block_bottom, sums[i]);
    } else {
      sums[i] += part[i];
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

// Reads the next block's weights and decodes them, when there is one. `left`: blocks of the tile after this one.
template <class Config, Decode kDecode>
__device__ __forceinline__ void prepare(Pipeline<Config>& pipe, uint32_t table, const FragmentPlace& place, int left,
                                        uint32_t (&next)[kFragmentRegisters<Config::kActivation>],
                                        Packed<Config::kFormat>& packed) {
  if (left < 1) return;
  if constexpr (kDecode == Decode::kMeanwhileFetched) {
    decode<Config::kActivation>(next, packed, table);
    if (left > 1) fetch<Config>(packed, pipe, place);
  } else {
    fetch<Config>(packed, pipe, place);
    if constexpr (kDecode == Decode::kMeanwhile) decode<Config::kActivation>(next, packed, table);
  }
}

// One block, multiplied and promoted alone: with `current`, while the next block's weights come into `next` (the same
// registers when decoding comes afterwards). The tile's last stage is not freed here.
template <class Config, int kN>
__device__ __forceinline__ void block_step(Pipeline<Config>& pipe, int& stage, uint32_t table,
                                           const FragmentPlace& place, float (&sums)[kN / 2], int padded, bool first,
                                           int left, const uint32_t (&current)[kFragmentRegisters<Config::kActivation>],
                                           uint32_t (&next)[kFragmentRegisters<Config::kActivation>],
                                           Packed<Config::kFormat>& packed) {
  constexpr int kSteps = Config::kFp8 ? 4 : 8;
  constexpr Decode kDecode = Config::decode(kN);
  const uint32_t base = pipe.at(stage);
  auto products = [&](float (&d)[kN / 2], bool fresh) {
    take_turn<Config>(place.slab);
    wgmma_fence();
    multiply<Config, kN, 0, kSteps>(d, current, descriptor_of(base), padded, fresh);
    wgmma_commit();
    pass_turn<Config>(place.slab);
    prepare<Config, kDecode>(pipe, table, place, left, next, packed);
    wgmma_wait<0>();
    pin(d);
  };
  if constexpr (Config::kSumBlocks == 0) {
    pin(sums);
    products(sums, first);
  } else {
    const float2 scales = load_shared_float2(base + Config::kWeightOffset + kTileRows * kBlockColumns);
    float part[kN / 2];
    products(part, true);
    promote<Config, kN>(sums, part, scales.x, scales.y);
  }
  if (left > 0) pipe.release(stage, place.lane);
  if (++stage == Config::kStages) stage = 0;
  if constexpr (kDecode == Decode::kAfterwards) {
    if (left > 0) decode<Config::kActivation>(next, packed, table);
  }
}

// kSumBlocks blocks (fewer at the end), summed on the tensor cores and then promoted. A block's products stay in flight
// while the next block's are issued. Returns the stage of the last one; the tile's last stage is not freed here.
template <class Config, int kN>
__device__ __forceinline__ int sum_step(Pipeline<Config>& pipe, int& stage, uint32_t table, const FragmentPlace& place,
                                        float (&sums)[kN / 2], int padded, int left,
                                        uint32_t (&a)[kFragmentRegisters<Config::kActivation>],
                                        uint32_t (&b)[kFragmentRegisters<Config::kActivation>],
                                        Packed<Config::kFormat>& packed) {
  constexpr int kBlocks = Config::kSumBlocks;
  constexpr Decode kDecode = Config::decode(kN);
  static_assert(kBlocks % 2 == 0, "two sets of weight registers");
  float part[kN / 2];
  int last = 0;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    if (j > 0 && left < j) break;
    wgmma_fence();
    multiply<Config, kN, 0, 4>(part, j % 2 ? b : a, descriptor_of(pipe.at(stage)), padded, j == 0);
    wgmma_commit();
    if (j > 0) {
      wgmma_wait<1>();
      pipe.release(last, place.lane);
    }
    prepare<Config, kDecode>(pipe, table, place, left - j, j % 2 ? a : b, packed);
    last = stage;
    if (++stage == Config::kStages) stage = 0;
  }
  wgmma_wait<0>();
  pin(part);
  if (left >= kBlocks) pipe.release(last, place.lane);
  promote<Config, kN>(sums, part, 1.f, 1.f);
  return last;
}

// A tile whose E8M0 scales spread over more than 14 binades: every scale group of 32 columns is multiplied alone,
// unscaled, and promoted with its own scale relative to the row's base. Four times the products, the same exactness:
// only what lies 2^-126 below the base is left out. Returns the last stage, not yet freed.
template <class Config, int kN>
__device__ __forceinline__ int wide_tile(Pipeline<Config>& pipe, uint32_t table, const FragmentPlace& place,
                                         float (&sums)[kN / 2], int padded, int k_blocks, int base_top,
                                         int base_bottom) {
  int stage = 0;
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
        auto relative = [](uint32_t byte, int base) {
          return __uint_as_float(max(static_cast<int>(byte) - base + 127, 0) << 23);
        };
        const float top = relative((word >> (8 * q)) & 0xff, base_top),
                    bottom = relative((word >> (16 + 8 * q)) & 0xff, base_bottom);
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
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) sums[i] = fmaf(part[i], i % 4 < 2 ? top : bottom, sums[i]);
      }
    }
    stage = pipe.stage;
    if (k < k_blocks - 1) pipe.release(stage, place.lane);
    pipe.advance();
  }
  return stage;
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
  int base_top = 0, base_bottom = 0;

  pipe.wait_full();
  if constexpr (Config::kFormat == WeightFormat::kMxfp4) {
    const uint32_t header = pipe.at(pipe.stage) + Config::kWeightOffset;
    const uint32_t bases = header + place.slab * 64 + place.warp * 16 + place.group();
    wide = load_shared_byte(header + kTileRows) != 0;
    base_top = load_shared_byte(bases), base_bottom = load_shared_byte(bases + 8);
    const int bias = wide ? 0 : kRemainderBias<Config::kActivation>;
    scale_top = exponent_value(base_top + bias);
    scale_bottom = exponent_value(base_bottom + bias);
  }
  int last = 0;
  if (Config::kFormat == WeightFormat::kMxfp4 && wide) {
    last = wide_tile<Config, kN>(pipe, table, place, sums, padded, p.k_blocks, base_top, base_bottom);
  } else {
    int stage = pipe.stage, left = p.k_blocks - 1;
    uint32_t a[kFragmentRegisters<Config::kActivation>];
    Packed<Config::kFormat> packed;
    fetch<Config>(packed, pipe, place);
    decode<Config::kActivation>(a, packed, table);
    if constexpr (kDecode == Decode::kAfterwards) {
      for (bool first = true; left >= 0; --left, first = false) {
        last = stage;
        block_step<Config, kN>(pipe, stage, table, place, sums, padded, first, left, a, a, packed);
      }
    } else {
      if (kDecode == Decode::kMeanwhileFetched && left > 0) fetch<Config>(packed, pipe, place);
      uint32_t b[kFragmentRegisters<Config::kActivation>];
      if constexpr (Config::kSumBlocks > 1) {
        for (; left >= 0; left -= Config::kSumBlocks) {
          last = sum_step<Config, kN>(pipe, stage, table, place, sums, padded, left, a, b, packed);
        }
      } else {
        for (bool first = true; left >= 0; left -= 2, first = false) {
          last = stage;
          block_step<Config, kN>(pipe, stage, table, place, sums, padded, first, left, a, b, packed);
          if (left == 0) break;
          last = stage;
          block_step<Config, kN>(pipe, stage, table, place, sums, padded, false, left - 1, b, a, packed);
        }
      }
    }
  }
  if constexpr (Config::kFp8) {  // times each row's scale
    const uint32_t scales = pipe.at(last) + Config::kScaleOffset + 8 * place.quad();
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 s = load_shared_float2(scales + 32 * j);
      sums[4 * j] *= s.x, sums[4 * j + 1] *= s.y, sums[4 * j + 2] *= s.x, sums[4 * j + 3] *= s.y;
    }
  }
  pipe.release(last, place.lane);
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
      ptx::mbarrier_init(empty + s, kConsumerThreads / 32 * Config::kCluster);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kCluster > 1) {  // the barriers are ready for the other CTA
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

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
    ptx::pdl_wait();
    ptx::pdl_trigger();
    const int warp = threadIdx.x / 32;
    const FragmentPlace place{warp / 4, warp % 4, static_cast<int>(threadIdx.x % 32)};
    if (place.slab == 1) pass_turn<Config>(1);  // the first turn is slab 0's
    const Schedule<Config> schedule(p);
    for (int item = schedule.first; item < schedule.items; item += schedule.stride) {
      const Piece tile = load_tile(p.work, item / schedule.groups);
      for (int row = 0; row < tile.count; row += Config::kMaxRows) {
        choose_tile<Config, kLadder...>(p, pipe, table, epilogue, place, tile.part(row, Config::kMaxRows),
                                        schedule.row_tile(item));
      }
    }
  }
  if constexpr (Config::kCluster > 1) {  // nobody's copies or arrivals come to a CTA that has left
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
#endif
}

}  // namespace kimi::moe
