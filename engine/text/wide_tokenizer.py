"""A tokenizer for a model whose vocabulary is larger than the tokenizer's."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer


class WideTokenizer:
    """The same tokenizer, where ids beyond its table are special tokens without text instead of an error."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._limit = tokenizer.vocab_size
        self.vocab_size = vocab_size
        self.special_tokens = tokenizer.special_tokens
        self.eos_token_ids = tokenizer.eos_token_ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, special=special)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self._tokenizer.decode_bytes([i for i in ids if i < self._limit])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode([i for i in ids if i < self._limit], skip_special_tokens)

    def token_str(self, token_id: int) -> str:
        return self._tokenizer.token_str(token_id) if token_id < self._limit else f"<|token_{token_id}|>"

    def is_special(self, token_id: int) -> bool:
        return token_id >= self._limit or self._tokenizer.is_special(token_id)
