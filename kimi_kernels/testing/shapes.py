"""The shapes of Kimi K3 by name (K3 spec section 1), for tests and benchmarks; see docs/glossary.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class K3:
    """Published dimensions. Heads are those of one of ``tp`` ranks."""

    tp: int = 1
    hidden: int = 7168
    latent: int = 3584
    expert_width: int = 3072
    num_experts: int = 896
    top_k: int = 16
    dense_width: int = 33792
    shared_width: int = 6144
    head_dim: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    rope: int = 64
    blocks: int = 8  # AttnRes blocks at the last layer; its sources are these and the running sum
    vocab: int = 163840

    @property
    def heads(self) -> int:
        return 96 // self.tp

    @property
    def channels(self) -> int:
        """Columns of q, of k, of v and of each KDA gate."""
        return self.heads * self.head_dim

    @property
    def local_experts(self) -> int:
        """Experts of one of ``tp`` expert-parallel ranks."""
        return self.num_experts // self.tp


FULL = K3()
TP8 = K3(tp=8)

DECODE_BATCHES = (1, 4, 16, 64, 256)
MOE_TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
DENSE_TOKENS = (1, 4, 16, 64)

# Lengths of packed sequences that hit every border of a chunk of 16 and of 64, singly and together.
BORDER_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
MIXED_LENGTHS = (1, 1, 5, 1, 64, 2, 1, 129)
