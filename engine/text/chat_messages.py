"""OpenAI chat messages, checked and put into the shape that the renderer takes.

Every fault is a ParameterError naming the member (``messages[2].tool_calls[0].function.name``). The caller's objects
are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.types import ParameterError

ROLES = ("system", "user", "assistant", "tool")
SHOWN = 80  # how much of a bad value a message repeats


@dataclass(slots=True)
class ToolCall:
    """One call in history. ``arguments``: an object, or the text as sent when it does not parse."""

    call_id: str | None
    name: str
    arguments: dict[str, Any] | str


@dataclass(slots=True)
class Message:
    """One turn. ``parts`` is the content: each part is encoded on its own."""

    role: str
    parts: list[str]
    name: str | None = None
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_call_id: str | None = None
    tool_name: str | None = None
    partial: bool = False


def parse_messages(raw: Any) -> list[Message]:
    """Check ``messages`` of a request and bring tool results into the order of the calls they answer."""
    if not isinstance(raw, list):
        raise ParameterError("messages", f"messages must be a list, got {shown(raw)}")
    if not raw:
        raise ParameterError("messages", "messages must not be empty")
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(raw)]
    return _order_tool_results(messages)


def check_tools(raw: Any, where: str = "tools") -> list[dict[str, Any]]:
    """Check a list of tool declarations; null members of a tool and of its function are dropped, nothing deeper."""
    if not isinstance(raw, list):
        raise ParameterError(where, f"{where} must be a list, got {shown(raw)}")
    if not raw:
        raise ParameterError(where, f"{where} must not be an empty list; leave it out to declare no tool")
    names: set[str] = set()
    tools = []
    for i, tool in enumerate(raw):
        at = f"{where}[{i}]"
        if not isinstance(tool, dict):
            raise ParameterError(at, f"{at} must be an object, got {shown(tool)}")
        if tool.get("type") != "function":
            raise ParameterError(f"{at}.type", f'{at}.type must be "function", got {shown(tool.get("type"))}')
        function = tool.get("function")
        if not isinstance(function, dict):
            raise ParameterError(f"{at}.function", f"{at}.function must be an object, got {shown(function)}")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ParameterError(f"{at}.function.name", f"{at}.function.name must be a non-empty string")
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise ParameterError(f"{at}.function.parameters", f"{at}.function.parameters must be an object")
        if name in names:
            raise ParameterError(f"{at}.function.name", f"{at}: the tool name {shown(name)} is declared twice")
        names.add(name)
        clean = _without_nulls(tool)
        clean["function"] = _without_nulls(function)
        tools.append(clean)
    return tools


def shown(value: Any) -> str:
    """A bad value as an error message repeats it: bounded, and never deeper than one level of ``repr``."""
    if isinstance(value, (dict, list)):
        return f"a {'JSON object' if isinstance(value, dict) else 'list'} of {len(value)}"
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _without_nulls(members: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in members.items() if value is not None}


def _message(item: Any, at: str) -> Message:
    if not isinstance(item, dict):
        raise ParameterError(at, f"{at} must be an object, got {shown(item)}")
    role = item.get("role")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise ParameterError(
            f"{at}.role", f"{at}.role must be one of {', '.join(ROLES)} or developer, got {shown(role)}"
        )
    message = Message(role, _content(item.get("content"), f"{at}.content"), name=_text(item, "name", at) or None)
    if item.get("tools") is not None:
        if role != "system":
            raise ParameterError(f"{at}.tools", f"{at}.tools: only a system message may declare tools, this is {role}")
        if any(message.parts):
            raise ParameterError(f"{at}.tools", f"{at}: a system message has either content or tools, not both")
        message.tools = check_tools(item["tools"], f"{at}.tools")
    if role == "assistant":
        reasoning = _text(item, "reasoning_content", at) or ""
        if not reasoning.strip():
            reasoning = _text(item, "reasoning", at) or ""
        message.reasoning = reasoning if reasoning.strip() else ""
        message.calls = _calls(item.get("tool_calls"), f"{at}.tool_calls")
        message.partial = _flag(item, "partial", at)
    elif role == "tool":
        message.tool_call_id = _text(item, "tool_call_id", at)
        if not message.tool_call_id:
            raise ParameterError(f"{at}.tool_call_id", f"{at}.tool_call_id must name the call that this answers")
        message.tool_name = _text(item, "tool", at) or message.name
    return message


def _text(item: dict[str, Any], key: str, at: str) -> str | None:
    value = item.get(key)
    if value is not None and not isinstance(value, str):
        raise ParameterError(f"{at}.{key}", f"{at}.{key} must be a string, got {shown(value)}")
    return value


def _flag(item: dict[str, Any], key: str, at: str) -> bool:
    value = item.get(key)
    if value is not None and not isinstance(value, bool):
        raise ParameterError(f"{at}.{key}", f"{at}.{key} must be true or false, got {shown(value)}")
    return bool(value)


def _content(content: Any, at: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ParameterError(at, f"{at} must be a string, null or a list of parts, got {shown(content)}")
    parts = []
    for i, part in enumerate(content):
        here = f"{at}[{i}]"
        if not isinstance(part, dict):
            raise ParameterError(here, f"{here} must be an object, got {shown(part)}")
        kind = part.get("type")
        if kind in ("image_url", "image", "video_url", "input_audio", "file"):
            raise ParameterError(f"{here}.type", f"{here}: {kind} parts are not supported; this engine takes text only")
        if kind != "text":
            raise ParameterError(f"{here}.type", f'{here}.type must be "text", got {shown(kind)}')
        if not isinstance(part.get("text"), str):
            raise ParameterError(f"{here}.text", f"{here}.text must be a string, got {shown(part.get('text'))}")
        parts.append(part["text"])
    return parts


def _calls(raw: Any, at: str) -> list[ToolCall]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise ParameterError(at, f"{at} must be a list, got {shown(raw)}")
    calls = []
    for i, call in enumerate(raw):
        here = f"{at}[{i}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise ParameterError(here, f"{here} must be an object with a function")
        name = call["function"].get("name")
        if not isinstance(name, str) or not name:
            raise ParameterError(f"{here}.function.name", f"{here}.function.name must be a non-empty string")
        arguments = _arguments(call["function"].get("arguments"), f"{here}.function.arguments")
        calls.append(ToolCall(_text(call, "id", here), name, arguments))
    return calls


def _arguments(raw: Any, at: str) -> dict[str, Any] | str:
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    value = raw
    if isinstance(raw, str):
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return raw  # history may hold what a model wrote badly; it goes back unchanged
    if not isinstance(value, dict):
        raise ParameterError(at, f"{at} must hold a JSON object, got {shown(value)}")
    return value


def _order_tool_results(messages: list[Message]) -> list[Message]:
    """Each run of tool messages in the order of the calls it answers; a run with a stranger stays as sent."""
    ordered: list[Message] = []
    calls: list[ToolCall] = []
    i = 0
    while i < len(messages):
        if messages[i].role != "tool":
            if messages[i].role == "assistant":
                calls = messages[i].calls
            ordered.append(messages[i])
            i += 1
            continue
        end = i
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        ordered.extend(_order_run(messages[i:end], calls, i))
        i = end
    return ordered


def _order_run(run: list[Message], calls: list[ToolCall], first: int) -> Iterable[Message]:
    position: dict[str | None, int] = {}
    for at, call in enumerate(calls):
        position.setdefault(call.call_id, at)
    if all(message.tool_call_id in position for message in run):
        run = sorted(run, key=lambda message: position[message.tool_call_id])
        for message in run:
            message.tool_name = calls[position[message.tool_call_id]].name
        return run
    for at, message in enumerate(run):
        if not message.tool_name:
            if at >= len(calls):
                raise ParameterError(
                    f"messages[{first + at}].tool_call_id",
                    f"messages[{first + at}].tool_call_id {shown(message.tool_call_id)} answers no call",
                )
            message.tool_name = calls[at].name
    return run
