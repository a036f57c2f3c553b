"""Operations of Kimi K3, one public function each: CUDA kernels, with a plain-torch reference for the CPU.

Families are loaded on first use; importing the package touches neither CUDA nor the compiled module.

On CUDA an operation starts while the one before it on the stream still ends (programmatic dependent launch). Inputs and
states wait for that; weights and biases do not: after writing one, synchronise before the next call that reads it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kimi_kernels._dispatch import KernelUnavailableError, kernel_operations, reference_operations

FAMILIES = ("routing", "moe", "kda", "attn_res", "mla", "dense", "norm", "quant", "meta")

__all__ = ["FAMILIES", "KernelUnavailableError", "kernel_operations", "reference_operations"]


def __getattr__(name: str) -> ModuleType:
    if name in FAMILIES or name in ("testing", "reference"):
        return importlib.import_module(f"kimi_kernels.{name}")
    raise AttributeError(f"module 'kimi_kernels' has no attribute {name!r}")
