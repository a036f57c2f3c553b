"""Bytes of tokens to text, whole code points only."""

from __future__ import annotations

import codecs


class Utf8Text:
    """Incremental UTF-8: an unfinished sequence waits for its rest; bad bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What an unfinished sequence gives, once nothing more will come; then starts anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
