"""Stop strings in streamed text: found across any borders, with no more text held back than must be.

One Knuth-Morris-Pratt automaton a stop string: its state is the length of the longest prefix that the text ends with,
which is exactly the text that may still become a match. So the cost is linear and the result does not depend on how the
text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text, get back what is safe to show. The stop that ends first wins; of two that end together the longer.

    ``include`` keeps the stop string in the released text. After a match everything that follows is dropped.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop strings must not be empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failure = [_failure(stop) for stop in self._stops]
        self._state = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that can be released, the stop string once one is found)."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        for index, char in enumerate(text):
            stop = self._advance(char)
            if stop is not None:
                seen = self._held + text[: index + 1]
                self.matched, self._held = stop, ""
                return seen if self._include else seen[: len(seen) - len(stop)], stop
        seen = self._held + text
        keep = len(seen) - max(self._state)
        self._held = seen[keep:]
        return seen[:keep], None

    def flush(self) -> str:
        """The text held back, when nothing more will come. Empty after a match."""
        held, self._held = self._held, ""
        self._state = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        found = None
        for i, stop in enumerate(self._stops):
            state, failure = self._state[i], self._failure[i]
            while state and stop[state] != char:
                state = failure[state - 1]
            state += stop[state] == char
            if state == len(stop):
                found = found or stop  # the longest comes first
                state = 0
            self._state[i] = state
        return found


def _failure(stop: str) -> list[int]:
    """failure[i]: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    failure = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = failure[length - 1]
        length += stop[i] == stop[length]
        failure[i] = length
    return failure
