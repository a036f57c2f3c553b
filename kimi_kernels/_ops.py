"""Calls into the compiled module: registration with torch.library, and the same call for cupy arrays.

Every operation of `_C` writes into arrays that the caller gives and returns nothing; the public functions allocate.
So one schema line registers an operation for torch (dispatch, fake tensors, torch.compile), and cupy arrays go to the
same C++ function directly. Tensors cross through DLPack, the launch goes to the framework's current stream.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from kimi_kernels import _build
from kimi_kernels._dispatch import KernelUnavailableError

_library = torch.library.Library("kimi_kernels", "DEF")


def define(schema: str) -> None:
    """Register `name(Tensor x, Tensor(a!) out, ...) -> ()`: the arguments of `_C.name`, in its order.

    The schema says which arguments are written; there is no result, so the fake implementation has nothing to do.
    """
    name = schema[: schema.index("(")]
    _library.define(schema)
    _library.impl(name, functools.partial(_run, name), "CUDA")
    torch.library.register_fake(f"kimi_kernels::{name}", lambda *args, **kwargs: None, lib=_library)


def call(name: str, *args: Any) -> None:
    """Run an operation; the first argument decides whose: torch's dispatcher, or the compiled module for cupy."""
    if isinstance(args[0], torch.Tensor):
        _overload(name)(*args)
    else:
        _run(name, *args)


def empty(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """An uninitialised array, framework and device of `like`. cupy has no FP8 or E8M0: bytes stand there."""
    if isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=dtype, device=like.device)
    cupy = _cupy(like)
    with like.device:
        if dtype == torch.bfloat16:  # cupy's own name of it, or its bits as uint16: as the caller holds it
            dtype = like.dtype
        return cupy.empty(shape, dtype=_CUPY_DTYPES.get(dtype, dtype))


_CUPY_DTYPES = {
    torch.float32: "float32",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.float8_e4m3fn: "uint8",
    torch.float8_e8m0fnu: "uint8",
}


def module() -> ModuleType:
    """The compiled module, built at first use if need be. KernelUnavailableError says what is missing."""
    try:
        return _build.load()
    except _build.BuildError as error:
        raise KernelUnavailableError(str(error)) from error


def _cupy(array: Any) -> ModuleType:
    if not type(array).__module__.startswith("cupy"):
        raise TypeError(f"expected torch tensors or cupy arrays, got {type(array).__name__}")
    import cupy

    return cupy


@functools.cache
def _overload(name: str) -> Any:
    return getattr(torch.ops.kimi_kernels, name).default


@functools.cache
def _function(name: str) -> Any:
    return getattr(module(), name)


def _run(name: str, *args: Any) -> None:
    _function(name)(*args)
