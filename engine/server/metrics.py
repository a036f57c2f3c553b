"""Prometheus metrics, under vLLM's names so that existing dashboards work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from engine.server.worker import StepNews
from engine.types import EngineStats, RequestUpdate

# fmt: off
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PHASE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
# fmt: on
STEP_TOKENS = (1, *(2**i for i in range(3, 15)))
REQUEST_TOKENS = tuple(factor * 10**power for power in range(7) for factor in (1, 2, 5))

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between one token of a request and the next.", BETWEEN_TOKENS),
    "request_time_per_output_token_seconds": ("Mean time per token of a request after its first.", BETWEEN_TOKENS),
    "e2e_request_latency_seconds": ("From arrival to the end of a request.", PHASE),
    "request_queue_time_seconds": ("Waiting for the first step.", PHASE),
    "request_prefill_time_seconds": ("From the first step to the first token.", PHASE),
    "request_decode_time_seconds": ("From the first token to the last.", PHASE),
    "request_inference_time_seconds": ("From the first step to the last token.", PHASE),
    "request_prompt_tokens": ("Prompt tokens of a request.", REQUEST_TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", REQUEST_TOKENS),
    "iteration_tokens_total": ("Tokens of one forward pass.", STEP_TOKENS),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of started requests.",
    "generation_tokens": "Generated tokens.",
    "num_preemptions": "Requests that had to give their memory back.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
}
GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Requests that run.", lambda s: s.num_running),
    "vllm:num_requests_waiting": ("Requests that wait.", lambda s: s.num_waiting),
    "vllm:kv_cache_usage_perc": (
        "MLA blocks held by requests, 0 to 1.",
        lambda s: s.blocks_used / max(1, s.blocks_total),
    ),
    "kimi:state_slots_used": ("KDA state slots held by requests.", lambda s: s.slots_used),
}


@dataclass(slots=True)
class RequestTimes:
    """What one sequence's histograms need; times on time.monotonic."""

    num_prompt: int
    arrival: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0
    first_scheduled: float | None = None
    num_cached: int = 0
    done: bool = False


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        disable_created_metrics()  # a creation time beside each series is of no use to the dashboards
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        labels = {"model_name": model_name, "engine": "0"}
        names = list(labels)
        self._labels = labels
        for name, (text, value) in GAUGES.items():
            gauge = Gauge(name, text, names, registry=self.registry)
            gauge.labels(**labels).set_function(lambda value=value: value(stats()))  # type: ignore[misc]
        self._counters = {
            name: Counter(f"vllm:{name}", text, names, registry=self.registry).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, names, buckets=buckets, registry=self.registry).labels(**labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        success = Counter(
            "vllm:request_success", "Ended requests.", [*names, "finished_reason"], registry=self.registry
        )
        self._success = {
            reason: success.labels(**labels, finished_reason=reason) for reason in ("stop", "length", "abort", "error")
        }
        self._seen = EngineStats()

    def set_cache_config(self, settings: Mapping[str, object]) -> None:
        """The settings that schedulers in front of several engines read, as labels of a constant 1."""
        info = Gauge("vllm:cache_config_info", "Cache settings.", [*self._labels, *settings], registry=self.registry)
        info.labels(**self._labels, **{key: str(value) for key, value in settings.items()}).set(1)

    def on_news(self, news: StepNews) -> None:
        stats, seen = news.stats, self._seen
        self._seen = stats
        if stats.num_steps == seen.num_steps:
            return
        self._histograms["iteration_tokens_total"].observe(stats.last_step_tokens)
        self._counters["prompt_tokens"].inc(stats.prompt_tokens - seen.prompt_tokens)
        self._counters["generation_tokens"].inc(stats.generation_tokens - seen.generation_tokens)
        if stats.num_preemptions > seen.num_preemptions:
            self._counters["num_preemptions"].inc(stats.num_preemptions - seen.num_preemptions)

    def on_update(self, times: RequestTimes, update: RequestUpdate) -> None:
        now = time.monotonic()
        if update.token_ids:
            if times.first_token is None:
                times.first_token = now
                self._histograms["time_to_first_token_seconds"].observe(now - times.arrival)
            else:
                self._histograms["inter_token_latency_seconds"].observe(now - times.last_token)
            times.last_token = now
            times.num_tokens += len(update.token_ids)
        times.first_scheduled = update.first_scheduled_time or times.first_scheduled
        times.num_cached = max(times.num_cached, update.num_cached_tokens)
        if update.finish_reason is not None:
            self.on_end(times, update.finish_reason.value)

    def on_end(self, times: RequestTimes, reason: str) -> None:
        """Once per sequence; later calls do nothing."""
        if times.done:
            return
        times.done = True
        self._success[reason].inc()
        self._counters["prefix_cache_queries"].inc(times.num_prompt)
        self._counters["prefix_cache_hits"].inc(times.num_cached)
        seconds = {"e2e_request_latency_seconds": time.monotonic() - times.arrival}
        started, first, last = times.first_scheduled, times.first_token, times.last_token
        if started is not None:
            seconds["request_queue_time_seconds"] = started - times.arrival
            if first is not None:
                seconds["request_prefill_time_seconds"] = first - started
                seconds["request_inference_time_seconds"] = last - started
        if first is not None:
            seconds["request_decode_time_seconds"] = last - first
            if times.num_tokens > 1:
                seconds["request_time_per_output_token_seconds"] = (last - first) / (times.num_tokens - 1)
        for name, value in seconds.items():
            self._histograms[name].observe(max(0.0, value))
        self._histograms["request_prompt_tokens"].observe(times.num_prompt)
        self._histograms["request_generation_tokens"].observe(times.num_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)
