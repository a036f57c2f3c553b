"""What the histograms observe, on a clock of the test's own."""

from __future__ import annotations

import pytest

from engine.server import metrics
from engine.server.metrics import Metrics, RequestTimes
from engine.types import EngineStats, FinishReason, RequestUpdate


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(metrics.time, "monotonic", lambda: self.now)


def value(of: Metrics, name: str) -> float:
    found = of.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "0"})
    assert found is not None, name
    return found


def test_times_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrives at 100, starts at 101, tokens at 103, 104, two more at 108, the last at 116."""
    clock, told = Clock(monkeypatch), Metrics("m", EngineStats)
    times = RequestTimes(7, arrival=clock.now)
    for clock.now, num_tokens in ((103.0, 1), (104.0, 1), (108.0, 2)):
        told.on_update(times, RequestUpdate("r", [5] * num_tokens))
    clock.now = 110.0
    told.on_update(times, RequestUpdate("r"))  # news without a token moves nothing
    clock.now = 116.0
    last = RequestUpdate("r", [5], finish_reason=FinishReason.LENGTH, first_scheduled_time=101.0, num_cached_tokens=3)
    told.on_update(times, last)
    told.on_end(times, "abort")  # a second end does not count
    expected = {
        "time_to_first_token_seconds": (1, 3.0),
        "inter_token_latency_seconds": (3, 1.0 + 4.0 + 8.0),
        "request_time_per_output_token_seconds": (1, 13.0 / 4),
        "e2e_request_latency_seconds": (1, 16.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 13.0),
        "request_inference_time_seconds": (1, 15.0),
        "request_prompt_tokens": (1, 7.0),
        "request_generation_tokens": (1, 5.0),
    }
    got = {name: (value(told, f"{name}_count"), value(told, f"{name}_sum")) for name in expected}
    assert got == expected
    assert (value(told, "prefix_cache_queries_total"), value(told, "prefix_cache_hits_total")) == (7.0, 3.0)


def test_a_request_that_never_ran_has_no_token_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), Metrics("m", EngineStats)
    times = RequestTimes(7, arrival=clock.now)
    clock.now = 102.0
    told.on_end(times, "abort")
    counts = {name: value(told, f"{name}_count") for name in metrics.HISTOGRAMS}
    ended = {"e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"}
    assert counts == {name: float(name in ended) for name in metrics.HISTOGRAMS}
    assert value(told, "e2e_request_latency_seconds_sum") == 2.0
