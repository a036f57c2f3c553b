"""What ``LLM`` gives back: standard library only, as engine/types.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. ``token_ids`` includes an end token or stop id; ``text`` does not.

    ``finish_reason``: "stop", "length" or "error" (then ``error`` says why). ``stop_reason``: the stop string or id.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its n sequences. ``prompt`` is None for a prompt of ids. Times are on ``time.monotonic``.

    ``prompt_logprobs``: an entry for each prompt token, None for the first; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(slots=True)
class StreamChunk:
    """News of one sequence: ``text`` and ``token_ids`` are what came new. ``prompt_index`` counts the prompts given."""

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
