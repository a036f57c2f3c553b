"""A tokenizer with one token per byte and K3's control tokens: fast, and every border falls inside something."""

from __future__ import annotations

import re

NAMES = {"[BOS]": 256, "[EOS]": 257, "<|end_of_msg|>": 258, "<|open|>": 259, "<|close|>": 260, "<|sep|>": 261}
HIDDEN = {"[BOS]", "[EOS]", "<|end_of_msg|>"}  # special: true in the published table


class ByteTokenizer:
    vocab_size = 262
    special_tokens = NAMES

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if not special:
            return list(text.encode())
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, NAMES)) + ")", text):
            ids.extend([NAMES[piece]] if piece in NAMES else piece.encode())
        return ids

    def decode_bytes(self, ids) -> bytes:
        names = {number: name for name, number in NAMES.items()}
        return b"".join(names[i].encode() if i in names else bytes([i]) for i in ids)

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return self.decode_bytes(kept).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in (256, 257, 258)

    def token_str(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)
