"""Kimi K3's chat format: messages to prompt. The way back is ``OutputParser`` (chat_output.py).

A prompt is a list of segments. A control segment is one control token by name; every other segment is ordinary text
and is encoded alone and without special tokens, so nothing a user writes can become a control token, and ids do not
depend on what stands beside a segment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.text.chat_messages import Message, ToolCall, check_tools, parse_messages
from engine.text.chat_output import OutputParser
from engine.types import ParameterError

__all__ = [
    "ChatOptions",
    "OutputParser",
    "Segment",
    "check_tools",
    "encode_segments",
    "parse_messages",
    "render",
    "to_text",
]

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORTS = ("low", "high", "max")
NUM_OPENER_TOKENS = 3  # open, channel name, sep: not counted in usage.prompt_tokens

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_JSON_OBJECT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_JSON_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class Segment(NamedTuple):
    text: str
    control: bool


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What beside the messages shapes a prompt. ``effort`` None leaves the effort message out."""

    tools: Sequence[dict[str, Any]] = field(default_factory=tuple)
    tool_choice: str = "auto"
    response_format: dict[str, Any] | None = None
    thinking: bool = True
    effort: str | None = "max"
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTokenizer(Protocol):
    special_tokens: dict[str, int]

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...


def render(messages: Sequence[Message], options: ChatOptions) -> list[Segment]:
    """The prompt as segments. ``messages`` come from ``parse_messages``. Raises ParameterError."""
    out: list[Segment] = []
    if options.tools:
        _note(out, "tool-declare", _TOOLS.format(_sorted_json(list(options.tools))))
    if options.thinking and options.effort is not None:
        if options.effort not in EFFORTS:
            raise ParameterError("reasoning_effort", f"thinking effort must be one of {EFFORTS}, got {options.effort}")
        _note(out, "thinking-effort", _EFFORT.format(options.effort))
    open_ended = options.continue_final_message or bool(messages and messages[-1].partial)
    if open_ended and (messages[-1].role != "assistant" or messages[-1].calls):
        raise ParameterError("messages", "only a last assistant message without tool calls can be continued")
    position = 0
    for i, message in enumerate(messages):
        position = position + 1 if message.role == "tool" else 0
        _message(out, message, position, options.thinking, open_ended and i == len(messages) - 1)
    if open_ended:
        return out
    if options.tool_choice in _TOOL_CHOICE:
        _note(out, "tool-choice", _TOOL_CHOICE[options.tool_choice])
    kind = (options.response_format or {}).get("type", "text")
    if kind != "text":
        text = _JSON_OBJECT.format(kind)
        if kind == "json_schema":
            text += _JSON_SCHEMA.format(_sorted_json(_schema((options.response_format or {}).get("json_schema"))))
        _note(out, "response-format", text)
    if options.add_generation_prompt:
        _tag(out, "message", ("role", "assistant"))
        _tag(out, "think" if options.thinking else "response")
    return out


def encode_segments(tokenizer: ChatTokenizer, segments: Sequence[Segment]) -> list[int]:
    """Token ids of a prompt. ParameterError when the tokenizer has no chat control tokens."""
    ids: list[int] = []
    for text, control in segments:
        if not control:
            ids.extend(tokenizer.encode(text, special=False))
        elif text in tokenizer.special_tokens:
            ids.append(tokenizer.special_tokens[text])
        else:
            raise ParameterError("messages", f"chat is not possible: the model's tokenizer has no {text} token")
    return ids


def to_text(segments: Sequence[Segment]) -> str:
    """The prompt as one string, for reading; encoding it as a whole is not the same as ``encode_segments``."""
    return "".join(segment.text for segment in segments)


def _message(out: list[Segment], message: Message, position: int, thinking: bool, open_ended: bool) -> None:
    if message.tools:
        _note(out, "tool-declare", _NEW_TOOLS.format(_sorted_json(message.tools)))
        return
    if message.role == "tool":
        _tag(out, "message", ("role", "tool"), ("tool", message.tool_name or ""), ("index", str(position)))
    elif message.name:
        _tag(out, "message", ("role", message.role), ("name", message.name))
    else:
        _tag(out, "message", ("role", message.role))
    if message.role != "assistant":
        out.extend(Segment(part, False) for part in message.parts if part)
    else:
        if thinking:
            _tag(out, "think")
            _body(out, message.reasoning)
            if open_ended and not any(message.parts):
                return  # the reasoning itself goes on
            _close(out, "think")
        _tag(out, "response")
        out.extend(Segment(part, False) for part in message.parts if part)
        if open_ended:
            return
        _close(out, "response")
        if message.calls:
            _tag(out, "tools")
            for index, call in enumerate(message.calls, start=1):
                _call(out, call, index)
            _close(out, "tools")
    _close(out, "message")
    out.append(Segment(END, True))


def _call(out: list[Segment], call: ToolCall, index: int) -> None:
    _tag(out, "call", ("tool", call.name), ("index", str(index)))
    if isinstance(call.arguments, str):
        _tag(out, "json", ("type", "object"))
        _body(out, call.arguments)
        _close(out, "json")
    else:
        for key, value in call.arguments.items():
            _tag(out, "argument", ("key", key), ("type", _json_type(value)))
            _body(out, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            _close(out, "argument")
    _close(out, "call")


def _json_type(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):  # before the numbers: a bool is an int to Python
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    return "object" if isinstance(value, dict) else "array"


def _schema(json_schema: Any) -> Any:
    for key in ("schema", "json_schema"):
        if isinstance(json_schema, dict) and json_schema.get(key) is not None:
            return json_schema[key]
    return json_schema


def _sorted_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _note(out: list[Segment], kind: str, text: str) -> None:
    """A whole system message that the format itself adds."""
    _tag(out, "message", ("role", "system"), ("type", kind))
    _body(out, text)
    _close(out, "message")
    out.append(Segment(END, True))


def _tag(out: list[Segment], name: str, *attributes: tuple[str, str]) -> None:
    out.append(Segment(OPEN, True))
    _body(out, name)
    for key, value in attributes:
        _body(out, " " + key)
        _body(out, '="')
        _body(out, value.replace("&", "&amp;").replace('"', "&quot;"))
        _body(out, '"')
    out.append(Segment(SEP, True))


def _close(out: list[Segment], name: str) -> None:
    out.append(Segment(CLOSE, True))
    _body(out, name)
    out.append(Segment(SEP, True))


def _body(out: list[Segment], text: str) -> None:
    if text:
        out.append(Segment(text, False))
