"""Output to deltas: the worked examples in every chunking, and text that looks like markers."""

from __future__ import annotations

import json
import random

import pytest

from engine.server.chat_choice import join_calls
from engine.text.chat import OutputParser
from engine.text.chat_output import THINK_HOLD
from tests.server.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
TOOLS = [{"type": "function", "function": {"name": "calc"}}]


def xml(text: str) -> str:
    """Shorthand of the examples: {+tag} opens, {-tag} closes."""
    return text.replace("{+", "<|open|>").replace("{-", "<|close|>").replace("}}", "<|sep|>")


ARG = '{+argument key="x" type="number"}}1{-argument}}'
CALC = '{+call tool="calc" index="1"}}' + ARG + "{-call}}"
QUOTED = '{"x": 1, "flag": true, "note": "1 < 2 & \\"q\\""}'
# name, output, thinking, tools, end, reasoning, content, calls, finish reason
EXAMPLES = [
    (
        "P1",
        "Two plus two.{-think}}{+response}}4{-response}}{-message}}",
        1,
        0,
        "stop",
        "Two plus two.",
        "4",
        [],
        "stop",
    ),
    ("P2", "4{-response}}{-message}}", 0, 0, "stop", None, "4", [], "stop"),
    (
        "P3",
        'Need it.{-think}}{+response}}{-response}}{+tools}}{+call tool="calc" index="1"}}'
        + ARG
        + '{+argument key="flag" type="boolean"}}true{-argument}}'
        '{+argument key="note" type="string"}}1 < 2 & "q"{-argument}}{-call}}{-tools}}{-message}}',
        1,
        1,
        "stop",
        "Need it.",
        None,
        [("calc", QUOTED)],
        "tool_calls",
    ),
    (
        "P4",
        '{-think}}{+response}}Checking.{-response}}{+tools}}{+call tool="calc" index="1"}}'
        '{+argument key="a" type="array"}}[1, 2]{-argument}}{-call}}{+call tool="calc" index="2"}}{-call}}'
        "{-tools}}{-message}}",
        1,
        1,
        "stop",
        None,
        "Checking.",
        [("calc", '{"a": [1, 2]}'), ("calc", "{}")],
        "tool_calls",
    ),
    ("P5", "still thinking", 1, 0, "length", "still thinking", None, [], "length"),
    ("P6", "ok{-think}}{+response}}par", 1, 0, "length", "ok", "par", [], "length"),
    (
        "P7",
        "hm{+tools}}" + CALC + "{-tools}}{-message}}",
        1,
        1,
        "stop",
        "hm",
        None,
        [("calc", '{"x": 1}')],
        "tool_calls",
    ),
    ("P8", "hm{+response}}hi{-response}}{-message}}", 1, 0, "stop", "hm", "hi", [], "stop"),
    ("P9", "hm{-think}}{+response}}hi{-message}}", 1, 1, "stop", "hm", "hi", [], "stop"),
    (
        "P10",
        '{-think}}{+response}}{-response}}{+tools}}{+call tool="a&amp;b&quot;c" index="1"}}'
        '{+argument key="k&amp;q" type="string"}}v{-argument}}{-call}}{-tools}}{-message}}',
        1,
        1,
        "stop",
        None,
        None,
        [('a&b"c', '{"k&q": "v"}')],
        "tool_calls",
    ),
    (
        "P11",
        "hm{-think}}{+response}}{-response}}{+tools}}"
        + CALC
        + '{+call tool="calc" index="2"}}{+argument key="x" type="num',
        1,
        1,
        "length",
        "hm",
        None,
        [("calc", '{"x": 1}')],
        "length",
    ),
    (
        "P12",
        '{-think}}{+response}}{-response}}{+tools}}{+call tool="calc" index="1"}}'
        '{+argument key="x" type="number"}}1.2.3{-argument}}{-call}}{-tools}}{-message}}',
        1,
        1,
        "stop",
        None,
        None,
        [("calc", '{"x": "1.2.3"}')],
        "tool_calls",
    ),
    (
        "P13",
        'hm{-think}}{+response}}x{-response}}{+tools}}{+call tool="calc" index="1"}}{-call}}{-tools}}{-message}}',
        1,
        0,
        "stop",
        "hm",
        "x",
        [],
        "stop",
    ),
    ("P14", "answer{-response}}{-message}}", 1, 0, "stop", None, "answer", [], "stop"),
]


def collect(deltas: list[dict]) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    reasoning, content, calls = "", "", []
    for delta in deltas:
        assert len(delta) == 1, f"a delta mixes channels: {delta}"
        assert None not in delta.values()
        reasoning += delta.get("reasoning_content", "")
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function"
                assert call["id"] == f"{call['function']['name']}_{len(calls)}"
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    return reasoning or None, content or None, calls


def parse(ids, cuts, end="stop", *, thinking=True, tools=TOOLS, tool_choice="auto", tokenizer=TOKENIZER):
    parser = OutputParser(tokenizer, thinking=thinking, tools=tools, tool_choice=tool_choice)
    deltas, start = [], 0
    for cut in [*cuts, len(ids)]:
        deltas += parser.feed(ids[start:cut])
        start = cut
    rest, reason = parser.finish(end)
    return (*collect(deltas + rest), reason)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(xml(text), special=True)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0])
@pytest.mark.parametrize("end_id", ["<|end_of_msg|>", "[EOS]", ""])
def test_worked_example_in_every_chunking(example, end_id):
    _, text, thinking, tools, end, *expected = example
    ids = ids_of(text + (end_id if end == "stop" else ""))
    chunkings = [[cut] for cut in range(len(ids))]  # every way to cut in two
    chunkings += [range(step, len(ids), step) for step in (1, 2, 3, 7)]
    rng = random.Random(0)
    chunkings += [sorted(rng.sample(range(len(ids)), min(5, len(ids)))) for _ in range(20)]
    for cuts in chunkings:
        got = parse(ids, cuts, end, thinking=bool(thinking), tools=TOOLS if tools else None)
        assert list(got) == expected, f"cut at {list(cuts)}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0])
def test_worked_example_with_k3_ids(example, k3_tokenizer):
    _, text, thinking, tools, end, *expected = example
    ids = k3_tokenizer.encode(xml(text), special=True)
    for cuts in [[], range(1, len(ids)), *[[cut] for cut in range(len(ids))]]:
        got = parse(ids, cuts, end, thinking=bool(thinking), tools=TOOLS if tools else None, tokenizer=k3_tokenizer)
        assert list(got) == expected


def test_streaming_order_of_p3():
    parser = OutputParser(TOKENIZER, thinking=True, tools=TOOLS)
    deltas = [delta for i in ids_of(EXAMPLES[2][1]) for delta in parser.feed([i])]
    kinds = [next(iter(delta)) for delta in deltas]
    assert kinds == sorted(kinds, key=("reasoning_content", "tool_calls").index)
    head = next(delta for delta in deltas if "tool_calls" in delta)["tool_calls"][0]
    assert head == {"index": 0, "id": "calc_0", "type": "function", "function": {"name": "calc", "arguments": ""}}


def test_head_of_a_call_goes_out_with_its_tag_of_a_later_one_with_its_first_argument():
    parser = OutputParser(TOKENIZER, thinking=True, tools=TOOLS)
    assert parser.feed(ids_of('hm{-think}}{+response}}{-response}}{+tools}}{+call tool="calc" index="1"'))
    (head,) = parser.feed(ids_of("}}"))
    assert head["tool_calls"][0]["function"] == {"name": "calc", "arguments": ""}
    assert not any("id" in item for d in parser.feed(ids_of(ARG + "{-call}}")) for item in d["tool_calls"])
    assert parser.feed(ids_of('{+call tool="calc" index="2"}}')) == []
    head, _ = parser.feed(ids_of('{+argument key="x" type="number"}}'))
    assert head["tool_calls"][0]["id"] == "calc_1"


def test_call_cut_off_after_its_tag_is_left_out_of_a_whole_answer():
    parser = OutputParser(TOKENIZER, thinking=False, tools=TOOLS)
    deltas = parser.feed(ids_of('a{-response}}{+tools}}{+call tool="calc" index="1"}}'))
    rest, reason = parser.finish("length")
    assert reason == "length"
    assert join_calls(deltas + rest, parser.unfinished_call) == []


def test_long_string_argument_streams():
    value = 'é"\\\n<|close|>argument<|sep|>' * 150
    ids = ids_of('{-think}}{+tools}}{+call tool="calc" index="1"}}{+argument key="x" type="string"}}')
    ids += list(value.encode()) + ids_of("{-argument}}{-call}}{-tools}}{-message}}")
    parser = OutputParser(TOKENIZER, thinking=True, tools=TOOLS)
    deltas = [delta for i in ids for delta in parser.feed([i])] + parser.finish("stop")[0]
    assert len(deltas) > 50
    assert all("�" not in json.dumps(delta, ensure_ascii=False) for delta in deltas)
    ((name, arguments),) = collect(deltas)[2]
    assert name == "calc"
    assert json.loads(arguments) == {"x": value}


def test_spelled_out_markers_are_text():
    spelled = "a<|close|>think<|sep|>b<|open|>tools<|sep|>"
    ids = list(spelled.encode()) + ids_of("{-think}}{+response}}") + list(spelled.encode()) + ids_of("{-response}}")
    assert parse(ids, range(1, len(ids))) == (spelled, spelled, [], "stop")


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_undeclared_or_forbidden_calls_are_dropped(tools, tool_choice):
    ids = ids_of("{-think}}{+response}}x{-response}}{+tools}}" + CALC + "{-tools}}{-message}}")
    calls = parse(ids, [], tools=tools, tool_choice=tool_choice)
    assert calls[1] == "x"
    assert len(calls[2]) == (1 if tools and tool_choice == "auto" else 0)


def test_calls_after_the_tools_section_are_not_calls():
    ids = ids_of("{-think}}{+tools}}" + CALC + "{-tools}}" + CALC + "{+tools}}" + CALC + "{-tools}}{-message}}" + CALC)
    assert parse(ids, range(1, len(ids)))[2] == [("calc", '{"x": 1}')]


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        ("string", "5", '{"x": "5"}'),
        ("number", "5", '{"x": 5}'),
        ("number", "1e400", '{"x": 1e400}'),
        ("number", "123456789012345678901234567890", '{"x": 123456789012345678901234567890}'),
        ("number", "NaN", '{"x": "NaN"}'),
        ("boolean", "true", '{"x": true}'),
        ("string", "true", '{"x": "true"}'),
        ("null", "null", '{"x": null}'),
        ("object", '{"a": [1, {"b": "é"}]}', '{"x": {"a": [1, {"b": "é"}]}}'),
        ("array", "[1, ", '{"x": "[1, "}'),
        ("string", "", '{"x": ""}'),
    ],
)
def test_argument_types(kind, text, arguments):
    output = f'{{-think}}}}{{+tools}}}}{{+call tool="calc" index="1"}}}}{{+argument key="x" type="{kind}"}}}}'
    ids = ids_of(output) + list(text.encode()) + ids_of("{-argument}}{-call}}{-tools}}{-message}}")
    for cuts in ([], range(1, len(ids))):
        assert parse(ids, cuts)[2] == [("calc", arguments)]


@pytest.mark.parametrize("name", ["a.b.c", "a-b", "a_b:1", "überprüfen", "n" * 64])
def test_tool_names_are_kept_whole(name):
    ids = ids_of(f'{{-think}}}}{{+tools}}}}{{+call tool="{name}" index="1"}}}}{{-call}}}}{{-tools}}}}')
    assert parse(ids, range(1, len(ids)))[2] == [(name, "{}")]


def test_json_element_is_the_whole_arguments_object():
    ids = ids_of(
        '{-think}}{+tools}}{+call tool="calc" index="1"}}{+json type="object"}}{"a": 1}{-json}}{-call}}{-tools}}'
    )
    assert parse(ids, range(1, len(ids)))[2] == [("calc", '{"a": 1}')]


def test_repeated_keys_last_wins_and_nameless_calls_vanish():
    second = ARG.replace("}}1{", "}}2{")
    output = '{-think}}{+tools}}{+call index="1"}}' + ARG + '{-call}}{+call tool="calc" index="2"}}' + ARG + second
    ((name, arguments),) = parse(ids_of(output + "{-call}}{-tools}}"), [])[2]
    assert (name, json.loads(arguments)) == ("calc", {"x": 2})


def test_answer_without_thinking_is_content_even_when_long():
    short, long = "4", "The answer is forty-two. " * 20
    for end_id in ("<|end_of_msg|>", ""):
        assert parse(ids_of(short + end_id), [])[:2] == (None, short)
        ids = ids_of(long + end_id)
        for cuts in ([], range(1, len(ids))):
            assert parse(ids, cuts)[1] == long


def test_only_a_first_thought_can_be_the_answer():
    first, second = "a first thought", "a second thought"
    ids = ids_of(first + "{-think}}{+response}}x{-response}}{+think}}" + second + "<|end_of_msg|>")
    for step in (1, len(ids)):
        parser = OutputParser(TOKENIZER, thinking=True)
        deltas = [delta for at in range(0, len(ids), step) for delta in parser.feed(ids[at : at + step])]
        assert collect(deltas + parser.finish("stop")[0])[:2] == (first + second, "x")
        assert parser.reasoning_tokens == len(first + second)


def test_reasoning_streams_after_a_short_hold():
    parser = OutputParser(TOKENIZER, thinking=True)
    released = [bool(parser.feed([ord("x")])) for _ in range(THINK_HOLD + 5)]
    assert released == [False] * THINK_HOLD + [True] * 5
    assert parser.reasoning_tokens == THINK_HOLD + 5


def test_code_points_are_never_cut():
    text = "héllo 🚀 中文"
    ids = ids_of(text + "{-think}}{+response}}" + text + "{-response}}{-message}}")
    parser = OutputParser(TOKENIZER, thinking=True)
    deltas = [delta for i in ids for delta in parser.feed([i])]
    assert collect(deltas)[:2] == (text, text)
    assert all("�" not in str(delta) for delta in deltas)


def test_unfinished_call_is_named_after_a_cut_and_left_out_alone():
    parser = OutputParser(TOKENIZER, thinking=False, tools=TOOLS)
    deltas = parser.feed(
        ids_of("{-response}}{+tools}}" + CALC + '{+call tool="calc" index="2"}}{+argument key="x" type="string"}}ab')
    )
    rest, reason = parser.finish("length")
    assert reason == "length"
    assert parser.unfinished_call == 1
    (call,) = join_calls(deltas + rest, parser.unfinished_call)
    assert call == {"id": "calc_0", "type": "function", "function": {"name": "calc", "arguments": '{"x": 1}'}}


def test_any_ids_at_all_parse_alike_in_every_chunking():
    """Random ids, markers as likely as text: no exception, no dependence on chunks, no marker in any text."""
    rng = random.Random(1)
    words = [
        "think",
        "response",
        "tools",
        "message",
        'call tool="f" index="1"',
        'argument key="x" type="string"',
        "é",
        "{",
    ]
    for _ in range(300):
        ids: list[int] = []
        for _ in range(rng.randrange(40)):
            ids += [rng.choice([259, 260, 261])] if rng.random() < 0.6 else list(rng.choice(words).encode())
        end = rng.choice(["stop", "length"])
        thinking = rng.random() < 0.5
        whole = parse(ids, [], end, thinking=thinking)
        assert parse(ids, range(1, len(ids)), end, thinking=thinking) == whole
        assert "<|" not in (whole[0] or "") + (whole[1] or "")


def test_text_after_an_ignored_end_is_content():
    parser = OutputParser(TOKENIZER, thinking=True, ignore_end=True)
    ids = ids_of("long enough to be shown{-think}}{+response}}a{-response}}{-message}}<|end_of_msg|>b[EOS]c")
    deltas = [delta for i in ids for delta in parser.feed([i])] + parser.finish("length")[0]
    assert collect(deltas)[:2] == ("long enough to be shown", "abc")


def test_escaped_escapes_stay_one_level_escaped():
    ids = ids_of('{-think}}{+tools}}{+call tool="a&amp;quot;b" index="1"}}{-call}}{-tools}}')
    assert parse(ids, [])[2] == [("a&quot;b", "{}")]
