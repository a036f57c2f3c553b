"""Time of one call on the GPU: medians of CUDA-graph replays over rotated buffers.

Why graphs: a decode kernel takes 3 us and launching it from Python takes 10; in an engine it is replayed from a graph
too. Why rotated buffers: a kernel called again on the same tensors finds them in L2, which no layer of a model does.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

COLD_FACTOR = 2  # a rotation at least this many times the L2 counts as cold
ROTATION_BYTES = 400 << 20  # what a rotation is sized for: over six times the 60 MB L2 of an H200


def num_sets(bytes_per_set: float, *, lowest: int = 2, highest: int = 64, total: int = ROTATION_BYTES) -> int:
    """How many buffer sets of `bytes_per_set` make a rotation of `total` bytes, within [lowest, highest]."""
    if bytes_per_set <= 0:
        return lowest
    return min(highest, max(lowest, math.ceil(total / bytes_per_set)))


def is_cold(rotation_bytes: float, device: torch.device | None = None) -> bool:
    """Whether buffers of `rotation_bytes` in all have left L2 by the time they come round again."""
    return rotation_bytes >= COLD_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size


@dataclass(frozen=True)
class Timing:
    """us: median time of one call. spread: (slowest - fastest) / median of the runs behind it."""

    us: float
    spread: float
    captured: bool  # False: the calls could not be captured, launch costs of Python are in the time


class GraphTimer:
    """Calls captured once, to be timed as often as needed.

    `calls` are closures over different buffer sets, used in turn; one replay goes through all of them at least once and
    lasts about `replay_us`. Captured outputs that the calls allocate live in the graph's own memory pool as long as the
    timer lives. Calls that cannot be captured are timed with events around a Python loop; `captured` is then False.

    Errors raised by the first call pass through: a kernel that does not run is not timed.
    """

    def __init__(self, calls: Sequence[Call], *, replay_us: float = 3000.0, max_calls: int = 512) -> None:
        if not calls:
            raise ValueError("calls: expected at least one closure, got none")
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for call in calls[:4]:  # compilation, module loading and lazy buffers stay out of the capture
                call()
            torch.cuda.synchronize()
            self._capture(calls)
            # Eager time is launch time for a small kernel, so the length of the graph follows from a first, short one.
            rounds = max(1, min(round(replay_us / self._replay_us), max_calls // len(calls)))
            if rounds > 1:
                self._capture(list(calls) * rounds)

    def _capture(self, body: Sequence[Call]) -> None:
        """Makes `_replay`, which runs `body` once, and measures roughly how long it takes."""

        def run_body() -> None:
            for call in body:
                call()

        self._replay: Call = run_body
        self.captured, self.num_calls = True, len(body)
        try:
            self._replay = self._record(run_body).replay
        except RuntimeError:
            torch.cuda.synchronize()
            self.captured = False
        self._replay()
        self._replay_us = max(self._elapsed_us(self._replay), 1.0)

    @staticmethod
    def _record(body: Call) -> torch.cuda.CUDAGraph:
        """`body` as a graph. `torch.cuda.graph` would collect garbage and empty the allocator's cache each time, which
        takes longer than the timing; a collection DURING the capture could free device memory, hence the pause."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin()
            try:
                body()
            finally:
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph

    def _elapsed_us(self, body: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        body()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def warm_up(self, seconds: float) -> None:
        """Keeps the device busy with these calls for about `seconds`, so that its clock has settled."""
        with torch.cuda.stream(self.stream):
            for _ in range(max(1, round(seconds * 1e6 / self._replay_us))):
                self._replay()
            torch.cuda.synchronize()

    def run(self, *, seconds: float = 0.04, min_replays: int = 9, max_replays: int = 60) -> float:
        """Median time of one call in us over replays that last `seconds` together.

        The replays are queued without waiting for each other, so that the device never idles between them.
        """
        wanted = math.ceil(seconds * 1e6 / self._replay_us)
        replays = max(min_replays, min(max_replays, wanted))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        with torch.cuda.stream(self.stream):
            self._replay()
            marks[0].record()
            for mark in marks[1:]:
                self._replay()
                mark.record()
            torch.cuda.synchronize()
        times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
        return statistics.median(times) / self.num_calls


def summarise(runs: Sequence[float], captured: bool = True) -> Timing:
    """The median of several runs and how far they lie apart."""
    middle = statistics.median(runs)
    return Timing(middle, (max(runs) - min(runs)) / middle, captured)
