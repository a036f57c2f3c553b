"""Builds the CUDA kernels ahead of time when nvcc is there; everything else about the package is in pyproject.toml.

KIMI_KERNELS_NO_CUDA=1 skips the CUDA build, KIMI_KERNELS_ARCHS chooses architectures, MAX_JOBS limits how many sources
are compiled at once (kimi_kernels/_env.py). Without nvcc the package installs with the CPU reference only; a machine
with a GPU and nvcc then builds at the first CUDA call (kimi_kernels/_build.py).
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_by_path(name: str) -> ModuleType:
    """A module of the package without importing the package, which needs torch."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "kimi_kernels" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


sources = load_by_path("_sources")
env = load_by_path("_env")
compiler = load_by_path("_compile")


def with_kernels() -> bool:
    if env.flag("KIMI_KERNELS_NO_CUDA"):
        print("kimi_kernels: KIMI_KERNELS_NO_CUDA=1, installing the CPU reference without CUDA kernels")
        return False
    if sources.find_nvcc() is None:
        print("kimi_kernels: nvcc not found, installing the CPU reference without CUDA kernels")
        return False
    return True


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.build_temp).resolve() / "kernels"
        archs = compiler.chosen_archs() or sources.ALL_ARCHS
        print(f"kimi_kernels: compiling for {', '.join(archs)}", flush=True)
        module = compiler.compile_module(folder, archs, built="ahead of time", extra=compiler.extra_flags())
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(module, target)


class BuildWithSources(build_py):
    """Puts csrc into the package as `_csrc`, so that an installed package can build at first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "kimi_kernels" / "_csrc"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / "csrc", target, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))


setup(
    ext_modules=[Extension("kimi_kernels._C", sources=[])] if with_kernels() else [],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildWithSources},
)
