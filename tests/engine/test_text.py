"""Tokenizer files, whole code points, stop strings across borders."""

from __future__ import annotations

import base64
import json
import logging
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenize import IncrementalDetokenizer
from engine.text.stop import StopMatcher
from engine.text.tokenizer import MAX_RUN, MAX_SLICE, Tokenizer, TokenizerError, load_tokenizer, pieces

NAMES = {256: ("[BOS]", True), 257: ("[EOS]", True), 258: ("<|end_of_msg|>", True), 259: ("<|open|>", False)}
REAL = Path(os.environ.get("KIMI_TEST_TOKENIZER", Path(__file__).parents[3] / "shared" / "tokenizer"))


def write_tiktoken(folder: Path, names: dict[int, tuple[str, bool]] = NAMES, num_ranks: int = 256) -> Path:
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(num_ranks)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    table = {str(i): {"content": name, "special": special} for i, (name, special) in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table, "eos_token": "[EOS]"}))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    loaded = load_tokenizer(write_tiktoken(tmp_path))
    assert loaded is not None
    return loaded


def test_names_and_sizes_come_from_the_files(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 512
    assert tokenizer.special_tokens["<|open|>"] == 259
    assert tokenizer.special_tokens["<|reserved_token_300|>"] == 300
    assert tokenizer.eos_token_ids == {257}
    assert [tokenizer.is_special(i) for i in (65, 256, 258, 259, 300)] == [False, True, True, False, True]


def test_ordinary_mode_spells_control_tokens_out_and_special_mode_does_not(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a<|open|>") == list(b"a<|open|>")
    assert tokenizer.encode("a<|open|>b[EOS]", special=True) == [97, 259, 98, 257]
    assert tokenizer.encode("") == []


def test_skipping_special_tokens_keeps_what_is_not_flagged(tokenizer: Tokenizer) -> None:
    ids = [259, 104, 105, 258, 300]
    assert tokenizer.decode(ids) == "<|open|>hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|open|>hi<|end_of_msg|><|reserved_token_300|>"
    assert tokenizer.token_str(258) == "<|end_of_msg|>"
    assert tokenizer.decode_bytes([0xE2, 0x82]) == b"\xe2\x82"


def test_ids_outside_the_vocabulary_are_named(tokenizer: Tokenizer) -> None:
    for wrong in (512, -1):
        with pytest.raises(ValueError, match=rf"\[0, 512\), got {wrong}"):
            tokenizer.decode_bytes([1, wrong])


def test_lone_surrogates_and_odd_text_are_encoded(tokenizer: Tokenizer) -> None:
    for text in ("\ud800", "a\x00b", "é漢字🎉", "\r\n \n", "x" * 1000):
        ids = tokenizer.encode(text)
        assert all(0 <= i < 256 for i in ids)
        if "\ud800" not in text:
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "tiktoken.model").write_text("QQ== 0\nnonsense\n"), "line 2: expected 'base64 rank'"),
        (lambda d: (d / "tiktoken.model").write_text(""), "holds no token"),
        (lambda d: (d / "tiktoken.model").write_text("QQ== 0\nQg== 2\n"), "without gaps"),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), "cannot be read"),
        (lambda d: write_tiktoken(d, {5: ("[BOS]", True)}), "names id 5, which is a rank"),
        (lambda d: write_tiktoken(d, {256: ("x", True), 257: ("x", True)}), "one name to two ids"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path: Path, change, message: str) -> None:
    write_tiktoken(tmp_path)
    change(tmp_path)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_no_tokenizer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(tmp_path) is None
    assert "token ids only" in caplog.text


def reference_pieces(text: str) -> list[str]:
    """The rule of the chat format page, character by character."""
    result = []
    for start in range(0, len(text), MAX_SLICE):
        part, current, run, space = text[start : start + MAX_SLICE], "", 0, None
        for char in part:
            run = run + 1 if char.isspace() == space else 1
            space = char.isspace()
            if run > MAX_RUN:
                result.append(current)
                current, run = "", 1
            current += char
        result.append(current)
    return result


@pytest.mark.parametrize("length", [0, 1, MAX_RUN, MAX_RUN + 1, 2 * MAX_RUN, 2 * MAX_RUN + 1, MAX_SLICE + 7])
def test_pieces_cut_long_texts_and_long_runs(length: int) -> None:
    for text in (
        "x" * length,
        "ab \n" + " " * length + "tail",
        "x\x1c\u2003y" + "\x1c" * length,
        "ab " * (length // 3),
    ):
        assert list(pieces(text)) == reference_pieces(text)
        assert "".join(pieces(text)) == text


def test_tokenizer_json_is_read_through_tokenizers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    base = tokenizers.Tokenizer(tokenizers.models.BPE())
    base.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    base.train_from_iterator(["héllo wörld", "漢字 hello"], trainer)
    base.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    for text in ("héllo 漢字🎉\n", "<|end|>"):
        assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text
    end = loaded.special_tokens["<|end|>"]
    assert loaded.eos_token_ids == {end}
    assert loaded.encode("<|end|>", special=True) == [end]
    assert end not in loaded.encode("<|end|>")
    assert b"".join(loaded.decode_bytes([i]) for i in loaded.encode("🎉")) == "🎉".encode()
    with pytest.raises(ValueError, match="in the vocabulary"):
        loaded.decode_bytes([loaded.vocab_size])


def test_tokenizer_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "Metaspace"}, "pre_tokenizer": None}))
    with pytest.raises(TokenizerError, match="not a byte-level tokenizer"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if not (REAL / "tiktoken.model").is_file():
        pytest.skip(f"no K3 tiktoken.model in {REAL} (set KIMI_TEST_TOKENIZER to its folder)")
    folder = tmp_path_factory.mktemp("k3")
    (folder / "tiktoken.model").symlink_to(REAL / "tiktoken.model")
    table = {"163585": {"content": "[EOS]", "special": True}, "163586": {"content": "<|end_of_msg|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table, "eos_token": "[EOS]"}))
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


def test_real_merges_give_the_published_ids(real: Tokenizer) -> None:
    known = {
        "message": 2778, " role": 6244, '="': 878, '"': 1, "system": 14062, "user": 2482, "assistant": 69702,
        "tool": 20960, "think": 39964, "response": 12092, "tools": 25385, "call": 10257, "argument": 47185,
        "json": 5534, " tool": 4453, " index": 4002, " key": 2355, " type": 1798, " name": 1530,
    }  # fmt: skip
    assert {text: real.encode(text) for text in known} == {text: [i] for text, i in known.items()}
    assert (real.vocab_size, real.eos_token_ids) == (163_840, {163_585})
    assert real.encode("<|end_of_msg|>", special=True) == [163_586]
    assert len(real.encode("<|end_of_msg|>")) > 1


def test_real_merges_round_trip(real: Tokenizer) -> None:
    text = "Don't stop 漢字かな\n\n  x = 12345;\t// naïve 🎉 e\u0301" * 3
    assert real.decode(real.encode(text)) == text
    detokenizer = IncrementalDetokenizer(real)
    assert "".join([*(detokenizer.feed([i]) for i in real.encode(text)), detokenizer.finish()]) == text


def test_long_runs_are_fast_and_whole(real: Tokenizer) -> None:
    text = "a" * 60_000 + " " * 60_000
    assert real.decode(real.encode(text)) == text


# ---- incremental text ----


@given(st.lists(st.integers(0, 300), max_size=40), st.randoms(use_true_random=False))
def test_streamed_text_adds_up_and_never_splits_a_code_point(ids: list[int], rng: random.Random) -> None:
    tokenizer = BYTES
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts, rest = [], list(ids)
    while rest:
        cut = rng.randint(1, len(rest))
        parts.append(detokenizer.feed(rest[:cut]))
        rest = rest[cut:]
    parts.append(detokenizer.finish())
    assert "".join(parts) == tokenizer.decode(ids)


def test_code_point_waits_for_its_last_byte() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.feed([b]) for b in "é🎉".encode()] == ["", "é", "", "", "", "🎉"]
    assert detokenizer.feed([0xF0, 0x9F]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_inside_a_stream() -> None:
    ids = [104, 258, 105]
    assert IncrementalDetokenizer(BYTES).feed(ids) == "hi"
    assert IncrementalDetokenizer(BYTES, skip_special_tokens=False).feed(ids) == "h<|end_of_msg|>i"


def _bytes_tokenizer() -> Tokenizer:
    from engine.text.tokenizer import TiktokenTokenizer

    return TiktokenTokenizer({bytes([i]): i for i in range(256)}, NAMES, "[EOS]")


BYTES = _bytes_tokenizer()


# ---- stop strings ----


def whole(text: str, stops: list[str], include: bool = False) -> tuple[str, str | None]:
    """The rule on the whole text: the occurrence that ends first; of two that end together the longer stop."""
    hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return text, None
    end, _, stop = min(hits)
    return text[:end] if include else text[: end - len(stop)], stop


@given(
    st.text("ab\n", max_size=40), st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=3),
    st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_matching_does_not_depend_on_the_cuts(text: str, stops: list[str], include: bool, rng: random.Random) -> None:
    matcher = StopMatcher(stops, include)
    released, matched, fed = "", None, ""
    while fed != text and matched is None:
        piece = text[len(fed) : len(fed) + rng.randint(1, 5)]
        fed += piece
        part, matched = matcher.feed(piece)
        released += part
        if matched is None:  # held back: exactly the longest end that may still become a stop
            longest = max((k for s in stops for k in range(1, len(s)) if fed.endswith(s[:k])), default=0)
            assert len(fed) - len(released) == longest
    released += matcher.flush()
    assert (released, matched) == whole(text, stops, include)


def test_nothing_after_the_stop_leaks() -> None:
    """F114: the stop is found while much is held back and more tokens are already decoded."""
    matcher = StopMatcher(["<end of the answer now>!", "END"])
    assert matcher.feed("text <end of the answer now>") == ("text ", None)
    assert matcher.feed("END more") == ("<end of the answer now>", "END")
    assert matcher.feed("even more") == ("", "END")
    assert matcher.flush() == ""


def test_long_stop_that_never_matches_delays_nothing_else() -> None:
    """F112: a stop of 40 characters; only an end that could begin it is held."""
    matcher = StopMatcher(["=" * 39 + "!"])
    assert matcher.feed("abc") == ("abc", None)
    assert matcher.feed("a==") == ("a", None)
    assert matcher.feed("b") == ("==b", None)
    assert matcher.feed("x=") == ("x", None)
    assert matcher.flush() == "="


def test_overlapping_starts_are_found() -> None:
    assert StopMatcher(["aab"]).feed("aaab") == ("a", "aab")
    assert StopMatcher(["abab!"]).feed("ababab!") == ("ab", "abab!")
    assert StopMatcher(["bc", "abcd"]).feed("abcd") == ("a", "bc")
    assert StopMatcher(["bc", "abc"]).feed("xabc") == ("x", "abc")
    assert StopMatcher(["bc"], include=True).feed("abcd") == ("abc", "bc")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
