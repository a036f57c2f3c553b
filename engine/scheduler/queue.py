"""Ordered sets of requests: rank = (priority, arrival time, order of adding)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.types import Request

Rank = tuple[int, float, int]


class RankedRequests:
    """Requests sorted by rank, best first. Insertion and removal are a binary search and one memory move.

    ``rank`` of a request never changes once given, so a preempted request returns to its old place in line.
    """

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self) -> Request:
        return self._requests[0]

    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request, rank: Rank) -> None:
        insort(self._ranks, rank)
        self._requests.insert(bisect_left(self._ranks, rank), request)

    def remove(self, rank: Rank) -> Request:
        index = bisect_left(self._ranks, rank)
        if index == len(self._ranks) or self._ranks[index] != rank:
            raise KeyError(rank)
        del self._ranks[index]
        return self._requests.pop(index)
