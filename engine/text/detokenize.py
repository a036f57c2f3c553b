"""Streamed ids to streamed text, whole code points only."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer
from engine.text.utf8 import Utf8Text


class IncrementalDetokenizer:
    """Feed ids as they come; the texts add up to ``tokenizer.decode`` of all ids, however they were cut."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._text = Utf8Text()

    def feed(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete. An unfinished code point waits for its last byte."""
        kept = [i for i in ids if not self._tokenizer.is_special(i)] if self._skip else ids
        return self._text.feed(self._tokenizer.decode_bytes(kept))

    def finish(self) -> str:
        """The replacement character for bytes that never became a code point, else nothing."""
        return self._text.finish()
