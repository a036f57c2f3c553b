"""Host side of the engine, no GPU: cost of scheduling and bookkeeping per step, and peak memory while loading.

python -m bench.engine_cpu            writes bench/results/<date>-cpu-engine.md
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.kernels.environment import ROOT, versions
from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.types import Request, SampledToken, SamplingParams, StepOutput, StepPlan

RUNNING = (1, 16, 256)
LIMIT_MS = 1.0  # for the median at 256 running
GROWTH_LIMIT = 1.2  # peak memory while loading, in units of the weights
# a checkpoint of more than 2 GB
LOAD_SIZES = {"num_hidden_layers": 4, "num_experts": 512, "routed_expert_hidden_size": 1024}
LOAD_SIZES |= {"moe_intermediate_size": 1024}

LOAD_SCRIPT = """
import ctypes, gc, json, sys, time
from pathlib import Path
from engine.engine_config import EngineConfig
from engine.runner.runner import Runner

def kib(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])

def load(directory):
    return Runner.from_dir(Path(directory), EngineConfig(device="cpu"), progress=False)

load(sys.argv[1])  # imports, thread pools and allocator arenas are not what is measured
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # pages the first load freed but still holds would be reused, and count as no growth
before, start = kib("VmRSS"), time.perf_counter()
runner = load(sys.argv[2])
print(json.dumps({"growth": (kib("VmHWM") - before) * 1024, "seconds": time.perf_counter() - start}))
"""


class NullRunner:
    """Gives every request its token at once; its own time is measured and taken off."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.num_slots is not None
        self.engine_config = config
        self.eos_token_ids = frozenset({2})
        self.vocab_size = 1000
        self.num_absorbed_tokens = [0] * (config.num_slots + 1)
        self.seconds = self.cpu_seconds = 0.0

    def execute(self, plan: StepPlan) -> StepOutput:
        start, cpu = time.perf_counter(), time.thread_time()
        output = StepOutput()
        for scheduled in plan.scheduled:
            if scheduled.samples:
                output.tokens[scheduled.request.request_id] = SampledToken(7)
        self.seconds, self.cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu
        return output

    def forget(self, request_id: str) -> None:
        pass


def step_times(running: int, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds per decode step of ``running`` requests, without the runner; blocks are taken as they grow.

    Wall time, and CPU time of the thread: the second does not count what other programs took.
    """
    config = EngineConfig(max_model_len=131_072, num_blocks=256 * 200, num_slots=256)
    runner = NullRunner(config)
    core = EngineCore(runner, config)
    for i in range(running):
        sampling = SamplingParams(max_tokens=steps + 100, ignore_eos=True)
        core.add(Request(f"r{i}", [1] * (500 + i % 64), sampling))
    while core.stats().last_step_tokens != running:
        core.step()
    wall, cpu = [], []
    for _ in range(steps):
        start, cpu_start = time.perf_counter(), time.thread_time()
        updates = core.step()
        wall.append((time.perf_counter() - start - runner.seconds) * 1e3)
        cpu.append((time.thread_time() - cpu_start - runner.cpu_seconds) * 1e3)
        assert len(updates) == running
    return sorted(wall), sorted(cpu)


def load_growth(**sizes: int) -> dict[str, float]:
    """Load a generated checkpoint in a process of its own: `size` and `growth` of the peak in bytes, and `seconds`."""
    import json

    from engine.tools import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        make_tiny.make(Path(folder) / "tiny")
        size = make_tiny.make(Path(folder) / "large", **sizes)
        command = [sys.executable, "-c", LOAD_SCRIPT, f"{folder}/tiny", f"{folder}/large"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"loading failed:\n{done.stderr[-2000:]}")
    return {"size": size, **json.loads(done.stdout)}


def commit() -> str:
    """The commit measured, and whether engine or bench differ from it."""
    if named := os.environ.get("KIMI_BENCH_COMMIT", "").strip():
        return named

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "engine", "kimi_kernels")
        return git("rev-parse", "--short=12", "HEAD").strip() + (" with local changes" if changed.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown (set KIMI_BENCH_COMMIT)"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="measured steps for each number of requests")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the report")
    parser.add_argument("--no-load", action="store_true", help="leave the checkpoint out")
    args = parser.parse_args()

    head = {
        "commit": commit(),
        "machine": f"{cpu_name()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f} at the start",
        "versions": versions(),
        "settings": f"{args.steps} decode steps each, garbage collection on, torch threads {torch.get_num_threads()}",
    }
    lines = ["# Host side of the engine", "", *(f"- {name}: {value}" for name, value in head.items()), ""]
    lines += ["## Scheduling and bookkeeping per decode step (the forward pass taken off)", ""]
    lines += [
        "| running requests | median ms | minimum ms | median CPU ms | p99 CPU ms |",
        "|---:|---:|---:|---:|---:|",
    ]
    failed = False
    for running in RUNNING:
        wall, cpu = step_times(running, args.steps)
        median, late = statistics.median(wall), cpu[int(len(cpu) * 0.99)]
        lines.append(f"| {running} | {median:.3f} | {wall[0]:.3f} | {statistics.median(cpu):.3f} | {late:.3f} |")
        failed |= running == max(RUNNING) and median > LIMIT_MS
    lines += ["", "CPU time is that of the engine's thread, so it leaves out what other programs took in between."]
    lines += ["", f"Limit: median under {LIMIT_MS:g} ms at {max(RUNNING)} running."]
    if not args.no_load:
        load = load_growth(**LOAD_SIZES)
        ratio = load["growth"] / load["size"]
        lines += ["", "## Peak memory while loading", ""]
        lines += ["| checkpoint GB | growth of peak GB | ratio | seconds |", "|---:|---:|---:|---:|"]
        lines += [f"| {load['size'] / 1e9:.2f} | {load['growth'] / 1e9:.2f} | {ratio:.3f} | {load['seconds']:.1f} |"]
        lines += ["", f"Limit: growth at most {GROWTH_LIMIT:g} x weights. Checkpoint: make-tiny with {LOAD_SIZES}."]
        failed |= ratio > GROWTH_LIMIT or load["size"] < 2e9
    if failed:
        lines += ["", "**A limit was missed.**"]
    text = "\n".join(lines) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{datetime.date.today().isoformat()}-cpu-engine.md"
    path.write_text(text)
    print(text)
    print(f"written to {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
