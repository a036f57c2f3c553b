"""``kimi-engine doctor``: what is here, what is missing, and how to get it. Needs no GPU and builds nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

from engine import env
from engine.version import VERSION

REQUIRED = ("torch", "numpy", "safetensors", "tqdm", "tiktoken", "tokenizers")
BUILD = ("pybind11", "ninja")
SERVER = ("fastapi", "uvicorn", "prometheus-client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--environment", action="store_true", help="also list every environment switch")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 unless a package that everything needs is missing."""
    missing: list[str] = []
    print(f"kimi-engine {VERSION}")
    print(f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    required_missing = _packages(missing)
    device_arch = _device(missing)
    archs = _compiled_module(missing, device_arch)
    _kernels(archs)
    _switches(args.environment)
    print("\nmissing:" if missing else "\nnothing is missing")
    for line in missing:
        print(f"  - {line}")
    return 1 if required_missing else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(missing: list[str]) -> bool:
    """Print versions; True when a package that everything needs is missing."""
    print("\npackages")
    for package in (*REQUIRED, *BUILD, *SERVER):
        print(f"  {package:18} {_version(package) or 'not installed'}")
    for package in REQUIRED:
        if _version(package) is None:
            missing.append(f"{package}: pip install {package}")
    required_missing = bool(missing)
    if any(_version(package) is None for package in SERVER):
        missing.append("packages of `kimi-engine serve`: pip install 'kimi-kernels[server]'")
    return required_missing


def _device(missing: list[str]) -> str | None:
    """Print the device; the architecture its kernels need, None without a device we have kernels for."""
    print("\ndevice")
    if importlib.util.find_spec("torch") is None:
        print("  unknown: torch is not installed")
        return None
    import torch

    from kimi_kernels._sources import ARCH_OF

    print(f"  torch built for    {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU only'}")
    if not torch.cuda.is_available():
        print("  CUDA device        none: models run on the CPU, with the plain-torch reference operations")
        if shutil.which("nvidia-smi") and not torch.version.cuda:
            missing.append("a torch with CUDA: there is an NVIDIA driver, but torch is a CPU build")
        return None
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        name = ARCH_OF.get((p.major, p.minor), "no kernels for it")
        print(f"  cuda:{index}             {p.name}, {p.total_memory / 2**30:.1f} GiB, {p.major}.{p.minor} ({name})")
    first = torch.cuda.get_device_capability(0)
    if first not in ARCH_OF:
        known = ", ".join(f"{a}.{b} ({name})" for (a, b), name in ARCH_OF.items())
        missing.append(f"kernels for compute capability {first[0]}.{first[1]}; there are kernels for {known}")
    return ARCH_OF.get(first)


def _compiled_module(missing: list[str], device_arch: str | None) -> list[str]:
    """Print compiler and compiled module; the architectures built."""
    from kimi_kernels import _build, _sources

    print("\ncompiler and compiled module")
    nvcc = _sources.find_nvcc()
    print(f"  nvcc               {nvcc_version(str(nvcc)) if nvcc else 'not found'}")
    print(f"  C++ compiler       {shutil.which('c++') or shutil.which('g++') or 'not found'}")
    try:
        info = _build.build_info()
    except (ImportError, OSError) as error:
        print(f"  kimi_kernels._C    cannot be loaded: {error}")
        missing.append("a kimi_kernels._C that loads: pip install . again, with this Python")
        return []
    print(f"  kimi_kernels._C    {info['built']}" + (f", CUDA {info['cuda']}, {info['path']}" if info["path"] else ""))
    archs = [str(arch) for arch in info["archs"]]  # type: ignore[attr-defined]
    print(f"  architectures      {', '.join(archs) or 'none'}")
    if not archs:
        if nvcc is None:
            missing.append(
                "CUDA kernels: install the CUDA toolkit 13 (nvcc), or set CUDA_HOME to it, then pip install ."
            )
        else:
            missing.append(
                "CUDA kernels: not built yet; pip install . builds them all, the first CUDA call its device's"
            )
    elif device_arch and device_arch not in archs:
        missing.append(f"kernels for this device ({device_arch}): pip install . with nvcc builds them")
    return archs


def nvcc_version(nvcc: str) -> str:
    """``nvcc``'s release and path, or why it does not run."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{nvcc} does not run: {error}"
    release = [line.partition("release ")[2].split(",")[0] for line in text.splitlines() if "release" in line]
    return f"{release[0] if release else 'unknown release'}, {nvcc}"


def _kernels(archs: list[str]) -> None:
    """Print for each operation what runs it on a CUDA device; on the CPU it is always the reference."""
    from kimi_kernels import _dispatch, reference_operations

    print("\noperations on a CUDA device (on the CPU: the plain-torch reference)")
    forced = reference_operations()
    compiled = set(dir(sys.modules.get("kimi_kernels._C"))) if archs else set()
    for name in sorted(_dispatch.OPERATIONS):
        print(f"  {name:28} {kernel_state(name, compiled, name in forced)}")


def kernel_state(operation: str, compiled: set[str], forced: bool) -> str:
    """What a CUDA tensor gets from ``operation``; ``compiled`` are the functions of the compiled module."""
    from kimi_kernels import _dispatch

    if forced:
        return "reference (KIMI_KERNELS_REFERENCE)"
    if operation in _dispatch.LIBRARIES:
        return f"{_dispatch.LIBRARIES[operation]} through torch"
    if not compiled:
        return "not built"
    return "kernel" if _dispatch.compiled_function(operation) in compiled else "no kernel in this build"


def _switches(everything: bool) -> None:
    active = [name for name in env.SWITCHES if os.environ.get(name)]
    print("\nenvironment switches set: " + (", ".join(active) or "none"))
    if everything:
        print(env.describe())
