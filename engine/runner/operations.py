"""Whether a CUDA device can run what a model needs, asked once at start instead of in the middle of a request."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from engine.config import ModelConfig
from kimi_kernels import KernelUnavailableError, kernel_operations, reference_operations


def needed_operations(config: ModelConfig) -> frozenset[str]:
    """The operations of ``kimi_kernels`` that a forward pass of this model calls."""
    names = {"attn_res.mix", "dense.linear"}
    if config.kda_layers:
        names |= {"kda.decode_", "kda.prefill_"}
    if config.mla_layers:
        names |= {"mla.store_", "mla.decode", "mla.prefill", "norm.rms"}
    if any(config.is_moe(i) for i in range(config.num_hidden_layers)):
        names |= {"routing.topk", "moe.experts", "norm.rms"}
    return frozenset(names)


def missing_operations(config: ModelConfig) -> list[str]:
    """Those of them that neither a kernel nor KIMI_KERNELS_REFERENCE serves on CUDA, sorted.

    Loads the compiled module unless the reference serves all; KernelUnavailableError when it cannot be had.
    """
    open_names = needed_operations(config) - reference_operations()
    return sorted(open_names - kernel_operations()) if open_names else []


def require_operations(config: ModelConfig) -> None:
    """KernelUnavailableError naming every missing operation, and what would run them all."""
    missing = missing_operations(config)
    if missing:
        chosen = ",".join(sorted({*missing, *reference_operations()}))
        raise KernelUnavailableError(
            f"this build has no CUDA kernel for {', '.join(missing)}, which the model needs. "
            f"KIMI_KERNELS_REFERENCE={chosen} runs the plain-torch reference for them (slow); "
            "--device cpu runs the model on the CPU"
        )


def use_reference_where_missing(model_dir: Path, device: str = "auto") -> None:
    """For smoke runs and the demo, which show that everything plays together: on a GPU, set KIMI_KERNELS_REFERENCE for
    this process and its children to the operations that have no kernel yet, unless it is set, and say so on stderr.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return
    if "KIMI_KERNELS_REFERENCE" not in os.environ:
        os.environ["KIMI_KERNELS_REFERENCE"] = ",".join(missing_operations(ModelConfig.from_dir(model_dir)))
        reference_operations.cache_clear()
    chosen = ", ".join(sorted(reference_operations())) or "nothing"
    print(f"on the GPU the plain-torch reference runs {chosen}; kernels run the rest", file=sys.stderr)
