// From packed weights in shared memory to the A registers of wgmma.
//
// The order of the columns of a block is the kernels' own (activations are stored in the same one): lane t of a quad
// owns 16 neighbouring columns of each half block, so that all its values of a row and half share one E8M0 scale. K
// step s of half q and lane t take columns 64q + 16t + 8s .. + 7 (FP8; a BF16 step takes four of them).
//
// MXFP4 word: the magnitude of element n in bits 4n..4n+2, its sign in bit 8n+7 (n < 4) or 8(n-4)+3: a byte permute
// looks up four magnitudes in a table of 8 bytes, which holds E2M1 x 2^(r-8) for the scale remainder r, exactly; one
// AND-OR adds signs.
#pragma once

#include <cuda_bf16.h>

#include "../common/ptx.cuh"
#include "params.h"
#include "sm90_pipeline.cuh"

namespace kimi::moe {

constexpr int kTableEntries = 16;  // remainders 0..14; 15 is all zeros
constexpr int kZeroEntry = 15;
constexpr int kUnscaledEntry = 8;  // E2M1 x 2^0

// What a stored remainder r means: value = (looked up) * 2^(row base + kBias - 127).
template <Activation kActivation>
constexpr int kRemainderBias = kActivation == Activation::kFp8 ? 8 : 14;

// Byte `code` of table entry `r`: E4M3 of E2M1(code) * 2^(r - 8).
__device__ __forceinline__ uint8_t table_byte(int r, int code) {
  if (r == kZeroEntry || code == 0) return 0;
  const float magnitude = code < 2 ? 0.5f * code : (1.f + 0.5f * (code & 1)) * (1 << ((code >> 1) - 1));
  const float value = magnitude * __uint_as_float((r - 8 + 127) << 23);
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// __byte_perm would mask its selector once more.
__device__ __forceinline__ uint32_t look_up(uint2 table, uint32_t codes) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(table.x), "r"(table.y), "r"(codes));
  return out;
}

// Eight values of a row -> two words of four E4M3 bytes (elements 0..3 and 4..7).
__device__ __forceinline__ void decode_fp8(uint32_t word, uint2 table, uint32_t& low, uint32_t& high) {
  const uint32_t codes = word & 0x77777777u;
  low = look_up(table, codes) | (word & 0x80808080u);
  high = look_up(table, codes >> 16) | ((word * 16u) & 0x80808080u);
}

__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t value, uint32_t factor) {
  const __nv_bfloat162 product =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(value), reinterpret_cast<const __nv_bfloat162&>(factor));
  return reinterpret_cast<const uint32_t&>(product);
}

// Eight values of a row -> pairs (0,2) (1,3) (4,6) (5,7) of bf16. The bits of E2M1 in a bf16's exponent and first
// mantissa bit are E2M1 x 2^-126 (0.5 as a subnormal); the factor brings it to its scale.
__device__ __forceinline__ void decode_bf16(uint32_t word, uint32_t factor, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80008000u, kCodes = 0x01c001c0u;
  const uint32_t low = __byte_perm(word, 0, 0x4140), high = __byte_perm(word, 0, 0x4342);
  pairs[0] = scale_bf16x2(((low << 6) & kCodes) | ((word << 8) & kSigns), factor);
  pairs[1] = scale_bf16x2(((low << 2) & kCodes) | (word & kSigns), factor);
  pairs[2] = scale_bf16x2(((high << 6) & kCodes) | ((word << 12) & kSigns), factor);
  pairs[3] = scale_bf16x2(((high << 2) & kCodes) | ((word << 4) & kSigns), factor);
}

// Four E4M3 bytes -> pairs (0,2) (1,3) of bf16; exponent fields line up after a multiplication by 2^120.
__device__ __forceinline__ void convert_bf16(uint32_t word, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t kSigns = 0x80008000u, kRest = 0x07f007f0u, kFactor = (120 + 127) << 7 | (120 + 127) << 23;
  even = scale_bf16x2(((word << 4) & kRest) | ((word << 8) & kSigns), kFactor);
  odd = scale_bf16x2(((word >> 4) & kRest) | (word & kSigns), kFactor);
}

// bf16 pair of 2^(r + 112) from the stored 8r: with it a remainder r means E2M1 x 2^(r - 14).
__device__ __forceinline__ uint32_t bf16_factor(uint32_t stored) { return (stored + 8 * (112 + 127)) * 0x00100010u; }
constexpr uint32_t kUnscaledBf16 = (126u + 127u) * 0x00800080u;

// The A registers of 64 rows x 128 columns: 16 for FP8 steps of 32 columns, 32 for BF16 steps of 16.
template <Activation kActivation>
constexpr int kFragmentRegisters = kActivation == Activation::kFp8 ? 16 : 32;

// Where this thread's rows of a tile start. `slab`: which 64 rows (the warpgroup); `warp` within it.
struct FragmentPlace {
  int slab, warp, lane;
  __device__ __forceinline__ int group() const { return lane >> 2; }
  __device__ __forceinline__ int quad() const { return lane & 3; }
  // bytes: half 0 and 1 of row g, half 0 and 1 of row g + 8
  __device__ __forceinline__ int scale_word(int pair_of_groups) const {
    return ((slab * 4 + warp) * 8 + group()) * 2 + pair_of_groups;
  }
};

// What a thread reads of a block, before it is decoded.
template <WeightFormat kFormat>
struct Packed;
template <>
struct Packed<WeightFormat::kMxfp4> {
  uint4 words[2];   // a half each: row g and g + 8 of step 0, then of step 1
  uint32_t scales;  // 8 x remainder, a byte a (row, half) as scale_word() has them
};
template <>
struct Packed<WeightFormat::kFp8> {
  uint4 words[4];  // a step's four registers each: row g and g + 8 of elements 0..3, then of 4..7
};

// `block`: shared-memory address of the block's weights.
__device__ __forceinline__ void load_packed(Packed<WeightFormat::kMxfp4>& packed, uint32_t block,
                                            const FragmentPlace& place) {
  const uint32_t words = block + place.slab * 4096 + place.warp * 512 + place.lane * 16;
  packed.scales = load_shared_32(block + kTileRows * kBlockColumns / 2 + 4 * place.scale_word(place.quad() >> 1));
  packed.words[0] = load_shared_128(words);
  packed.words[1] = load_shared_128(words + 2048);
}

__device__ __forceinline__ void load_packed(Packed<WeightFormat::kFp8>& packed, uint32_t block,
                                            const FragmentPlace& place) {
  const uint32_t words = block + place.slab * 8192 + place.warp * 512 + place.lane * 16;
#pragma unroll
  for (int s = 0; s < 4; ++s) packed.words[s] = load_shared_128(words + 2048 * s);
}

template <Activation kActivation>
__device__ __forceinline__ void decode(uint32_t (&a)[kFragmentRegisters<kActivation>],
                                       const Packed<WeightFormat::kMxfp4>& packed, uint32_t table) {
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const uint4 w = packed.words[q];
    const uint32_t r0 = __byte_perm(packed.scales, 0, 0x4440 + q), r1 = __byte_perm(packed.scales, 0, 0x4442 + q);
    if constexpr (kActivation == Activation::kFp8) {
      const uint2 t0 = load_shared_64(table + r0), t1 = load_shared_64(table + r1);
      uint32_t* out = a + 8 * q;
      decode_fp8(w.x, t0, out[0], out[2]);
      decode_fp8(w.y, t1, out[1], out[3]);
      decode_fp8(w.z, t0, out[4], out[6]);
      decode_fp8(w.w, t1, out[5], out[7]);
    } else {
      const uint32_t f0 = bf16_factor(r0), f1 = bf16_factor(r1);
      const uint32_t word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t top[4], bottom[4];
        decode_bf16(word[2 * s], f0, top);
        decode_bf16(word[2 * s + 1], f1, bottom);
        uint32_t* out = a + 16 * q + 8 * s;
        out[0] = top[0], out[1] = bottom[0], out[2] = top[1], out[3] = bottom[1];
        out[4] = top[2], out[5] = bottom[2], out[6] = top[3], out[7] = bottom[3];
      }
    }
  }
}

template <Activation kActivation>
__device__ __forceinline__ void decode(uint32_t (&a)[kFragmentRegisters<kActivation>],
                                       const Packed<WeightFormat::kFp8>& packed, uint32_t) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint4 w = packed.words[s];
    if constexpr (kActivation == Activation::kFp8) {
      a[4 * s] = w.x, a[4 * s + 1] = w.y, a[4 * s + 2] = w.z, a[4 * s + 3] = w.w;
    } else {
      uint32_t* out = a + 8 * s;
      convert_bf16(w.x, out[0], out[2]);
      convert_bf16(w.y, out[1], out[3]);
      convert_bf16(w.z, out[4], out[6]);
      convert_bf16(w.w, out[5], out[7]);
    }
  }
}

// Half `q` of a wide tile's block with everything but scale group `group` of it (0 or 1) set to zero, unscaled.
template <Activation kActivation>
__device__ __forceinline__ void load_mxfp4_group(uint32_t (&a)[kFragmentRegisters<kActivation> / 2], uint32_t block,
                                                 uint32_t table, const FragmentPlace& place, int q, int group) {
  const uint4 w = load_shared_128(block + place.slab * 4096 + q * 2048 + place.warp * 512 + place.lane * 16);
  const bool mine = (place.quad() >> 1) == group;
  const uint32_t word[4] = {w.x, w.y, w.z, w.w};
  if constexpr (kActivation == Activation::kFp8) {
    const uint2 t = load_shared_64(table + 8 * kUnscaledEntry);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      decode_fp8(mine ? word[2 * s] : 0u, t, a[4 * s], a[4 * s + 2]);
      decode_fp8(mine ? word[2 * s + 1] : 0u, t, a[4 * s + 1], a[4 * s + 3]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t top[4], bottom[4];
      decode_bf16(mine ? word[2 * s] : 0u, kUnscaledBf16, top);
      decode_bf16(mine ? word[2 * s + 1] : 0u, kUnscaledBf16, bottom);
      uint32_t* out = a + 8 * s;
      out[0] = top[0], out[1] = bottom[0], out[2] = top[1], out[3] = bottom[1];
      out[4] = top[2], out[5] = bottom[2], out[6] = top[3], out[7] = bottom[3];
    }
  }
}

// 2^(byte - 127), exact down to the subnormal 2^-127.
__device__ __forceinline__ float exponent_value(uint32_t byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

}  // namespace kimi::moe
