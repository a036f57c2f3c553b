"""The body of a chat request: messages, tools, thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.server.fields import Fields, sampling_params
from engine.server.protocol import MAX_TOKENS, GenerateOptions, ServingLimits, check_logprobs, parse_options
from engine.text.chat import EFFORTS, ChatOptions
from engine.text.chat_messages import Message, check_tools, parse_messages, shown
from engine.types import ParameterError


@dataclass(slots=True)
class ChatRequest:
    options: GenerateOptions
    messages: list[Message]
    chat: ChatOptions
    logprobs: bool
    include_reasoning: bool
    parallel_tool_calls: bool

    @property
    def has_tools(self) -> bool:
        return bool(self.chat.tools) or any(message.tools for message in self.messages)

    @property
    def opens_thinking(self) -> bool:
        """Whether the prompt ends inside the think channel: a continued answer ends inside its content instead."""
        last = self.messages[-1]
        continued = self.chat.continue_final_message or last.partial
        return self.chat.thinking and not (continued and any(last.parts))

    @property
    def num_past_calls(self) -> int:
        return sum(len(message.calls) for message in self.messages)


def parse_chat(body: Mapping[str, Any], limits: ServingLimits, default_kwargs: Mapping[str, Any]) -> ChatRequest:
    fields = Fields(body)
    messages, chat = parse_conversation(fields, default_kwargs)
    max_tokens = fields.integer("max_tokens", None, 1, MAX_TOKENS)
    max_completion = fields.integer("max_completion_tokens", None, 1, MAX_TOKENS)
    if max_completion is not None and max_completion > limits.max_model_len:
        raise fields.error(
            "max_completion_tokens", f"must be at most the context limit {limits.max_model_len}, got {max_completion}"
        )
    logprobs = fields.flag("logprobs")
    top = check_logprobs(fields, "top_logprobs", limits)
    if top is not None and not logprobs:
        raise fields.error("top_logprobs", "needs logprobs to be true")
    sampling = sampling_params(
        fields,
        limits.sampling_defaults,
        max_tokens=max_tokens if max_completion is None else max_completion,
        logprobs=(top or 0) if logprobs else None,
    )
    return ChatRequest(
        options=parse_options(fields, limits, sampling),
        messages=messages,
        chat=chat,
        logprobs=logprobs,
        include_reasoning=fields.flag("include_reasoning", True),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
    )


def parse_conversation(fields: Fields, default_kwargs: Mapping[str, Any]) -> tuple[list[Message], ChatOptions]:
    """What shapes the prompt; also used by /tokenize."""
    messages = parse_messages(fields.get("messages"))
    tools = [] if fields.get("tools") is None else check_tools(fields.get("tools"))
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        raise fields.error("tool_choice", "naming a function is not supported; use auto, none or required")
    choice = fields.choice("tool_choice", ("none", "auto", "required")) or "auto"
    if choice == "required" and not tools and not any(message.tools for message in messages):
        raise fields.error("tool_choice", "required needs tools")
    thinking, effort = _thinking(fields, default_kwargs)
    continued = fields.flag("continue_final_message")
    if continued and fields.get("add_generation_prompt") is True:
        raise fields.error("continue_final_message", "and add_generation_prompt cannot both be true")
    last = messages[-1]
    if (continued or last.partial) and (last.role != "assistant" or last.calls):
        raise fields.error("messages", "can only be continued at a last assistant message without tool calls")
    options = ChatOptions(
        tools=tools,
        tool_choice=choice,
        response_format=_response_format(fields),
        thinking=thinking,
        effort=effort,
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        continue_final_message=continued,
    )
    return messages, options


def _thinking(fields: Fields, default_kwargs: Mapping[str, Any]) -> tuple[bool, str | None]:
    kwargs = fields.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs.")
    hosted = fields.object("thinking") or Fields({}, "thinking.")
    kind = hosted.choice("type", ("enabled", "disabled"))
    # the first that is set decides; an explicit thinking_effort null means "no effort message"
    found: list[tuple[str, Any]] = []
    if "thinking_effort" in kwargs.members:
        found.append(("chat_template_kwargs.thinking_effort", kwargs.get("thinking_effort")))
    found += [
        (name, value)
        for name, value in (
            ("thinking.effort", hosted.get("effort")),
            ("reasoning_effort", fields.get("reasoning_effort")),
            ("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort")),
        )
        if value is not None
    ]
    param, effort = found[0] if found else ("reasoning_effort", default_kwargs.get("thinking_effort", "max"))
    switches = (
        kwargs.flag("thinking") if kwargs.get("thinking") is not None else None,
        kwargs.flag("enable_thinking") if kwargs.get("enable_thinking") is not None else None,
        None if kind is None else kind == "enabled",
        False if effort == "none" and param.endswith("reasoning_effort") else None,
        default_kwargs.get("thinking", default_kwargs.get("enable_thinking")),
    )
    thinking = next((switch for switch in switches if switch is not None), True)
    if not thinking:
        return False, None
    if effort == "none" and param.endswith("reasoning_effort"):
        effort = default_kwargs.get("thinking_effort", "max")  # thinking was asked for explicitly
    if effort is not None and effort not in EFFORTS:
        raise ParameterError(param, f"{param} must be one of {', '.join(EFFORTS)}, got {shown(effort)}")
    return True, effort


def _response_format(fields: Fields) -> dict[str, Any] | None:
    form = fields.object("response_format")
    if form is None:
        return None
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise form.error("type", "is missing")
    if kind == "json_schema":
        schema = form.object("json_schema")
        if schema is None:
            raise form.error("json_schema", "is missing")
        if not schema.text("name"):
            raise schema.error("name", "must be a non-empty string")
        if schema.object("schema") is None and schema.object("json_schema") is None:
            raise schema.error("schema", "is missing")
    return dict(form.members)
