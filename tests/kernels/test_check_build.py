"""csrc/check_build.py reads compiler reports and machine code: each kind of trouble is found in canned text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4kimi4normE' for 'sm_90a'
ptxas info    : Function properties for _ZN4kimi4normE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compile time = 31.4 ms
ptxas info    : Compiling entry function '_ZN4kimi4normE' for 'sm_100f'
ptxas info    : Function properties for _ZN4kimi4normE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers
"""
SPILLED = (
    CLEAN
    + """\
ptxas info    : Compiling entry function '_ZN4kimi4gemmE' for 'sm_90a'
ptxas info    : Function properties for _ZN4kimi4gemmE
    24 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers
"""
)
LOCAL_ARRAY = CLEAN.replace("0 bytes stack frame", "64 bytes stack frame", 1)
CALLED = (
    CLEAN
    + """\
ptxas info    : Function properties for _ZN4kimi6helperE
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
)
SERIALIZED = CLEAN + (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in function '_ZN4kimi4gemmE'\n"
)
WARNED = CLEAN + 'csrc/norm/rms.cu(12): warning #177-D: variable "x" was declared but never referenced\n'

SASS = """\
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]
host = linux

\tcode for sm_90a
\t\tFunction : _ZN4kimi4gemmE
\t.headerflags    @"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                          /* 0x00000a00ff017b82 */
                                                                                   /* 0x000fe20000000800 */
        /*0010*/                   ACQBULK ;                                       /* 0x000000000000782e */
        /*0020*/              @!P0 UBLKCP.S.G [UR4], [UR6], UR8 ;                  /* 0x00000004060073ba */
        /*0030*/              @UP1 QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ; /* 0x0060000004187df3 */
\t\t..........

Fatbin elf code:
================
arch = sm_100f
code version = [1,8]

\tcode for sm_100
\t\tFunction : _ZN4kimi4gemmE
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                         /* 0x0000df00ff017b82 */
        /*10a0*/                   EXIT ;                                          /* 0x000000000000794d */
"""


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_build", ROOT / "csrc" / "check_build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_build"] = module
    spec.loader.exec_module(module)
    return module


def test_kernels_are_read_with_architecture_and_registers(check: ModuleType) -> None:
    kernels = check.parse_resources(CLEAN)
    assert [(k.name, k.arch, k.registers) for k in kernels] == [
        ("_ZN4kimi4normE", "sm_90a", 40),
        ("_ZN4kimi4normE", "sm_100f", 38),
    ]
    assert check.problems_of_resources(kernels) == check.warnings(CLEAN) == []


@pytest.mark.parametrize(
    ("log", "kernel", "what"),
    [
        (SPILLED, "_ZN4kimi4gemmE for sm_90a", "24 bytes of local memory, 16 stored and 12 loaded by spills"),
        (LOCAL_ARRAY, "_ZN4kimi4normE for sm_90a", "64 bytes of local memory, 0 stored"),
        (CALLED, "_ZN4kimi4normE for sm_100f", "8 bytes of local memory"),
    ],
)
def test_spills_and_local_memory_name_the_kernel(check: ModuleType, log: str, kernel: str, what: str) -> None:
    (problem,) = check.problems_of_resources(check.parse_resources(log))
    assert kernel in problem
    assert what in problem


@pytest.mark.parametrize(("log", "what"), [(SERIALIZED, "C7510"), (WARNED, "#177-D")])
def test_serialised_wgmma_and_compiler_warnings_are_found(check: ModuleType, log: str, what: str) -> None:
    (line,) = check.warnings(log)
    assert what in line


def test_opcodes_are_read_with_and_without_predicates(check: ModuleType) -> None:
    sass = check.parse_sass(SASS.splitlines())
    assert sass.archs() == {"sm_90a", "sm_100f"}
    assert sass.opcodes["sm_90a", "_ZN4kimi4gemmE"] == {
        "LDC", "ACQBULK", "UBLKCP.S.G", "QGMMA.64x8x32.F32.E4M3.E4M3",
    }  # fmt: skip
    assert sass.has("sm_90a", "QGMMA")
    assert not sass.has("sm_90a", "HGMMA")
    assert not sass.has("sm_90a", "QGM")
    assert not sass.has("sm_100f", "QGMMA")


def test_missing_instruction_architecture_and_wait_are_problems(check: ModuleType) -> None:
    sass = check.parse_sass(SASS.splitlines())
    problems = check.problems_of_sass(sass, {"sm_90a", "sm_103f"}, [("sm_90a", "QGMMA"), ("sm_90a", "HGMMA")])
    assert problems[:2] == ["no code for sm_103f", "no HGMMA in the code for sm_90a"]
    (waitless,) = problems[2:]
    assert waitless.startswith("_ZN4kimi4gemmE for sm_100f: no dependency wait")


def test_expectations_are_read_from_comments(check: ModuleType) -> None:
    source = "// sass(sm_90a): QGMMA\n#include <x>\n// sass(sm_100f, sm_103f): UTCQMMA\n  // about sass(sm_90a): no\n"
    assert check.expected_instructions(source) == [
        ("sm_90a", "QGMMA"),
        ("sm_100f", "UTCQMMA"),
        ("sm_103f", "UTCQMMA"),
    ]


def test_every_expectation_in_the_sources_is_for_an_architecture_that_is_built(check: ModuleType) -> None:
    found = 0
    for path in (ROOT / "csrc").rglob("*.cu"):
        built = {
            a for name in check._sources.passes(path, check._sources.ALL_ARCHS) for a in check._sources.GENCODE[name][1]
        }
        text = path.read_text(encoding="utf-8")
        for arch, _ in check.expected_instructions(text):
            assert arch in built, f"{path.name} expects an instruction for {arch}, it is built for {sorted(built)}"
            found += 1
        assert text.count("sass(") == len(check._EXPECTED.findall(text)), (
            f"{path.name}: a sass comment is not understood"
        )
    assert found > 0
