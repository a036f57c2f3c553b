"""``tokenizer.json`` through the tokenizers library, for byte-level tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from engine.text.tokenizer import TokenizerError


class HfTokenizer:
    """A byte-level ``tokenizer.json``; see ``engine.text.tokenizer.Tokenizer`` for the methods.

    Bytes of single tokens are needed (streaming, logprobs), which only byte-level vocabularies give; another kind is
    refused. Ordinary mode suppresses tokens flagged special; other added tokens are matched in either mode.
    """

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        if '"ByteLevel"' not in json.dumps([content.get("decoder"), content.get("pre_tokenizer")]):
            raise TokenizerError(f"{path} is not a byte-level tokenizer; only those can be used")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = 1 + max([*self._tokenizer.get_vocab(with_added_tokens=True).values(), *added])
        self.special_tokens = {token.content: i for i, token in added.items()}
        self._hidden = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        self.eos_token_ids = frozenset({self.special_tokens[eos_token]} if eos_token in self.special_tokens else ())

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        self._tokenizer.encode_special_tokens = not special
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes, ids))

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            raise ValueError(f"token ids must be in [0, {self.vocab_size}) and in the vocabulary, got {token_id}")
        return bytes(self._byte_of[char] for char in token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if i not in self._hidden] if skip_special_tokens else ids
        return self.decode_bytes(kept).decode("utf-8", "replace")

    def token_str(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._hidden


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else the next of U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
