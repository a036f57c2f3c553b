"""Token ids to text and back, from the files beside a checkpoint.

``tiktoken.model`` is read through tiktoken: merges from the file, the split pattern and the cutting rules of Kimi's
tokenizer, names of the ids above the ranks from ``tokenizer_config.json``. ``tokenizer.json`` is read through
tokenizers (engine/text/hf_tokenizer.py). With neither, an engine works on token ids alone.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import tiktoken

logger = logging.getLogger(__name__)

_HAN = r"[^\p{Han}]"
_HEAD = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&{_HAN}]"
_TAIL = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&{_HAN}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}*{_TAIL}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HEAD}+{_TAIL}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

NUM_RESERVED = 256  # ids kept above the ranks, named or not
MAX_SLICE = 400_000  # characters that are encoded at once
MAX_RUN = 25_000  # longest run of only-space or only-non-space characters that is kept in one piece
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN + 1},}}|\S{{{MAX_RUN + 1},}}")


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used."""


class Tokenizer(Protocol):
    """What the front ends need. ``vocab_size`` and ``special_tokens`` come from the files.

    ``special_tokens`` maps each name above the ranks to its id. ``is_special`` says which of them
    ``skip_special_tokens`` removes: those flagged so in tokenizer_config.json, and the unnamed ones.
    """

    vocab_size: int
    special_tokens: dict[str, int]
    eos_token_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text``. ``special=False`` (ordinary): a spelled control token is plain text; True: it is its id."""
        ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of all ids, special ones by their name. ValueError for an id outside the vocabulary."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_str(self, token_id: int) -> str:
        """One token as text, alone; for display."""
        ...

    def is_special(self, token_id: int) -> bool: ...


class TiktokenTokenizer:
    """Kimi's tokenizer from ``tiktoken.model``; see ``Tokenizer`` for the methods."""

    def __init__(self, ranks: dict[bytes, int], added: dict[int, tuple[str, bool]], eos_token: str | None) -> None:
        """``added``: id -> (name, special flag) of the ids above the ranks that have a name."""
        num_ranks = len(ranks)
        if sorted(ranks.values()) != list(range(num_ranks)):
            raise TokenizerError(f"tiktoken.model must rank its {num_ranks} tokens 0..{num_ranks - 1} without gaps")
        below = [i for i in added if i < num_ranks]
        if below:
            raise TokenizerError(f"added_tokens_decoder names id {below[0]}, which is a rank of tiktoken.model")
        self.vocab_size = max([num_ranks + NUM_RESERVED, *(i + 1 for i in added)])
        ids = range(num_ranks, self.vocab_size)
        names = {i: added[i][0] if i in added else f"<|reserved_token_{i}|>" for i in ids}
        self.special_tokens = {name: i for i, name in names.items()}
        if len(self.special_tokens) != len(names):
            raise TokenizerError("added_tokens_decoder gives one name to two ids")
        self._hidden = frozenset(i for i in ids if i not in added or added[i][1])
        self.eos_token_ids = frozenset({self.special_tokens[eos_token]} if eos_token in self.special_tokens else ())
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = []
        for piece in pieces(text):
            if special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(f"token ids must be in [0, {self.vocab_size}), got {wrong[0]}")
        return self._encoding.decode_bytes(list(ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if i not in self._hidden] if skip_special_tokens else ids
        return self.decode_bytes(kept).decode("utf-8", "replace")

    def token_str(self, token_id: int) -> str:
        return self.decode_bytes([token_id]).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._hidden


def pieces(text: str) -> Iterator[str]:
    """The parts of ``text`` that are encoded one by one. The cuts change ids, so they belong to the format."""
    for start in range(0, len(text), MAX_SLICE):
        part = text[start : start + MAX_SLICE]
        begin = 0
        for run in _LONG_RUN.finditer(part):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def load_tokenizer(model_dir: Path | str) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory; None (said in the log) when it has none: token ids only.

    Raises TokenizerError for files that cannot be used.
    """
    model_dir = Path(model_dir)
    if (model_dir / "tiktoken.model").is_file():
        added, eos_token = read_tokenizer_config(model_dir)
        return TiktokenTokenizer(read_ranks(model_dir / "tiktoken.model"), added, eos_token)
    if (model_dir / "tokenizer.json").is_file():
        from engine.text.hf_tokenizer import HfTokenizer

        return HfTokenizer(model_dir / "tokenizer.json", read_tokenizer_config(model_dir)[1])
    logger.warning(
        "%s has neither tiktoken.model nor tokenizer.json: prompts and outputs are token ids only", model_dir
    )
    return None


def read_ranks(path: Path) -> dict[bytes, int]:
    """``tiktoken.model``: a line ``base64(token) rank`` for each token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{path} line {number}: expected 'base64 rank', got {line[:60]!r}") from None
    if not ranks:
        raise TokenizerError(f"{path} holds no token")
    return ranks


def read_tokenizer_config(model_dir: Path) -> tuple[dict[int, tuple[str, bool]], str | None]:
    """``tokenizer_config.json`` -> (added_tokens_decoder as id -> (name, special), eos_token). Empty without a file."""
    path = model_dir / "tokenizer_config.json"
    if not path.is_file():
        logger.warning("%s is missing: ids above the ranks have no names, so chat markup is not available", path)
        return {}, None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        added = {
            int(key): (str(entry["content"]), bool(entry.get("special", False)))
            for key, entry in config.get("added_tokens_decoder", {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    eos = config.get("eos_token")
    return added, eos.get("content") if isinstance(eos, dict) else eos
