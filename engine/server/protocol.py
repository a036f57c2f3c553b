"""Request bodies to typed requests. Every fault is a ParameterError naming the member; unknown members are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.server.fields import Fields, sampling_params
from engine.text.chat_messages import shown
from engine.types import ParameterError, SamplingParams

MAX_TOKENS = 2**62  # what is beyond the context limit is clamped to it
MAX_CHOICES = 4096  # prompts x n of one request
MAX_LOGPROBS = 20


@dataclass(slots=True)
class ServingLimits:
    """What the server lets a request ask for."""

    max_model_len: int
    vocab_size: int
    max_num_tokens: int  # prompt + output of one sequence: max_model_len, or less when the cache is smaller
    max_logprobs: int = MAX_LOGPROBS
    allow_priority: bool = False
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GenerateOptions:
    """What both generation routes share."""

    model: str | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    priority: int
    truncate_prompt_tokens: int | None


@dataclass(slots=True)
class CompletionRequest:
    options: GenerateOptions
    prompts: list[str | list[int]]
    echo: bool


def parse_completion(body: Mapping[str, Any], limits: ServingLimits) -> CompletionRequest:
    fields = Fields(body)
    if fields.get("suffix"):
        raise fields.error("suffix", "is not supported by this model")
    echo = fields.flag("echo")
    max_tokens = fields.integer("max_tokens", 16, 0 if echo else 1, MAX_TOKENS)
    logprobs = check_logprobs(fields, "logprobs", limits)
    sampling = sampling_params(
        fields,
        limits.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        # max_tokens=0 has nothing to sample: scoring the prompt is then all the work there is
        prompt_logprobs=logprobs if echo and logprobs is not None else (0 if max_tokens == 0 else None),
    )
    best_of = fields.integer("best_of", None, 1, 1024)
    if best_of is not None and best_of != sampling.n:
        raise fields.error("best_of", f"other than n ({sampling.n}) is not supported, got {best_of}")
    prompts = parse_prompts(fields)
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise fields.error(
            "n", f"times the number of prompts must be at most {MAX_CHOICES}, got {len(prompts) * sampling.n}"
        )
    return CompletionRequest(parse_options(fields, limits, sampling), prompts, echo)


def parse_options(fields: Fields, limits: ServingLimits, sampling: SamplingParams) -> GenerateOptions:
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        raise fields.error("stream_options", "needs stream to be true")
    priority = fields.integer("priority", 0, -(2**31), 2**31 - 1) or 0
    if priority and not limits.allow_priority:
        raise fields.error("priority", f"must be 0 with the first-come scheduler, got {priority}")
    for token in sampling.stop_token_ids:
        if token >= limits.vocab_size:
            raise fields.error("stop_token_ids", f"must be below {limits.vocab_size}, got {shown(token)}")
    salt = fields.text("cache_salt")
    if salt == "":
        raise fields.error("cache_salt", "must not be empty")
    truncate = fields.integer("truncate_prompt_tokens", None, -1, MAX_TOKENS)
    if truncate == 0:
        raise fields.error("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
    return GenerateOptions(
        model=fields.text("model"),
        sampling=sampling,
        stream=stream,
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        continuous_usage=stream_options is not None and stream_options.flag("continuous_usage_stats"),
        return_token_ids=fields.flag("return_token_ids"),
        priority=priority,
        truncate_prompt_tokens=limits.max_model_len - 1 if truncate == -1 else truncate,
    )


def check_logprobs(fields: Fields, name: str, limits: ServingLimits) -> int | None:
    return fields.integer(name, None, 0, limits.max_logprobs)


def parse_prompts(fields: Fields) -> list[str | list[int]]:
    """``prompt``: a string, a list of strings, a list of token ids, a list of lists of token ids."""
    prompt = fields.get("prompt")
    if prompt is None:
        raise fields.error("prompt", "is missing")
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise fields.error("prompt", f"must be a string or a list, got {shown(prompt)}")
    elif not prompt:
        raise fields.error("prompt", "must not be empty")
    elif set(map(type, prompt)) == {int}:
        prompts = [prompt]
    elif set(map(type, prompt)) in ({str}, {list}):
        prompts = prompt
    else:
        raise fields.error("prompt", "must be a string, a list of strings, of token ids, or of lists of token ids")
    for one in prompts:
        if not one:
            raise fields.error("prompt", "must not be empty")
        if isinstance(one, list) and set(map(type, one)) != {int}:
            raise fields.error("prompt", "lists must hold integer token ids")
    return prompts


def check_prompt_ids(ids: list[int], limits: ServingLimits, param: str = "prompt") -> None:
    """A prompt that the engine can take: ids in the vocabulary, room for a token."""
    if not ids:
        raise ParameterError(param, f"{param} must not be empty")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise ParameterError(param, f"{param}: token ids must be in [0, {limits.vocab_size}), got {shown(wrong)}")


def check_room(num_prompt: int, num_new: int, limits: ServingLimits, param: str = "prompt") -> None:
    """Room for ``num_new`` (0 or 1) tokens behind the prompt; the message names both numbers."""
    if num_prompt + num_new > limits.max_num_tokens:
        raise ParameterError(
            param,
            f"{param} has {num_prompt} tokens, which leaves no room for a new one: the limit for prompt and output "
            f"together is {limits.max_num_tokens} tokens",
        )
