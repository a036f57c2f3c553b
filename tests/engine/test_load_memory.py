"""Loading may not hold the weights twice: growth of peak memory against their size, as the bench measures it."""

from __future__ import annotations

import sys

import pytest

from bench.engine_cpu import GROWTH_LIMIT, LOAD_SIZES, load_growth

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def check(**sizes: int) -> None:
    load = load_growth(**sizes)
    # at least 0.95: the weights are really in memory, not mapped lazily
    assert 0.95 < load["growth"] / load["size"] < GROWTH_LIMIT


def test_peak_memory_grows_by_little_more_than_the_weights() -> None:
    check(num_hidden_layers=4, num_experts=128, routed_expert_hidden_size=512, moe_intermediate_size=512)


@pytest.mark.slow
def test_peak_memory_at_more_than_two_gigabytes() -> None:
    check(**LOAD_SIZES)
