"""Compiles every source with nvcc and ninja and links the module `_C`; _build.py calls it at first use, setup.py ahead
of time, csrc/check_build.py to read what the compiler says.

Standard library only (and pybind11 and ninja when it compiles), and importable by file path for setup.py.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

if __package__:
    from kimi_kernels import _env as env
    from kimi_kernels import _sources as sources
else:  # setup.py loads this file by path, with the two put into sys.modules before
    import _env as env  # type: ignore[no-redef]
    import _sources as sources  # type: ignore[no-redef]

MODULE_FILE = "_C" + sysconfig.get_config_var("EXT_SUFFIX")


class BuildError(RuntimeError):
    """The compiled module is not there and could not be built; the message says what is missing."""


def chosen_archs() -> tuple[str, ...]:
    """KIMI_KERNELS_ARCHS in the order of ALL_ARCHS; empty when it is not set."""
    return env.items("KIMI_KERNELS_ARCHS", sources.ALL_ARCHS)


def compile_module(
    build: Path, archs: tuple[str, ...], *, built: str, extra: list[str] | None = None, jobs: int | None = None
) -> Path:
    """Compiles every source for `archs` with ninja in the folder `build` and links the module there. Returns its path.

    `jobs` sources at once; None: as MAX_JOBS says, without it as ninja chooses.
    Beside each object `NAME.o` stands `NAME.o.log`, what the compiler said (resources of each kernel among it). Raises
    BuildError with the compiler's output when it fails, or when nvcc, ninja or pybind11 is missing.
    """
    jobs = jobs or env.max_jobs()
    build.mkdir(parents=True, exist_ok=True)
    (build / "build.ninja").write_text(_ninja_file(archs, built, extra or []))
    command = [_ninja(), "-C", str(build), *(["-j", str(jobs)] if jobs else [])]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"the CUDA build failed:\n{result.stdout[-8000:]}{result.stderr[-2000:]}")
    return build / MODULE_FILE


def object_name(source: Path, root: Path) -> str:
    return str(source.relative_to(root)).replace("/", "__") + ".o"


def _ninja_file(archs: tuple[str, ...], built: str, extra: list[str]) -> str:
    import pybind11

    root = sources.csrc_dir()
    folders = (pybind11.get_include(), sysconfig.get_paths()["include"], str(root))
    includes = [f"-I {shlex.quote(folder)}" for folder in folders]
    more = [shlex.quote(flag) for flag in extra]
    defines = [f"-DKIMI_ARCHS='\"{','.join(archs)}\"'", f"-DKIMI_BUILT='\"{built}\"'"]
    lines = [
        f"nvcc = {shlex.quote(require_nvcc())}",
        f"host_flags = {' '.join([*sources.CXX_FLAGS, *includes, *defines, *more])}",
        f"cuda_flags = {' '.join([*sources.CUDA_FLAGS, includes[-1], *more])}",
        "rule host",
        "  command = $nvcc $host_flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule cuda",
        "  command = $nvcc $cuda_flags $gencode -MD -MF $out.d -c $in -o $out"
        " > $out.log 2>&1 || { cat $out.log; exit 1; }",
        "  depfile = $out.d",
        "rule link",
        f"  command = $nvcc {' '.join(sources.LINK_FLAGS)} $in -o $out",
    ]
    objects = []
    for source in sources.host_sources(root) + sources.device_sources(root):
        name = object_name(source, root)
        objects.append(name)
        escaped = str(source).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
        lines.append(f"build {name}: {'cuda' if source.suffix == '.cu' else 'host'} {escaped}")
        if source.suffix == ".cu":
            lines.append(f"  gencode = {' '.join(sources.gencode_flags(source, archs)) or '-arch=sm_90'}")
    lines.append(f"build {MODULE_FILE}: link {' '.join(objects)}")
    return "\n".join([*lines, f"default {MODULE_FILE}", ""])


def extra_flags() -> list[str]:
    """KIMI_KERNELS_NVCC_FLAGS: added to every compilation, and a prebuilt module is then not used."""
    return shlex.split(env.text("KIMI_KERNELS_NVCC_FLAGS"))


def require_nvcc() -> str:
    """nvcc, of a version that knows the architectures. BuildError that says which one is needed."""
    nvcc = sources.find_nvcc()
    if nvcc is None:
        raise BuildError(
            "the CUDA kernels are not built and nvcc was not found (looked at CUDA_HOME, PATH, /usr/local/cuda). "
            "Install the CUDA toolkit 13 and call again, or install a wheel with kernels, or use CPU tensors."
        )
    text = sources.nvcc_version(nvcc)
    release = re.search(r"release (\d+)\.(\d+)", text)
    if release is None or int(release[1]) < sources.CUDA_MAJOR:
        found = f"is {release[1]}.{release[2]}" if release else f"calls itself {text!r}"
        raise BuildError(
            f"building the CUDA kernels needs nvcc {sources.CUDA_MAJOR}.0 or later, {nvcc} {found}. Install the CUDA "
            f"toolkit {sources.CUDA_MAJOR} and name it in CUDA_HOME; KIMI_KERNELS_NO_CUDA=1 installs without kernels."
        )
    return nvcc


def host_compiler() -> str:
    name = os.environ.get("CXX", "g++")
    return shutil.which(name) or _missing(f"the C++ compiler {name}")


def _ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    return str(beside) if beside.is_file() else shutil.which("ninja") or _missing("ninja")


def pybind11_version() -> str:
    try:
        return importlib.import_module("pybind11").__version__
    except ImportError:
        return _missing("pybind11")


def _missing(tool: str) -> str:
    raise BuildError(f"building the CUDA kernels needs {tool}, which was not found")
