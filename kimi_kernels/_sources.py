"""The one list of sources, architectures and flags: setup.py (ahead of time), _build.py (at run time) and the build
check all read it. Standard library only, and importable by file path: setup.py runs before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CUDA_MAJOR = 13  # the oldest toolkit that the kernels are built and checked with

# nvcc's name of each architecture -> the real architectures in the binary. One front-end pass serves both sm_100f and
# sm_103f. Tensor-core instructions exist only for the `a` and `f` targets.
GENCODE = {
    "90a": ("arch=compute_90a,code=sm_90a", ("sm_90a",)),
    "100f": ("arch=compute_100f,code=[sm_100f,sm_103f]", ("sm_100f", "sm_103f")),
}
ALL_ARCHS = ("sm_90a", "sm_100f", "sm_103f")
ARCH_OF = {(9, 0): "sm_90a", (10, 0): "sm_100f", (10, 3): "sm_103f"}  # by compute capability

CXX_FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
CUDA_FLAGS = [*CXX_FLAGS, "--expt-relaxed-constexpr", "-lineinfo", "-Xptxas", "-v"]
LINK_FLAGS = ["-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL"]


def csrc_dir() -> Path:
    """The C++ and CUDA sources: inside an installed package `_csrc`, in a checkout `csrc` beside the package."""
    package = Path(__file__).resolve().parent
    inside = package / "_csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


def host_sources(root: Path) -> list[Path]:
    """bindings.cpp, common/*.cpp and every family's api.cpp."""
    return sorted(root.rglob("*.cpp"))


def device_sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.cu"))


def passes(source: Path, archs: tuple[str, ...]) -> list[str]:
    """nvcc passes of one .cu file: sm90_* and sm100_* hold one chip's instructions, the rest is portable."""
    if source.name.startswith("sm90_"):
        wanted = ["90a"]
    elif source.name.startswith("sm100_"):
        wanted = ["100f"]
    else:
        wanted = ["90a", "100f"]
    return [name for name in wanted if set(GENCODE[name][1]) & set(archs)]


def gencode_flags(source: Path, archs: tuple[str, ...]) -> list[str]:
    """-gencode options of one .cu file. A file with nothing for these archs is still compiled, for the host part."""
    flags = []
    for name in passes(source, archs):
        arch = GENCODE[name][0].split(",")[0]
        codes = [code for code in GENCODE[name][1] if code in archs]
        flags += ["-gencode", f"{arch},code=[{','.join(codes)}]"]
    return flags


def find_nvcc() -> str | None:
    """nvcc from CUDA_HOME, the PATH or the usual place; None when there is none."""
    import os

    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for candidate in ([str(Path(home) / "bin" / "nvcc")] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        found = shutil.which(candidate)
        if found:
            return found
    return None


def nvcc_version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout.strip()
