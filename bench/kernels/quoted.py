"""Times of peers measured before, in us, for a machine where they are not packed. A report marks them with DATE.

One NVIDIA H200, driver 580.159, torch 2.11.0+cu130, triton 3.6.0; kernels as shipped in vLLM 0.33.0, fla-core 0.6.0,
humming-kernels 0.1.19; graph replays over rotated buffers, as here. A peer measured in the same run always goes first.
"""

from __future__ import annotations

DATE = "2026-11-29"

GROUPED_TOPK = {1: 5.54, 16: 5.60, 256: 6.44, 8192: 84.4}  # by tokens; 16 of 896
ATTN_RES = {1: 7.6, 256: 18.7, 8192: 473.0}  # by tokens; 9 sources, delta, output norm

# by (heads, batch)
FUSED_KDA_DECODE = {
    (12, 1): 6.30, (12, 4): 7.01, (12, 16): 11.2, (12, 64): 32.0, (12, 256): 116.0,
    (96, 1): 8.03, (96, 4): 16.9, (96, 16): 59.0, (96, 64): 227.0, (96, 256): 902.0,
}  # fmt: skip
FLA_RECURRENCE = {
    (12, 1): 4.01, (12, 4): 5.37, (12, 16): 11.4, (12, 64): 35.4, (12, 256): 132.0,
    (96, 1): 6.89, (96, 4): 19.1, (96, 16): 67.8, (96, 64): 275.0, (96, 256): 1132.0,
}  # fmt: skip

# by peer, local experts (of 896) and tokens; 3584 -> 2 x 3072 -> SiTU -> 3584, top 16, uniform routing
TOKENS = (1, 4, 16, 64, 256, 1024, 8192)


def _by_tokens(*us: float, first: int = 0) -> dict[int, float]:
    return dict(zip(TOKENS[first:], us, strict=False))


MOE = {
    ("Marlin W4A16", 896): _by_tokens(131.5, 425, 1484, 4091, 6180, 9138, 43450),
    ("Humming W4A16 indexed", 896): _by_tokens(148.6, 431, 1457, 4001, 6120, 7081, 23640),
    ("Humming W4A8 indexed", 896): _by_tokens(104.1, 294, 939, 2560, 3862, 4766, 13440),
    ("Triton fused_moe", 896): _by_tokens(151.1, 509, 1705, 4633, 7760, 8516, 22270),
    ("DeepGEMM masked", 896): _by_tokens(249, 566, 1896, 5222, 7516, 7701),
    ("DeepGEMM contiguous", 896): _by_tokens(12000, 12740, 19380, first=4),
    ("torch _scaled_grouped_mm", 896): _by_tokens(217, 692, 2332, 6179, 8879, 9286, 24940),
    ("Marlin W4A16", 112): _by_tokens(56.7, 84.5, 207, 539, 822, 1341, 6833),
    ("Humming W4A16 indexed", 112): _by_tokens(47.4, 82.8, 220, 525, 761, 889, 2924),
    ("Humming W4A8 indexed", 112): _by_tokens(42.8, 64.8, 157.6, 354, 516, 619, 1976),
    ("Humming W4A16 grouped", 112): _by_tokens(67.3, 104.6, 212, 514, 733, 951, 2344),
    ("Humming W4A8 grouped", 112): _by_tokens(63.4, 76.1, 156.1, 368, 534, 640, 1705),
    ("Triton fused_moe", 112): _by_tokens(56.0, 99.0, 248, 657, 1126, 1400, 4726),
    ("DeepGEMM masked", 112): _by_tokens(50.8, 92.0, 249, 662, 935, 944),
    ("DeepGEMM contiguous", 112): _by_tokens(1371, 1424, 2224, first=4),
    ("torch _scaled_grouped_mm", 112): _by_tokens(50.2, 117.1, 330, 832, 1122, 1142, 3101),
}
