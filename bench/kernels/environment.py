"""What a report says about the run: commit, device, versions, active switches."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from kimi_kernels import reference_operations

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """The commit that is measured. `KIMI_BENCH_COMMIT` names it where the tree travelled without its history."""
    if named := os.environ.get("KIMI_BENCH_COMMIT", "").strip():
        return named

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "kimi_kernels", "csrc", "bench/kernels")
        return git("rev-parse", "--short=12", "HEAD") + (" with local changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown (set KIMI_BENCH_COMMIT)"


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        return output.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def versions() -> str:
    parts = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"Python {platform.python_version()}"]
    try:
        import triton

        parts.append(f"triton {triton.__version__}")
    except ImportError:
        pass
    return ", ".join(parts)


def describe(device: torch.device, settings: str) -> dict[str, str]:
    """The head of a report, in the order to print."""
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return {
        "device": properties.name,
        "commit": commit(),
        "machine": f"{memory}, {properties.multi_processor_count} SMs, {properties.L2_cache_size >> 20} MiB of L2, "
        f"driver {driver_version()}",
        "versions": versions(),
        "settings": settings,
        "KIMI_KERNELS_REFERENCE": ", ".join(sorted(reference_operations())) or "not set",
    }
