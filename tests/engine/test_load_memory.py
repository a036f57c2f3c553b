"""Loading may not hold the weights twice: growth of peak memory against their size, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.tools.make_tiny import make

SCRIPT = """
import ctypes, gc, sys
from pathlib import Path
from engine.engine_config import EngineConfig
from engine.runner.runner import Runner

def kib(field):
    return int(next(l for l in open("/proc/self/status") if l.startswith(field)).split()[1])

def load(directory):
    return Runner.from_dir(Path(directory), EngineConfig(device="cpu"), progress=False)

load(sys.argv[1])  # imports, thread pools and allocator arenas are not what is measured
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # pages the first load freed but still holds would be reused, and count as no growth
before = kib("VmRSS")
runner = load(sys.argv[2])
print((kib("VmHWM") - before) * 1024)
"""


def growth(tmp_path: Path, **sizes: int) -> float:
    """Growth of the peak resident size while loading, in units of the weights' size."""
    make(tmp_path / "tiny")
    size = make(tmp_path / "large", num_hidden_layers=4, **sizes)
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "tiny"), str(tmp_path / "large")],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout) / size


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_grows_by_little_more_than_the_weights(tmp_path: Path) -> None:
    # at least 0.95: the weights are really in memory, not mapped lazily
    assert 0.95 < growth(tmp_path, num_experts=128, routed_expert_hidden_size=512, moe_intermediate_size=512) < 1.2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_at_more_than_two_gigabytes(tmp_path: Path) -> None:
    assert 0.95 < growth(tmp_path, num_experts=512, routed_expert_hidden_size=1024, moe_intermediate_size=1024) < 1.2
