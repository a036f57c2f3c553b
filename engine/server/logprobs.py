"""Log-probabilities as the two generation routes show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.text.tokenizer import Tokenizer
from engine.text.utf8 import Utf8Text
from engine.types import TokenLogprobs

FLOOR = -9999.0  # JSON has no -inf (a filtered token) and no NaN


def finite(value: float) -> float:
    return value if value > FLOOR else FLOOR


class CompletionLogprobs:
    """The four parallel lists of /v1/completions. ``text_offset`` counts characters from the start of the choice."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._text = Utf8Text()
        self._offset = 0
        self._pending = self._lists()

    def add(self, token_id: int, entry: TokenLogprobs | None, *, hidden: bool = False) -> None:
        """One token; ``entry`` None is the first of a prompt, which nothing predicts. ``hidden``: shows no text."""
        lists = self._pending
        lists["text_offset"].append(self._offset)
        lists["tokens"].append(self._name(token_id))
        lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
        lists["top_logprobs"].append(None if entry is None else self._top(entry))
        if self._tokenizer is not None and not hidden:
            self._offset += len(self._text.feed(self._tokenizer.decode_bytes([token_id])))

    def take(self) -> dict[str, Any] | None:
        """What was added since the last call."""
        if not self._pending["tokens"]:
            return None
        lists, self._pending = self._pending, self._lists()
        return lists

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._name(entry.token_id): finite(entry.logprob)}
        for token_id, logprob in entry.top:
            name = self._name(token_id)
            top[name] = max(finite(logprob), top.get(name, FLOOR))  # ids may share a spelling
        return top

    def _name(self, token_id: int) -> str:
        return str(token_id) if self._tokenizer is None else self._tokenizer.token_str(token_id)

    @staticmethod
    def _lists() -> dict[str, Any]:
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """Items of ``logprobs.content`` of a chat choice."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.decode_bytes([token_id])
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    return [
        {**item(e.token_id, e.logprob), "top_logprobs": [item(i, value) for i, value in e.top[:num_top]]}
        for e in entries
    ]
