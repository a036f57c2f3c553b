"""Members of a request body, read with their types. A null counts as absent, as clients mean it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.text.chat_messages import shown
from engine.types import ParameterError, SamplingParams

MAX_STOPS = 64
# Members that change what is sampled and that this engine cannot do; an empty value asks for nothing.
UNSUPPORTED = ("logit_bias", "bad_words", "allowed_token_ids", "use_beam_search", "prompt_embeds", "structured_outputs")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "seed",
    "min_tokens",
)


class Fields:
    """Typed reading of one JSON object. Every method raises ParameterError naming the member."""

    def __init__(self, members: Mapping[str, Any], prefix: str = "") -> None:
        self.members = members
        self._prefix = prefix

    def get(self, name: str) -> Any:
        return self.members.get(name)

    def error(self, name: str, message: str) -> ParameterError:
        return ParameterError(self._prefix + name, f"{self._prefix}{name} {message}")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.members.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {shown(value)}")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.members.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, got {shown(value)}")
        if not low <= value <= high:
            raise self.error(name, f"must be between {low} and {high}, got {shown(value)}")
        return value

    def text(self, name: str) -> str | None:
        value = self.members.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"must be a string, got {shown(value)}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        value = self.members.get(name)
        if value is not None and (not isinstance(value, str) or value not in choices):
            raise self.error(name, f"must be one of {', '.join(choices)}, got {shown(value)}")
        return value

    def object(self, name: str) -> Fields | None:
        value = self.members.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {shown(value)}")
        return Fields(value, f"{self._prefix}{name}.")

    def stops(self) -> tuple[str, ...]:
        value = self.members.get("stop")
        if value is None:
            return ()
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise self.error("stop", f"must be a string or a list of at most {MAX_STOPS} strings, got {shown(value)}")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise self.error("stop", f"must hold non-empty strings, got {shown(stop)}")
        return tuple(stops)

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.members.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise self.error(name, f"must be a list of token ids, got {shown(value)}")
        return tuple(value)


def sampling_params(
    fields: Fields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """SamplingParams of a request; ``defaults`` (of the model and the operator) fill what it leaves out."""
    for name in UNSUPPORTED:
        if fields.get(name):
            raise fields.error(name, "is not supported by this engine")
    given = {name: fields.get(name) for name in SAMPLING if fields.get(name) is not None}
    return SamplingParams(
        **{**{name: defaults[name] for name in SAMPLING if name in defaults}, **given},
        max_tokens=max_tokens,
        stop=fields.stops(),
        stop_token_ids=fields.token_ids("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output"),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
