// Arguments of the expert kernels, and the layouts of what passes between them.
//
// Rows: the (token, choice) pairs sorted by expert, as routing.dispatch makes them. Its tiles are runs of rows of one
// expert; the kernels take them in pieces of at most `max_rows`, stored padded to a multiple of 8 rows. Activations are
// kept as the GEMMs read them: for each piece and block of 128 columns one contiguous blob of `padded rows` times
// `row_bytes`, so that a stage of the pipeline is one bulk copy. FP8 rows have one f32 scale each, in the padded
// numbering.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi::moe {

enum class WeightFormat : int { kMxfp4 = 0, kFp8 = 1 };
enum class Activation : int { kFp8 = 0, kBf16 = 1 };

constexpr int kTileRows = 128;      // weight rows of a tile: the M of the swapped product
constexpr int kBlockColumns = 128;  // K of a block
constexpr int kMaxExperts = 1024;

// Bytes of one weight tile and block, and of the header before a tile's first block.
constexpr int kMxfp4BlockBytes = kTileRows * kBlockColumns / 2 + kTileRows * 4;
constexpr int kMxfp4HeaderBytes = 256;                           // a base exponent a row, then the flag "wide"
constexpr int kFp8BlockBytes = kTileRows * kBlockColumns + 128;  // the values, then two f32 scales

constexpr int weight_block_bytes(WeightFormat format) {
  return format == WeightFormat::kMxfp4 ? kMxfp4BlockBytes : kFp8BlockBytes;
}
constexpr int weight_header_bytes(WeightFormat format) {
  return format == WeightFormat::kMxfp4 ? kMxfp4HeaderBytes : 0;
}

// Bytes of one row of a block.
constexpr int row_bytes(Activation activation) {
  return activation == Activation::kBf16 ? 2 * kBlockColumns : kBlockColumns;
}

// Groups of 32 columns of h, which 64 interleaved gate and up rows make: a warpgroup's part of a tile.
constexpr int hidden_groups(int k_blocks) { return 4 * k_blocks; }

struct WorkList {
  const int32_t* tiles;      // [max_tiles, 3]: expert, first row, rows
  const int32_t* num_tiles;  // [1]
  int32_t weight_offset;     // index into the weights = expert + weight_offset
  int32_t max_rows;          // of a piece, a multiple of 8
};

// Rows that fill up pieces: `rows` sorted rows take fewer than padded_rows(rows, experts) of the padded numbering.
constexpr int64_t padded_rows(int64_t rows, int64_t experts) { return rows + 8 * experts + 8; }

// x [T, width] bf16 -> blobs; the activation's form is a template argument
struct GatherParams {
  const __nv_bfloat16* x;
  int64_t x_stride;
  const int32_t* pairs;  // [rows] sorted row -> token * top_k + choice
  WorkList work;
  uint8_t* blobs;
  float* scales;       // FP8: of each padded row
  uint8_t* codes;      // FP8: scratch, [tokens, 128 * k_blocks]
  float* code_scales;  // FP8: scratch, [tokens]
  int32_t tokens;
  int32_t width;     // a multiple of 32
  int32_t k_blocks;  // ceil(width / 128)
  int32_t top_k;
};

struct GemmParams {
  const uint8_t* weights;  // [experts][row_tiles] tiles
  const uint8_t* blobs;    // activations
  const float* scales;     // FP8: of each padded row
  WorkList work;
  int32_t row_tiles;
  int32_t k_blocks;

  // first product: h as blobs for the second, its k_blocks, SiTU; raw (may be null) [rows, 2 * inner] bf16
  uint8_t* hidden;
  uint8_t* exponents;  // FP8: for each piece [groups of 32 columns][padded rows] E8M0, until the rows are settled
  int32_t hidden_k_blocks;
  int32_t inner;
  float beta;
  float linear_beta;  // 0: none
  __nv_bfloat16* raw;

  // second product: row pairs[sorted row] of out [pairs, out_stride] bf16, `width` columns
  __nv_bfloat16* out;
  int32_t out_stride;
  const int32_t* pairs;
  int32_t width;
};

// h with a scale per 32 columns -> h with one a row, in place
struct SettleParams {
  uint8_t* hidden;
  const uint8_t* exponents;
  float* scales;
  WorkList work;
  int32_t k_blocks;
};

}  // namespace kimi::moe
