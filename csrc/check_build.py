"""Compiles every source for every architecture and reads what came out; no GPU needed. `make check-cuda` runs it.

Fails, naming file, architecture and kernel, on: a compiler error or warning, spills, local memory, serialised wgmma,
code missing for an architecture, an instruction missing that a `.cu` file names (`// sass(sm_90a): QGMMA`), a kernel
without the dependency wait (programmatic dependent launch is on for every kernel), a module that does not link or does
not have the functions of `_C.pyi`. Each source is compiled once: the objects are the ones that the module is linked of.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kimi_kernels import _compile, _sources  # noqa: E402

# griddepcontrol.wait: a kernel without it could let its successor overtake its predecessor.
WAIT = "ACQBULK"
_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_WARNING = re.compile(r"\bwarning\b|\(C75\d\d\)|wgmma\S* instructions are serialized", re.IGNORECASE)
_EXPECTED = re.compile(r"^//\s*sass\(([^)]*)\):\s*(\S+)\s*$", re.MULTILINE)
_ARCH = re.compile(r"^arch = (\S+)")  # not "code for": that line says sm_100 for sm_100f
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)")


@dataclass
class Kernel:
    """One kernel for one architecture, as ptxas reports it (mangled name)."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass
class Sass:
    """Opcodes by (architecture, kernel)."""

    opcodes: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def archs(self) -> set[str]:
        return {arch for arch, _ in self.opcodes}

    def has(self, arch: str, instruction: str) -> bool:
        found = (ops for (where, _), ops in self.opcodes.items() if where == arch)
        return any(holds(ops, instruction) for ops in found)


def holds(opcodes: set[str], instruction: str) -> bool:
    """`QGMMA` is found in QGMMA.64x8x32.F32.E4M3.E4M3, not in HGMMA or QGMMAX."""
    return any(op == instruction or op.startswith(instruction + ".") for op in opcodes)


def parse_resources(log: str) -> list[Kernel]:
    """Kernels of `ptxas -v`. Stack and spills of functions that were not inlined count for the kernel before them."""
    kernels: list[Kernel] = []
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernels.append(Kernel(match[1], match[2]))
        elif kernels and (match := _STACK.search(line)):
            kernels[-1].stack += int(match[1])
            kernels[-1].spill_stores += int(match[2])
            kernels[-1].spill_loads += int(match[3])
        elif kernels and (match := _REGISTERS.search(line)):
            kernels[-1].registers = int(match[1])
    return kernels


def warnings(log: str) -> list[str]:
    return [line.strip() for line in log.splitlines() if _WARNING.search(line)]


def expected_instructions(source: str) -> list[tuple[str, str]]:
    """(architecture, instruction) of each `// sass(arch, arch): NAME` comment."""
    found = []
    for archs, instruction in _EXPECTED.findall(source):
        found += [(arch.strip(), instruction) for arch in archs.split(",")]
    return found


def parse_sass(lines: Iterable[str]) -> Sass:
    """Opcodes of `cuobjdump -sass`."""
    sass = Sass()
    arch, opcodes = "", set[str]()
    for line in lines:
        if match := _INSTRUCTION.match(line):
            opcodes.add(match[1])
        elif match := _ARCH.match(line):
            arch = match[1]
        elif match := _FUNCTION.match(line):
            opcodes = sass.opcodes.setdefault((arch, match[1]), set())
    return sass


def problems_of_resources(kernels: list[Kernel]) -> list[str]:
    return [
        f"{k.name} for {k.arch}: {k.stack} bytes of local memory, "
        f"{k.spill_stores} stored and {k.spill_loads} loaded by spills"
        for k in kernels
        if k.stack or k.spill_stores or k.spill_loads
    ]


def problems_of_sass(sass: Sass, archs: set[str], expected: list[tuple[str, str]]) -> list[str]:
    problems = [f"no code for {arch}" for arch in sorted(archs - sass.archs())]
    problems += [f"no {name} in the code for {arch}" for arch, name in expected if not sass.has(arch, name)]
    return problems + [
        f"{kernel} for {arch}: no dependency wait ({WAIT}): call ptx::pdl_wait()"
        for (arch, kernel), opcodes in sorted(sass.opcodes.items())
        if not holds(opcodes, WAIT)
    ]


def find_tool(name: str) -> str:
    """A CUDA binary utility: on the PATH, or of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."""
    found = shutil.which(name)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        found = found or next((str(path) for path in sorted(Path(folder).glob(f"*/bin/{name}"))), None)
    if found is None:
        raise SystemExit(f"{name} was not found: pip install nvidia-cuda-{name}, or put it on the PATH")
    return found


def disassemble(path: Path) -> Sass:
    environment = os.environ | {"PATH": f"{Path(find_tool('nvdisasm')).parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(
        [find_tool("cuobjdump"), "-sass", str(path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        sass = parse_sass(process.stdout or [])
    if process.returncode != 0:
        raise SystemExit(f"cuobjdump failed on {path}")
    return sass


def readable(text: str) -> str:
    """Kernel names as in the source, when c++filt is there."""
    tool = shutil.which("c++filt")
    return subprocess.run([tool], input=text, capture_output=True, text=True, check=True).stdout if tool else text


def check_source(source: Path, build: Path) -> tuple[list[Kernel], list[str]]:
    """Kernels and problems of one compiled `.cu`."""
    root = _sources.csrc_dir()
    compiled = build / _compile.object_name(source, root)
    log = Path(f"{compiled}.log").read_text(encoding="utf-8")
    archs = {arch for name in _sources.passes(source, _sources.ALL_ARCHS) for arch in _sources.GENCODE[name][1]}
    kernels = parse_resources(log)
    problems = warnings(log) + problems_of_resources(kernels)
    expected = expected_instructions(source.read_text(encoding="utf-8"))
    problems += problems_of_sass(disassemble(compiled), archs, expected)
    return kernels, [f"{source.relative_to(root.parent)}: {problem}" for problem in problems]


def check_module(module: Path) -> list[str]:
    """The module loads without a GPU and has exactly the functions of `_C.pyi`."""
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('kimi_kernels._C', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(*[n for n in dir(m) if not n.startswith('_')])"
    )
    result = subprocess.run([sys.executable, "-c", code, str(module)], capture_output=True, text=True)
    if result.returncode != 0:
        return [f"{module.name} does not load: {result.stderr.strip().splitlines()[-1]}"]
    stub = ast.parse((ROOT / "kimi_kernels" / "_C.pyi").read_text(encoding="utf-8"))
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    there = set(result.stdout.split())
    problems = [f"_C.pyi declares {name}, the module has no such function" for name in sorted(declared - there)]
    return problems + [f"the module has {name}, _C.pyi does not declare it" for name in sorted(there - declared)]


def seconds_by_object(build: Path) -> dict[str, float]:
    """Compile times that ninja logged."""
    times = {}
    for line in (build / ".ninja_log").read_text(encoding="utf-8").splitlines()[1:]:
        start, end, _, output, *_ = line.split("\t")
        times[output] = (int(end) - int(start)) / 1000
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "check-cuda", help="kept: a next run is quick")
    parser.add_argument("--jobs", type=int, default=2, help="sources compiled at once (default: %(default)s)")
    args = parser.parse_args()
    start = time.monotonic()
    try:
        module = _compile.compile_module(
            args.build.resolve(), _sources.ALL_ARCHS, built="ahead of time", jobs=args.jobs
        )
    except _compile.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    compiled = time.monotonic()
    sources = _sources.device_sources(_sources.csrc_dir())
    times, problems = seconds_by_object(args.build), []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda source: check_source(source, args.build), sources))
    for source, (kernels, found) in zip(sources, results, strict=True):
        name = _compile.object_name(source, _sources.csrc_dir())
        registers = max((kernel.registers for kernel in kernels), default=0)
        label = str(source.relative_to(_sources.csrc_dir()))
        print(f"{label:32} {times[name]:6.1f} s  {len(kernels):3} kernels  at most {registers:3} registers", flush=True)
        problems += found
    problems += check_module(module)
    print(
        f"compiled in {compiled - start:.0f} s, read in {time.monotonic() - compiled:.0f} s, {len(problems)} problems"
    )
    if problems:
        print(readable("\n".join(problems)), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
