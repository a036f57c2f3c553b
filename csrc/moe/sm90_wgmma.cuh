// wgmma with the weights (M = 64 rows a warpgroup) from registers and the activations (N) from shared memory:
// D[64, N] (+)= A[64, K] B[N, K]^T, fp32 accumulators. One specialisation an N, written with lists of operands, since
// inline assembly has no way to loop over registers.
#pragma once

#include <cstdint>

namespace kimi::moe {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of these registers across a wgmma.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// B in shared memory: rows of 128 bytes along K, 128-byte swizzle, 1024-byte aligned groups of 8 rows. The low word of
// the descriptor counts in 16 bytes, so that a place further on is an addition.
__device__ __forceinline__ uint32_t descriptor_of(uint32_t shared_address) { return shared_address >> 4 | 1u << 16; }
__device__ __forceinline__ uint64_t swizzled(uint32_t descriptor) {
  return uint64_t(descriptor) | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

template <int kN>
struct WgmmaFp8;  // K = 32, both operands E4M3
template <int kN>
struct WgmmaBf16;  // K = 16

// clang-format off
#define KIMI_L8 "%0, %1, %2, %3"
#define KIMI_L16 KIMI_L8 ", %4, %5, %6, %7"
#define KIMI_L24 KIMI_L16 ", %8, %9, %10, %11"
#define KIMI_L32 KIMI_L24 ", %12, %13, %14, %15"
#define KIMI_L40 KIMI_L32 ", %16, %17, %18, %19"
#define KIMI_L48 KIMI_L40 ", %20, %21, %22, %23"
#define KIMI_L56 KIMI_L48 ", %24, %25, %26, %27"
#define KIMI_L64 KIMI_L56 ", %28, %29, %30, %31"
#define KIMI_L72 KIMI_L64 ", %32, %33, %34, %35"
#define KIMI_L80 KIMI_L72 ", %36, %37, %38, %39"
#define KIMI_L88 KIMI_L80 ", %40, %41, %42, %43"
#define KIMI_L96 KIMI_L88 ", %44, %45, %46, %47"
#define KIMI_L104 KIMI_L96 ", %48, %49, %50, %51"
#define KIMI_L112 KIMI_L104 ", %52, %53, %54, %55"
#define KIMI_L120 KIMI_L112 ", %56, %57, %58, %59"
#define KIMI_L128 KIMI_L120 ", %60, %61, %62, %63"
#define KIMI_L136 KIMI_L128 ", %64, %65, %66, %67"
#define KIMI_L144 KIMI_L136 ", %68, %69, %70, %71"
#define KIMI_L152 KIMI_L144 ", %72, %73, %74, %75"
#define KIMI_L160 KIMI_L152 ", %76, %77, %78, %79"
#define KIMI_L168 KIMI_L160 ", %80, %81, %82, %83"
#define KIMI_L176 KIMI_L168 ", %84, %85, %86, %87"
#define KIMI_L184 KIMI_L176 ", %88, %89, %90, %91"
#define KIMI_L192 KIMI_L184 ", %92, %93, %94, %95"
#define KIMI_D8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define KIMI_D16 KIMI_D8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define KIMI_D24 KIMI_D16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define KIMI_D32 KIMI_D24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define KIMI_D40 KIMI_D32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define KIMI_D48 KIMI_D40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define KIMI_D56 KIMI_D48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define KIMI_D64 KIMI_D56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define KIMI_D72 KIMI_D64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define KIMI_D80 KIMI_D72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define KIMI_D88 KIMI_D80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define KIMI_D96 KIMI_D88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define KIMI_D104 KIMI_D96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define KIMI_D112 KIMI_D104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define KIMI_D120 KIMI_D112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define KIMI_D128 KIMI_D120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define KIMI_D136 KIMI_D128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define KIMI_D144 KIMI_D136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define KIMI_D152 KIMI_D144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define KIMI_D160 KIMI_D152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define KIMI_D168 KIMI_D160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define KIMI_D176 KIMI_D168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define KIMI_D184 KIMI_D176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define KIMI_D192 KIMI_D184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define KIMI_WGMMA(NAME, N, SHAPE, TAIL, P, A0, A1, A2, A3, B, S)                                              \
  template <>                                                                                                  \
  struct NAME<N> {                                                                                             \
    static __device__ __forceinline__ void mma(float (&d)[N / 2], const uint32_t* a, uint64_t b, int scale) {  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE     \
                   " {" KIMI_L##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1" TAIL ";\n}\n"          \
                   : KIMI_D##N                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale));                          \
    }                                                                                                          \
  };
#define KIMI_BOTH(N, A0, A1, A2, A3, B, S)                                                \
  KIMI_WGMMA(WgmmaFp8, N, "k32.f32.e4m3.e4m3", "", p, A0, A1, A2, A3, B, S)               \
  KIMI_WGMMA(WgmmaBf16, N, "k16.f32.bf16.bf16", ", 0", p, A0, A1, A2, A3, B, S)
KIMI_BOTH(8, "%4", "%5", "%6", "%7", "%8", "%9")
KIMI_BOTH(16, "%8", "%9", "%10", "%11", "%12", "%13")
KIMI_BOTH(24, "%12", "%13", "%14", "%15", "%16", "%17")
KIMI_BOTH(32, "%16", "%17", "%18", "%19", "%20", "%21")
KIMI_BOTH(40, "%20", "%21", "%22", "%23", "%24", "%25")
KIMI_BOTH(48, "%24", "%25", "%26", "%27", "%28", "%29")
KIMI_BOTH(56, "%28", "%29", "%30", "%31", "%32", "%33")
KIMI_BOTH(64, "%32", "%33", "%34", "%35", "%36", "%37")
KIMI_BOTH(72, "%36", "%37", "%38", "%39", "%40", "%41")
KIMI_BOTH(80, "%40", "%41", "%42", "%43", "%44", "%45")
KIMI_BOTH(88, "%44", "%45", "%46", "%47", "%48", "%49")
KIMI_BOTH(96, "%48", "%49", "%50", "%51", "%52", "%53")
KIMI_BOTH(104, "%52", "%53", "%54", "%55", "%56", "%57")
KIMI_BOTH(112, "%56", "%57", "%58", "%59", "%60", "%61")
KIMI_BOTH(120, "%60", "%61", "%62", "%63", "%64", "%65")
KIMI_BOTH(128, "%64", "%65", "%66", "%67", "%68", "%69")
KIMI_BOTH(136, "%68", "%69", "%70", "%71", "%72", "%73")
KIMI_BOTH(144, "%72", "%73", "%74", "%75", "%76", "%77")
KIMI_BOTH(152, "%76", "%77", "%78", "%79", "%80", "%81")
KIMI_BOTH(160, "%80", "%81", "%82", "%83", "%84", "%85")
KIMI_BOTH(168, "%84", "%85", "%86", "%87", "%88", "%89")
KIMI_BOTH(176, "%88", "%89", "%90", "%91", "%92", "%93")
KIMI_BOTH(184, "%92", "%93", "%94", "%95", "%96", "%97")
KIMI_BOTH(192, "%96", "%97", "%98", "%99", "%100", "%101")
#undef KIMI_L8
#undef KIMI_D8
#undef KIMI_L16
#undef KIMI_D16
#undef KIMI_L24
#undef KIMI_D24
#undef KIMI_L32
#undef KIMI_D32
#undef KIMI_L40
#undef KIMI_D40
#undef KIMI_L48
#undef KIMI_D48
#undef KIMI_L56
#undef KIMI_D56
#undef KIMI_L64
#undef KIMI_D64
#undef KIMI_L72
#undef KIMI_D72
#undef KIMI_L80
#undef KIMI_D80
#undef KIMI_L88
#undef KIMI_D88
#undef KIMI_L96
#undef KIMI_D96
#undef KIMI_L104
#undef KIMI_D104
#undef KIMI_L112
#undef KIMI_D112
#undef KIMI_L120
#undef KIMI_D120
#undef KIMI_L128
#undef KIMI_D128
#undef KIMI_L136
#undef KIMI_D136
#undef KIMI_L144
#undef KIMI_D144
#undef KIMI_L152
#undef KIMI_D152
#undef KIMI_L160
#undef KIMI_D160
#undef KIMI_L168
#undef KIMI_D168
#undef KIMI_L176
#undef KIMI_D176
#undef KIMI_L184
#undef KIMI_D184
#undef KIMI_L192
#undef KIMI_D192
#undef KIMI_BOTH
#undef KIMI_WGMMA
// clang-format on

}  // namespace kimi::moe
