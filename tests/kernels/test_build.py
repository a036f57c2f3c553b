"""Building and finding the compiled module, with a fake nvcc: what is built, where it goes, who waits for whom.

The package's build files run in a small tree of their own; `torch` is a stand-in without a device, which is all that
they ask of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Writes a line to $FAKE_LOG for each call, in one piece since ninja runs several at once, then the object; $FAKE_SLEEP
# makes it slow, $FAKE_FAIL makes it fail.
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake, release ${FAKE_VERSION:-13.0}, V1"; exit 0; fi
call=$(printf "%s|" "$@")
printf "%s\\n" "$call" >> "$FAKE_LOG"
[ -z "$FAKE_SLEEP" ] || sleep "$FAKE_SLEEP"
[ -z "$FAKE_FAIL" ] || { echo "error: no such register"; exit 1; }
while [ $# -gt 0 ]; do
  case "$1" in -o) out=$2;; -MF) dep=$2;; esac
  shift
done
echo "made by the fake" > "$out"
[ -z "$dep" ] || echo "$out:" > "$dep"
"""
NO_NVCC = {"CUDA_HOME": "/nowhere", "PATH": "/usr/bin:/bin"}
BUILT_MODULE = "print(_build._built_module())"
PRELUDE = """
import sys, types
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = torch
from kimi_kernels import _build
"""


class Tree:
    """A copy of the build files with two small sources, and an environment with the fake compiler."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a tree"  # paths may have spaces
        (self.root / "kimi_kernels").mkdir(parents=True)
        for name in ("__init__", "_dispatch", "_env", "_sources", "_compile", "_build"):
            shutil.copy(ROOT / "kimi_kernels" / f"{name}.py", self.root / "kimi_kernels")
        listed = self.root / "kimi_kernels" / "_sources.py"  # a toolkit of this machine must not be found
        listed.write_text(listed.read_text().replace("/usr/local/cuda/", "/nowhere/"))
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, self.root)
        (self.root / "csrc" / "norm").mkdir(parents=True)
        (self.root / "csrc" / "bindings.cpp").write_text("// binding\n")
        (self.root / "csrc" / "norm" / "rms.cu").write_text('#include "rms.cuh"\n')
        (self.root / "csrc" / "norm" / "rms.cuh").write_text("// kernel\n")
        (self.root / "csrc" / "norm" / "sm90_only.cu").write_text("// one chip\n")
        self.log = folder / "nvcc.log"
        self.cache = folder / "cache"
        bin_folder = folder / "cuda" / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "nvcc").write_text(NVCC)
        (bin_folder / "nvcc").chmod(0o755)
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("KIMI_", "CUDA_"))}
        self.env = keep | {
            "CUDA_HOME": str(folder / "cuda"),
            "CXX": str(bin_folder / "nvcc"),
            "FAKE_LOG": str(self.log),
            "KIMI_KERNELS_CACHE": str(self.cache),
            "PYTHONPATH": str(self.root),
        }

    def start(self, code: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code],
            cwd=self.root,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, code: str, **env: str) -> str:
        process = self.start(code, **env)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out.strip()

    def fails(self, code: str, **env: str) -> str:
        process = self.start(code, **env)
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0
        return err

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.is_file() else []

    def setup(self, target: Path, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(target / "base")]
        return subprocess.run(
            [*command, "--build-lib", str(target / "lib")],
            cwd=self.root,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_first_use_builds_once_and_is_found_again(tree: Tree) -> None:
    path = Path(tree.run(BUILT_MODULE))
    assert path.read_text() == "made by the fake\n"
    assert path.is_relative_to(tree.cache)
    calls = tree.calls()
    assert len(calls) == 4  # binding, two kernels, link
    assert any("arch=compute_100f,code=[sm_100f,sm_103f]" in call and "rms.cu" in call for call in calls)
    (one_chip,) = [call for call in calls if "sm90_only.cu|" in call and "|-c|" in call]
    assert "compute_90a" in one_chip
    assert "100f" not in one_chip
    assert tree.run(BUILT_MODULE) == str(path)
    assert len(tree.calls()) == 4
    assert sorted(p.name for p in tree.cache.iterdir()) == [path.parent.name, f"{path.parent.name}.lock"]


def test_the_key_follows_sources_flags_compiler_and_architectures(tree: Tree) -> None:
    code = "print(_build.cache_key(_build._wanted_archs()))"
    keys = [
        tree.run(code),
        tree.run(code, KIMI_KERNELS_NVCC_FLAGS="-DKIMI_PDL_DELAY_NS=50000"),
        tree.run(code, KIMI_KERNELS_ARCHS="sm_90a"),
        tree.run(code, FAKE_VERSION="13.1"),
    ]
    (tree.root / "csrc" / "norm" / "rms.cuh").write_text("// kernel, changed\n")
    keys.append(tree.run(code))
    assert len(set(keys)) == len(keys)
    (tree.root / "csrc" / "norm" / "rms.cuh").write_text("// kernel\n")
    assert tree.run(code) == keys[0]
    assert tree.run(code, KIMI_KERNELS_ARCHS="sm_103f,sm_90a,sm_100f") == keys[0]  # what is the default, in any order


def test_two_processes_at_once_build_once(tree: Tree) -> None:
    both = [tree.start(BUILT_MODULE, FAKE_SLEEP="0.3") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(tree.calls()) == 4
    assert sum("compiling the CUDA kernels" in err for _, err in outputs) == 1


def test_a_killed_build_leaves_nothing_that_counts(tree: Tree) -> None:
    process = tree.start(BUILT_MODULE, FAKE_SLEEP="60")
    deadline = time.monotonic() + 30
    while not tree.calls():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert any("-build-" in p.name for p in tree.cache.iterdir())
    path = Path(tree.run(BUILT_MODULE))  # the lock went with its owner; the leftover is swept
    assert sorted(p.name for p in tree.cache.iterdir()) == [path.parent.name, f"{path.parent.name}.lock"]


def test_a_failing_compiler_shows_its_words_and_publishes_nothing(tree: Tree) -> None:
    assert "error: no such register" in tree.fails(BUILT_MODULE, FAKE_FAIL="1")
    assert [p.name for p in tree.cache.iterdir() if not p.name.endswith(".lock")] == []
    assert Path(tree.run(BUILT_MODULE)).is_file()


def test_without_nvcc_the_error_says_what_to_install(tree: Tree) -> None:
    error = tree.fails(BUILT_MODULE, **NO_NVCC)
    assert "nvcc was not found" in error
    assert "Install the CUDA toolkit 13" in error


@pytest.mark.parametrize(("version", "found"), [("12.9", "is 12.9"), ("unknown", "calls itself 'fake, release")])
def test_an_nvcc_that_is_too_old_is_named_with_the_version_needed(tree: Tree, version: str, found: str) -> None:
    error = tree.fails(BUILT_MODULE, FAKE_VERSION=version)
    assert f"needs nvcc 13.0 or later, {tree.env['CUDA_HOME']}/bin/nvcc {found}" in error
    assert tree.calls() == []


def test_an_old_nvcc_fails_the_installation_with_the_same_words(tree: Tree, tmp_path: Path) -> None:
    result = tree.setup(tmp_path / "out", FAKE_VERSION="12.4")
    assert result.returncode != 0
    assert "needs nvcc 13.0 or later" in result.stderr
    assert "KIMI_KERNELS_NO_CUDA=1 installs without kernels" in result.stderr
    assert tree.calls() == []


NINJA = """#!/bin/sh
echo "$@" >> "$FAKE_LOG"
exit 1
"""


@pytest.mark.parametrize("value", ["3", ""])
def test_max_jobs_counts_at_first_use_and_at_installation(tree: Tree, tmp_path: Path, value: str) -> None:
    fake = tmp_path / "bin" / "ninja"
    fake.parent.mkdir()
    fake.write_text(NINJA)
    fake.chmod(0o755)
    (fake.parent / "python").symlink_to(sys.executable)  # ninja is looked for beside the interpreter first
    env = {"MAX_JOBS": value}
    beside = f"sys.executable = {str(fake.parent / 'python')!r}; "
    tree.fails(f"{beside}_build._built_module()", **env)
    setup = f"{beside}sys.argv = ['setup.py', '-q', 'build']; del sys.modules['torch']; "
    tree.fails(f"{setup}import runpy; runpy.run_path('setup.py', run_name='__main__')", **env)
    assert len(tree.calls()) == 2
    assert all(call.startswith("-C ") for call in tree.calls())
    assert [call.partition(" -j ")[2] for call in tree.calls()] == [value] * 2


def test_a_cache_that_cannot_be_written_names_the_switch(tree: Tree) -> None:
    tree.cache.write_text("a file, not a folder")
    error = tree.fails(BUILT_MODULE)
    assert f"the cache folder {tree.cache} cannot be written" in error
    assert "set KIMI_KERNELS_CACHE" in error
    assert tree.calls() == []


def test_a_missing_host_compiler_is_named(tree: Tree) -> None:
    assert "needs the C++ compiler no-such-g++" in tree.fails(BUILT_MODULE, CXX="no-such-g++")


@pytest.mark.parametrize(
    ("code", "name", "value", "message"),
    [
        ("chosen_archs()", "KIMI_KERNELS_ARCHS", "sm_90", "comma list of sm_90a, sm_100f, sm_103f, got 'sm_90'"),
        ("_built_module()", "MAX_JOBS", "many", "MAX_JOBS must be a positive whole number, got 'many'"),
        ("_built_module()", "MAX_JOBS", "0", "MAX_JOBS must be a positive whole number, got '0'"),
        ("env.flag('KIMI_KERNELS_NO_CUDA')", "KIMI_KERNELS_NO_CUDA", "yes", "must be 0 or 1, got 'yes'"),
    ],
)
def test_a_bad_switch_is_an_error(tree: Tree, code: str, name: str, value: str, message: str) -> None:
    assert message in tree.fails(f"_build.{code}", **{name: value})


def test_build_info_builds_nothing(tree: Tree) -> None:
    assert tree.run("print(_build.build_info()['built'])") == "not built"
    assert tree.calls() == []


def test_flags_of_the_user_reach_every_compilation(tree: Tree) -> None:
    tree.run(BUILT_MODULE, KIMI_KERNELS_NVCC_FLAGS="-DX=1 '-DY=a b'")
    compiled = [call for call in tree.calls() if "|-c|" in call]
    assert len(compiled) == 3
    assert all("-DX=1|-DY=a b|" in call for call in compiled)


@pytest.mark.parametrize(("env", "why"), [({"KIMI_KERNELS_NO_CUDA": "1"}, "NO_CUDA=1"), (NO_NVCC, "nvcc not found")])
def test_setup_without_cuda_installs_the_reference_and_says_so(
    tree: Tree, tmp_path: Path, env: dict[str, str], why: str
) -> None:
    result = tree.setup(tmp_path / "out", **env)
    assert result.returncode == 0, result.stderr
    assert f"{why}, installing the CPU reference without CUDA kernels" in result.stdout
    assert tree.calls() == []
    package = tmp_path / "out" / "lib" / "kimi_kernels"
    assert (package / "_dispatch.py").is_file()
    assert (package / "_csrc" / "norm" / "rms.cu").is_file()  # for a build at first use
    assert not list(package.glob("_C*.so"))


def test_setup_builds_the_chosen_architectures_ahead_of_time(tree: Tree, tmp_path: Path) -> None:
    result = tree.setup(tmp_path / "out", KIMI_KERNELS_ARCHS="sm_90a", MAX_JOBS="1")
    assert result.returncode == 0, result.stderr
    assert "compiling for sm_90a" in result.stdout
    assert [p.read_text() for p in (tmp_path / "out" / "lib" / "kimi_kernels").glob("_C*.so")] == ["made by the fake\n"]
    assert all("100f" not in call for call in tree.calls())
