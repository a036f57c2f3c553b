// Host entry points of the expert kernels. All run on `stream`, read their work list from the device, and never wait.
#pragma once

#include <cuda_runtime.h>

#include "plan.h"

namespace kimi::moe {

// max_tiles and max_items (tiles * row tiles) bound what the work list can hold. `gemm`: 1 or 2.
void launch_gather(const GatherParams& params, Activation activation, int64_t max_tiles, cudaStream_t stream);

void launch_settle(const SettleParams& params, int64_t max_tiles, cudaStream_t stream);

void launch_gemm_mxfp4_fp8(const GemmParams& params, int gemm, TileClass tiles, int64_t max_items, cudaStream_t stream);
void launch_gemm_mxfp4_bf16(const GemmParams& params, int gemm, TileClass tiles, int64_t max_items,
                            cudaStream_t stream);
void launch_gemm_fp8_fp8(const GemmParams& params, int gemm, TileClass tiles, int64_t max_items, cudaStream_t stream);
void launch_gemm_fp8_bf16(const GemmParams& params, int gemm, TileClass tiles, int64_t max_items, cudaStream_t stream);

}  // namespace kimi::moe
