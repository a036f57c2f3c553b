#include <algorithm>

#include "../common/launch.h"
#include "../common/math.h"
#include "verify.cuh"

namespace kimi::kda {
namespace {

template <int kCluster>
void launch_as(const RunParams& params, cudaStream_t stream) {
  using Config = RunConfig<kCluster>;
  const dim3 grid = decode_grid(params.sequences, params.token.heads * kCluster);
  // Few blocks are spread evenly over the SMs: each asks for so much shared memory that no SM takes more than its
  // share. An SM has 228 KiB, of which a block takes one unseen.
  constexpr int kSharedOfSm = 228 * 1024, kReserved = 1024;
  const int64_t share = ceil_div<int64_t>(int64_t{grid.x} * grid.y * grid.z, sm_count());
  size_t shared_bytes = sizeof(RunShared<Config>);
  if (share > 0 && share < Config::kBlocksPerSm) {
    shared_bytes = std::max<size_t>(shared_bytes, kSharedOfSm / share - kReserved);
  }
  launch(run_kernel<Config>, LaunchShape{grid, dim3(Config::kThreads), shared_bytes, kCluster}, stream, params);
}

}  // namespace

// Half heads or whole heads, by the waves they take: an SM holds three half heads or two whole ones. Half heads in one
// wave are the fastest there is, whole heads in one wave come next; two waves of half heads are shorter than two of
// whole ones. Beyond that whole heads win, which exchange nothing and have more states on their way. Measured with 12
// heads of 8 to 64 sequences and 96 of 16 (docs/kernels/kda_decode.md).
void launch_run(const RunParams& params, cudaStream_t stream) {
  const int64_t heads = int64_t{params.sequences} * params.token.heads, sms = sm_count();
  const bool one_wave_of_half = 2 * heads <= 3 * sms, one_wave_of_whole = heads <= 2 * sms;
  if (one_wave_of_half || (!one_wave_of_whole && heads <= 3 * sms)) {
    launch_as<2>(params, stream);
  } else {
    launch_as<1>(params, stream);
  }
}

}  // namespace kimi::kda
