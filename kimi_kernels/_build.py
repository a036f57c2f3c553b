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
import shlex
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
    from kimi_kernels import _env as env
    from kimi_kernels import _sources as sources
else:  # setup.py loads this file by path, with the two put into sys.modules before
    import _env as env  # type: ignore[no-redef]
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
    chosen = env.get("KIMI_KERNELS_CACHE")
    if chosen:
        return Path(str(chosen))
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
    flags = [*sources.CXX_FLAGS, *sources.CUDA_FLAGS, *sources.LINK_FLAGS, *extra_flags()]
    for part in (sources.nvcc_version(nvcc), host, " ".join(flags), ",".join(archs), MODULE_FILE, _pybind11_version()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _built_module() -> Path:
    archs = _wanted_archs()
    entry = cache_root() / cache_key(archs)
    if (entry / MODULE_FILE).is_file():
        return entry / MODULE_FILE
    entry.parent.mkdir(parents=True, exist_ok=True)
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


def chosen_archs() -> tuple[str, ...]:
    """KIMI_KERNELS_ARCHS in the order of ALL_ARCHS; empty when it is not set."""
    chosen = str(env.get("KIMI_KERNELS_ARCHS") or "").split(",")
    return tuple(arch for arch in sources.ALL_ARCHS if arch in chosen)


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


# ---- the build ------------------------------------------------------------------------------------------------------


def compile_module(
    build: Path, archs: tuple[str, ...], *, built: str, extra: list[str] | None = None, jobs: int | None = None
) -> Path:
    """Compiles every source for `archs` with ninja in the folder `build` and links the module there. Returns its path.

    Beside each object `NAME.o` stands `NAME.o.log`, what the compiler said (resources of each kernel among it). Raises
    BuildError with the compiler's output when it fails, or when nvcc, ninja or pybind11 is missing.
    """
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
        lines.append(f"build {name}: {'cuda' if source.suffix == '.cu' else 'host'} {source}")
        if source.suffix == ".cu":
            lines.append(f"  gencode = {' '.join(sources.gencode_flags(source, archs)) or '-arch=sm_90'}")
    lines.append(f"build {MODULE_FILE}: link {' '.join(objects)}")
    return "\n".join([*lines, f"default {MODULE_FILE}", ""])


def extra_flags() -> list[str]:
    """KIMI_KERNELS_NVCC_FLAGS: added to every compilation, and a prebuilt module is then not used."""
    return shlex.split(str(env.get("KIMI_KERNELS_NVCC_FLAGS")))


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
