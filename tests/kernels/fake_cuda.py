"""CUDA arrays without memory or a device, for the argument checks of the compiled module, which end before a launch."""

from __future__ import annotations

import ctypes
import math

CUDA = 2  # DLPack's number of the device type
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
_CAPSULE_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor, its nested structs written flat."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class FakeCuda:
    """``dtype`` as DLPack names it (float32, bfloat16, int32, uint8, bool8); ``strides`` None: contiguous."""

    is_cpu = False
    is_cuda = True

    def __init__(
        self, *shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None, device: int = 0
    ) -> None:
        self.shape, self.dtype, self.index = shape, dtype, device
        kind = dtype.rstrip("0123456789")
        dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        numbers = ctypes.c_int64 * len(shape)
        self._keep = (numbers(*shape), numbers(*(strides or dense)))
        address = [ctypes.addressof(values) for values in self._keep]
        fields = (
            4096,
            CUDA,
            device,
            len(shape),
            _CODES[kind],
            int(dtype.removeprefix(kind)),
            1,
            *address,
            0,
            None,
            None,
        )
        self._managed = _Managed(*fields)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.index

    def __dlpack__(self, *, stream: int) -> object:
        assert stream == -1  # no synchronisation
        return _new_capsule(ctypes.addressof(self._managed), _CAPSULE_NAME, None)
