"""Which implementation runs: a CPU tensor takes the reference, a CUDA tensor the compiled kernel.

``KIMI_KERNELS_REFERENCE`` is the only switch: ``1`` or a comma list of operation names (``moe.experts,kda.decode_``)
that run the reference on CUDA tensors too. It is read once.
"""

from __future__ import annotations

import functools
from typing import Any

from kimi_kernels import _env as env

ENV_NAME = "KIMI_KERNELS_REFERENCE"

OPERATIONS = frozenset(
    (
        "routing.topk",
        "routing.dispatch",
        "attn_res.mix",
        "moe.experts",
        "moe.finalize",
        "kda.decode_",
        "kda.verify",
        "kda.commit_",
        "kda.prefill_",
        "kda.zero_",
        "kda.copy_",
        "mla.decode",
        "mla.prefill",
        "mla.store_",
        "dense.linear",
        "norm.rms",
        "norm.rms_gated",
        "norm.rms_fp8",
        "quant.fp8_per_token_group",
        "quant.mxfp8",
        "quant.mxfp4_dequant",
        "meta.step",
    )
)


# Served on CUDA by a library behind the same function, as long as no kernel of ours beats it.
LIBRARIES = {"dense.linear": "cuBLAS"}
# Operations whose compiled function is not called like them.
_FUNCTIONS = {"norm.rms_fp8": "norm_rms"}


class KernelUnavailableError(RuntimeError):
    """A CUDA tensor was given to an operation that has no compiled kernel for it."""


@functools.cache
def reference_operations() -> frozenset[str]:
    """Operations that KIMI_KERNELS_REFERENCE sends to the reference on CUDA. ValueError on an unknown name."""
    text = env.text(ENV_NAME).strip()
    if text in ("", "0"):
        return frozenset()
    if text == "1":
        return OPERATIONS
    names = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(names - OPERATIONS)
    if unknown:
        known = ", ".join(sorted(OPERATIONS))
        raise ValueError(f"{ENV_NAME}: expected 1 or a comma list of {known}; got unknown {', '.join(unknown)}")
    return frozenset(names)


def use_reference(operation: str, x: Any) -> bool:
    """True when ``operation`` on ``x`` (its first tensor) runs the plain-torch reference. TypeError on no tensor."""
    if getattr(x, "is_cpu", False):
        return True
    if not (getattr(x, "is_cuda", False) or hasattr(x, "__cuda_array_interface__")):
        got = f"a tensor on {x.device}" if hasattr(x, "is_cpu") else type(x).__name__
        raise TypeError(f"{operation}: expected a torch tensor on the CPU or CUDA, or a CUDA array, got {got}")
    return operation in reference_operations()


def no_kernel(operation: str, x: Any) -> KernelUnavailableError:
    """The error for a CUDA call without a kernel; the caller raises it."""
    where = getattr(x, "device", type(x).__name__)
    return KernelUnavailableError(
        f"{operation}: no compiled kernel for {where}. CPU tensors run the plain-torch reference; on CUDA set "
        f"{ENV_NAME}={operation} to run the reference (slow), or install a build that has this kernel"
    )


def compiled_function(operation: str) -> str:
    """The function of the compiled module that runs ``operation``: kda.decode_ is kda_decode."""
    return _FUNCTIONS.get(operation, operation.replace(".", "_").rstrip("_"))


def kernel_operations() -> frozenset[str]:
    """Operations that CUDA tensors can run without the reference: with a compiled kernel, or served by a library.

    Loads the compiled module, which builds it at first use. KernelUnavailableError when there is none.
    """
    from kimi_kernels import _ops  # it imports this module

    compiled = set(dir(_ops.module()))
    return frozenset(name for name in OPERATIONS if name in LIBRARIES or compiled_function(name) in compiled)
