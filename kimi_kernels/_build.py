"""Finds or builds the compiled module `_C`.

`load()` gives the module: the prebuilt one beside this file, else one built with nvcc and ninja into a cache keyed by
sources, flags, compilers, architectures and Python ABI. `compile_module()` is the build itself, also used by setup.py,
so this file needs the standard library only (and pybind11 and ninja when it builds).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

if __package__:
    from kimi_kernels import _sources as sources
else:  # setup.py loads this file by path, with _sources.py put into sys.modules before
    import _sources as sources  # type: ignore[no-redef]

MODULE_FILE = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
_loaded: ModuleType | None = None
_lock = threading.Lock()


class BuildError(RuntimeError):
    """The compiled module is not there and could not be built; the message says what is missing."""


def load() -> ModuleType:
    """The compiled module. The first call in a process may build it, with a progress line on stderr."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _import_prebuilt() or _import_file(_built_module())
    return _loaded


def prebuilt_path() -> Path | None:
    """The module that was installed with the package, or None."""
    path = Path(__file__).resolve().parent / MODULE_FILE
    return path if path.is_file() else None


def build_info() -> dict[str, object]:
    """What the compiled module was built for, without building one: `built` is "ahead of time", "at first use" or "not
    built", `archs` the architectures by name, `cuda` the toolkit version, `path` the file."""
    path = prebuilt_path()
    if path is None:
        with contextlib.suppress(BuildError, OSError, subprocess.SubprocessError):
            candidate = cache_root() / cache_key(_device_archs()) / MODULE_FILE
            path = candidate if candidate.is_file() else None
    if path is None or _extra_flags():
        return {"built": "not built", "archs": [], "cuda": None, "path": None, "nvcc": sources.find_nvcc()}
    info = (_loaded or _import_file(path)).build_info()
    cuda = f"{info['cuda'] // 1000}.{info['cuda'] % 1000 // 10}"
    return {"built": info["built"], "archs": info["archs"].split(","), "cuda": cuda, "path": str(path)}


def _import_prebuilt() -> ModuleType | None:
    path = prebuilt_path()
    return _import_file(path) if path is not None and not _extra_flags() else None


def _import_file(path: Path) -> ModuleType:
    name = "kimi_kernels._C"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} is not a Python extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


# ---- the cache ----------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """KIMI_KERNELS_CACHE, or kimi_kernels in the user's cache folder."""
    chosen = os.environ.get("KIMI_KERNELS_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kimi_kernels"


def cache_key(archs: tuple[str, ...]) -> str:
    """Hash of everything that decides what the compiler would write."""
    root = sources.csrc_dir()
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".cpp", ".cu", ".h", ".cuh"}):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    nvcc = _require_nvcc()
    host = subprocess.run([_host_compiler(), "--version"], check=True, capture_output=True, text=True).stdout
    flags = [*sources.CUDA_FLAGS, *sources.LINK_FLAGS, *_extra_flags()]
    for part in (sources.nvcc_version(nvcc), host, " ".join(flags), ",".join(archs), MODULE_FILE, _pybind11_version()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _built_module() -> Path:
    archs = _device_archs()
    entry = cache_root() / cache_key(archs)
    if (entry / MODULE_FILE).is_file():
        return entry / MODULE_FILE
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(entry.with_suffix(".lock")):
        if not (entry / MODULE_FILE).is_file():  # else another process built it while this one waited
            build = Path(tempfile.mkdtemp(prefix="build-", dir=entry.parent))
            try:
                print(
                    f"kimi_kernels: no prebuilt module; compiling the CUDA kernels for {', '.join(archs)} once ...",
                    file=sys.stderr,
                    flush=True,
                )
                module = compile_module(build, archs, built="at first use", extra=_extra_flags())
                _publish(module, entry)
                print(f"kimi_kernels: kernels compiled into {entry}", file=sys.stderr, flush=True)
            finally:
                shutil.rmtree(build, ignore_errors=True)
    return entry / MODULE_FILE


def _publish(module: Path, entry: Path) -> None:
    """One atomic rename: whoever finds the entry finds it whole, also after a power cut."""
    staged = Path(tempfile.mkdtemp(prefix="entry-", dir=entry.parent))
    shutil.copy2(module, staged / MODULE_FILE)
    for path in (staged / MODULE_FILE, staged):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    staged.chmod(0o755)
    os.rename(staged, entry)


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the file is closed, also when the process dies
        yield


def _device_archs() -> tuple[str, ...]:
    """The architecture of the first visible device; without a device all of them."""
    import torch

    if not torch.cuda.is_available():
        return sources.ALL_ARCHS
    capability = torch.cuda.get_device_capability()
    known = {(9, 0): "sm_90a", (10, 0): "sm_100f", (10, 3): "sm_103f"}
    if capability not in known:
        raise BuildError(
            f"no kernels for compute capability {capability[0]}.{capability[1]}; supported: "
            + ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in known.items())
        )
    return (known[capability],)


# ---- the build ------------------------------------------------------------------------------------------------------


def compile_module(
    build: Path, archs: tuple[str, ...], *, built: str, extra: list[str] | None = None, jobs: int | None = None
) -> Path:
    """Compiles every source for `archs` with ninja in the folder `build` and links the module there. Returns its path.

    Raises BuildError with the compiler's output when it fails, or when nvcc, ninja or pybind11 is missing.
    """
    build.mkdir(parents=True, exist_ok=True)
    (build / "build.ninja").write_text(_ninja_file(archs, built, extra or []))
    command = [_ninja(), "-C", str(build), *(["-j", str(jobs)] if jobs else [])]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"the CUDA build failed:\n{result.stdout[-8000:]}{result.stderr[-2000:]}")
    return build / MODULE_FILE


def _ninja_file(archs: tuple[str, ...], built: str, extra: list[str]) -> str:
    import pybind11

    root = sources.csrc_dir()
    includes = ["-I", pybind11.get_include(), "-I", sysconfig.get_paths()["include"], "-I", str(root)]
    defines = [f"-DKIMI_ARCHS='\"{','.join(archs)}\"'", f"-DKIMI_BUILT='\"{built}\"'"]
    lines = [
        f"nvcc = {_require_nvcc()}",
        f"host_flags = {' '.join([*sources.CXX_FLAGS, *includes, *defines, *extra])}",
        f"cuda_flags = {' '.join([*sources.CUDA_FLAGS, '-I', str(root), *extra])}",
        "rule host",
        "  command = $nvcc $host_flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule cuda",
        "  command = $nvcc $cuda_flags $gencode -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = $nvcc {' '.join(sources.LINK_FLAGS)} $in -o $out",
    ]
    objects = []
    for source in sources.host_sources(root) + sources.device_sources(root):
        name = str(source.relative_to(root)).replace("/", "__") + ".o"
        objects.append(name)
        lines.append(f"build {name}: {'cuda' if source.suffix == '.cu' else 'host'} {source}")
        if source.suffix == ".cu":
            lines.append(f"  gencode = {' '.join(sources.gencode_flags(source, archs)) or '-arch=sm_90'}")
    lines.append(f"build {MODULE_FILE}: link {' '.join(objects)}")
    return "\n".join([*lines, f"default {MODULE_FILE}", ""])


def _extra_flags() -> list[str]:
    """KIMI_KERNELS_NVCC_FLAGS: added to every compilation, and a prebuilt module is then not used."""
    return os.environ.get("KIMI_KERNELS_NVCC_FLAGS", "").split()


def _require_nvcc() -> str:
    nvcc = sources.find_nvcc()
    if nvcc is None:
        raise BuildError(
            "the CUDA kernels are not built and nvcc was not found (looked at CUDA_HOME, PATH, /usr/local/cuda). "
            "Install the CUDA toolkit 13 and call again, or install a wheel with kernels, or use CPU tensors."
        )
    return nvcc


def _host_compiler() -> str:
    return shutil.which(os.environ.get("CXX", "g++")) or _missing("g++")


def _ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    return str(beside) if beside.is_file() else shutil.which("ninja") or _missing("ninja")


def _pybind11_version() -> str:
    try:
        return importlib.import_module("pybind11").__version__
    except ImportError:
        return _missing("pybind11")


def _missing(tool: str) -> str:
    raise BuildError(f"building the CUDA kernels needs {tool}, which was not found")
