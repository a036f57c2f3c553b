"""Programmatic dependent launch: late last blocks give the bits of PDL off."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DELAY = "-DKIMI_PDL_DELAY_NS=50000"


def chain_hash(module: str, **environment: str) -> str:
    command = [sys.executable, "-m", f"tests.kernels.{module}"]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("module", ["kda_pdl_chain", "moe_pdl_chain", "routing_pdl_chain"])
def test_late_blocks_change_nothing(module: str) -> None:
    """A missing wait shows as another hash: the next kernel reads old bytes."""
    want = chain_hash(module, KIMI_KERNELS_PDL="0")
    assert chain_hash(module, KIMI_KERNELS_PDL="1") == want
    assert chain_hash(module, KIMI_KERNELS_PDL="1", KIMI_KERNELS_NVCC_FLAGS=DELAY) == want
