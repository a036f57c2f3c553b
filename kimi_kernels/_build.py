"""Finds the compiled module `_C`, or has it built.

`load()` gives the module: the prebuilt one beside this file, else one built with nvcc and ninja into a cache keyed by
sources, flags, compilers, architectures and Python ABI.
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
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from kimi_kernels import _env as env
from kimi_kernels import _sources as sources
from kimi_kernels._compile import (
    MODULE_FILE,
    BuildError,
    chosen_archs,
    compile_module,
    extra_flags,
    host_compiler,
    pybind11_version,
    require_nvcc,
)

_loaded: ModuleType | None = None
_lock = threading.Lock()


def load() -> ModuleType:
    """The compiled module. The first call in a process may build it, with a progress line on stderr."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _import_prebuilt() or _import_file(_built_module())
    return _loaded


def prebuilt_path() -> Path | None:
    """The module that was installed with the package; None without one, or when extra flags ask for another."""
    path = Path(__file__).resolve().parent / MODULE_FILE
    return path if path.is_file() and not extra_flags() else None


def build_info() -> dict[str, object]:
    """What the compiled module was built for, without building one: `built` is "ahead of time", "at first use" or "not
    built", `archs` the architectures by name (sm_90a ...), `cuda` the toolkit version, `path` the file."""
    path = prebuilt_path()
    if path is None:
        with contextlib.suppress(BuildError, OSError, subprocess.SubprocessError):
            candidate = cache_root() / cache_key(_wanted_archs()) / MODULE_FILE
            path = candidate if candidate.is_file() else None
    if path is None:
        return {"built": "not built", "archs": [], "cuda": None, "path": None, "nvcc": sources.find_nvcc()}
    info = (_loaded or _import_file(path)).build_info()
    cuda = f"{info['cuda'] // 1000}.{info['cuda'] % 1000 // 10}"
    return {"built": info["built"], "archs": info["archs"].split(","), "cuda": cuda, "path": str(path)}


def _import_prebuilt() -> ModuleType | None:
    path = prebuilt_path()
    if path is None:
        return None
    module = _import_file(path)
    built, device = module.build_info()["archs"].split(","), _device_arch()
    if device is not None and device not in built:
        raise BuildError(f"{path} was built for {', '.join(built)}; this device needs {device}: install again for it")
    return module


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
    chosen = env.text("KIMI_KERNELS_CACHE")
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
    nvcc = require_nvcc()
    host = subprocess.run([host_compiler(), "--version"], check=True, capture_output=True, text=True).stdout
    flags = [*sources.CXX_FLAGS, *sources.CUDA_FLAGS, *sources.LINK_FLAGS, *extra_flags()]
    for part in (sources.nvcc_version(nvcc), host, " ".join(flags), ",".join(archs), MODULE_FILE, pybind11_version()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _built_module() -> Path:
    archs = _wanted_archs()
    entry = cache_root() / cache_key(archs)
    if (entry / MODULE_FILE).is_file():
        return entry / MODULE_FILE
    _make_writable(entry.parent)
    with _file_lock(entry.with_suffix(".lock")):
        if not (entry / MODULE_FILE).is_file():  # else another process built it while this one waited
            for left in entry.parent.glob(f"{entry.name}-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            build = Path(tempfile.mkdtemp(prefix=f"{entry.name}-build-", dir=entry.parent))
            try:
                print(
                    f"kimi_kernels: no prebuilt module; compiling the CUDA kernels for {', '.join(archs)} once ...",
                    file=sys.stderr,
                    flush=True,
                )
                module = compile_module(build, archs, built="at first use", extra=extra_flags())
                _publish(module, entry)
                print(f"kimi_kernels: kernels compiled into {entry}", file=sys.stderr, flush=True)
            finally:
                shutil.rmtree(build, ignore_errors=True)
    return entry / MODULE_FILE


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write there"
    except OSError as error:
        reason = str(error)
    if reason:
        raise BuildError(
            f"the CUDA kernels are not built and the cache folder {folder} cannot be written ({reason}); "
            "set KIMI_KERNELS_CACHE to a folder that can"
        )


def _publish(module: Path, entry: Path) -> None:
    """One atomic rename: whoever finds the entry finds it whole, also after a power cut."""
    staged = Path(tempfile.mkdtemp(prefix=f"{entry.name}-new-", dir=entry.parent))
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


def _wanted_archs() -> tuple[str, ...]:
    """What a build at first use is for: KIMI_KERNELS_ARCHS, else the device's, without a device all of them."""
    chosen, device = chosen_archs(), _device_arch()
    if chosen and device is not None and device not in chosen:
        raise BuildError(f"KIMI_KERNELS_ARCHS is {','.join(chosen)}, this device needs {device}")
    return chosen or ((device,) if device else sources.ALL_ARCHS)


def _device_arch() -> str | None:
    """The architecture of the current CUDA device; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    if capability not in sources.ARCH_OF:
        raise BuildError(
            f"no kernels for compute capability {capability[0]}.{capability[1]}; supported: "
            + ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in sources.ARCH_OF.items())
        )
    return sources.ARCH_OF[capability]
