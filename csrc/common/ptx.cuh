// PTX that CUDA C++ has no name for: programmatic dependent launch, mbarriers, asynchronous copies, clusters.
// Portable from sm_90 on. Tensor-core instructions live with the family that uses them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace kimi::ptx {

// ---- programmatic dependent launch -----------------------------------------------------------------------------
// Delay injection for the race tests (a build of its own): the last block of each grid is late, after its wait and
// after its trigger, so that the next kernel runs beside a block that still works.
__device__ __forceinline__ void delay_last_block() {
#ifdef KIMI_PDL_DELAY_NS
  if (blockIdx.x == gridDim.x - 1) {
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < KIMI_PDL_DELAY_NS);
  }
#endif
}

// wait: returns once every kernel before this one on the stream has finished and its writes are visible. Every kernel
// calls it, before its first read of another kernel's output and before its first global write: a kernel that skipped
// it would let its own successor overtake its predecessor.
__device__ __forceinline__ void pdl_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  delay_last_block();
}

// trigger: lets the next kernel start its prologue, once every block has called it or ended. Results do not depend on
// where it stands, since wait is for whole kernels; time does: the next kernel's blocks take room and issue slots, but
// while they start and prefetch, this one's last blocks finish. It stands before wait only where the next kernel reads
// nothing before its own wait that this kernel's predecessor writes.
__device__ __forceinline__ void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  delay_last_block();
}

// ---- shared memory addresses and mbarriers -----------------------------------------------------------------------
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void shared_store(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the asynchronous proxy and, in a cluster, to the other CTAs.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// One arrival of a warp, after everything its lanes did before; a barrier counts kWarpArrivals for each such warp.
// compute-sanitizer's racecheck does not follow __syncwarp into the arrival of another lane: its run compiles with
// -DKIMI_EVERY_LANE_ARRIVES, where each lane speaks for itself.
#ifdef KIMI_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
__device__ __forceinline__ void mbarrier_warp_arrive(uint64_t* barrier) { mbarrier_arrive(barrier); }
#else
constexpr int kWarpArrivals = 1;
__device__ __forceinline__ void mbarrier_warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
#endif

// Waits until the phase with this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_LOOP:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra WAIT_DONE;\n"
      "bra WAIT_LOOP;\n"
      "WAIT_DONE:\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- asynchronous copies ---------------------------------------------------------------------------------------
// 16 bytes per thread; with valid = false the destination is filled with zeros and nothing is read.
__device__ __forceinline__ void cp_async_16(void* smem, const void* global, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(smem)), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// One thread copies a contiguous piece; size and both addresses are multiples of 16 bytes. Completes on the barrier.
__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(smem)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem_address(smem)),
               "r"(bytes)
               : "memory");
}

// A hint: brings a contiguous piece into L2. L2 is where every writer's data meet, so it may run before pdl_wait.
__device__ __forceinline__ void prefetch_l2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// kReadOnly: the source may be overwritten; else the writes are also visible.
template <int kPending, bool kReadOnly>
__device__ __forceinline__ void bulk_wait() {
  if constexpr (kReadOnly) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
  } else {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  }
}

__device__ __forceinline__ void tma_load_2d(void* smem, const CUtensorMap* map, int32_t x, int32_t y,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(smem_address(smem)),
      "l"(map), "r"(x), "r"(y), "r"(smem_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tma_load_3d(void* smem, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(smem_address(smem)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(smem_address(barrier))
      : "memory");
}

// Ordinary shared-memory writes before it are seen by asynchronous copies and tensor cores after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier `id` (1..15) among `threads` threads of the CTA, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters ----------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Orders nothing (and costs no memory fence): enough when only the start of the other CTAs is waited for.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of the same shared variable in another CTA of the cluster, for ld/st.shared::cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(pointer)), "r"(rank));
  return address;
}

// Stores and counts 4 bytes on a barrier of that CTA, which saves both sides a cluster barrier with its memory fence.
__device__ __forceinline__ void cluster_store_async(uint32_t address, float value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value),
               "r"(barrier)
               : "memory");
}

// The same for 16 bytes.
__device__ __forceinline__ void cluster_store_async(uint32_t address, float4 value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

}  // namespace kimi::ptx
