"""The text of one generated sequence as it grows: code points completed, stop strings cut. Both front ends use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.text.detokenize import IncrementalDetokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason, SamplingParams


class TextPiece(NamedTuple):
    """What a feed gave. ``num_tokens``: how many of the fed ids count (those after the end of a stop string do not)."""

    text: str
    num_tokens: int
    stop: str | None


class OutputText:
    """Ids in, text out. The sum of the texts does not depend on how the ids were cut into feeds.

    Rules: a stop string counts once ``min_tokens`` ids are there and the id that completes it is the last that counts
    (the caller then aborts the request). The id that ended the request (an end token or a stop id) gives no text
    unless ``include_stop_str_in_output``. Without a tokenizer the text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, sampling.skip_special_tokens) if tokenizer else None
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._include = sampling.include_stop_str_in_output
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> TextPiece:
        """The text that ``token_ids`` release; with a ``finish_reason`` also what was held back."""
        if self._detokenizer is None:
            return TextPiece("", len(token_ids), None)
        if self._matcher.matched is not None:
            return TextPiece("", 0, self._matcher.matched)
        released = []
        last = len(token_ids) - 1
        for index, token in enumerate(token_ids):
            self._num_tokens += 1
            if finish_reason is FinishReason.STOP and index == last and not self._include:
                continue
            text = self._detokenizer.feed([token])
            if self._num_tokens <= self._min_tokens:
                released.append(text)
                continue
            text, stop = self._matcher.feed(text)
            released.append(text)
            if stop is not None:
                return TextPiece("".join(released), index + 1, stop)
        if finish_reason is not None:
            text, stop = self._matcher.feed(self._detokenizer.finish())
            released += [text, self._matcher.flush()]
            return TextPiece("".join(released), len(token_ids), stop)
        return TextPiece("".join(released), len(token_ids), None)
