"""What crosses the borders between front end, scheduler and runner.

Standard library only: a process that holds no model (the HTTP front end) can import this.
"""

from __future__ import annotations

import enum
import math
import time
from dataclasses import dataclass, field


class ParameterError(ValueError):
    """A request or option that cannot be served. ``param`` names the member at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """The waiting queue is at its limit; the same request may be sent again later."""


class EngineDeadError(RuntimeError):
    """The engine can serve nobody any more and has to be started anew; no request is to blame."""


class FinishReason(str, enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # never ran, or was preempted: owns no block and no slot
    RUNNING = "running"  # owns blocks and a slot
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request. Field names and ranges are those of the OpenAI API and vLLM.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``logprobs`` / ``prompt_logprobs`` count the alternatives
    reported beside the chosen token; None is off. ``max_tokens`` None means up to the context limit.
    Raises ParameterError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 1e3, open_low=True)
        _check_int("n", self.n, 1, 1024)
        if self.n > 1 and self.temperature == 0:
            raise ParameterError("n", f"n must be 1 with temperature 0, got {self.n}")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, 2**62)
        _check_int("min_tokens", self.min_tokens, 0, 2**62)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, 20)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ParameterError("stop", f"stop must hold non-empty strings, got {text!r}")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)


def _check_int(param: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(param, f"{param} must be an integer, got {_short(value)}")
    if not low <= value <= high:
        raise ParameterError(param, f"{param} must be between {low} and {high}, got {_short(value)}")


def _check_float(param: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(param, f"{param} must be a number, got {_short(value)}")
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ParameterError(param, f"{param} must be in {bracket}{low:g}, {high:g}], got {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. The scheduler owns every field below the line; others only read them.

    Invariant after each step: the slot's state and the blocks hold exactly the first ``num_computed_tokens`` of
    ``prompt_token_ids + output_token_ids``.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs first
    arrival_time: float = field(default_factory=time.monotonic)
    # ---- owned by the scheduler ----
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    max_num_tokens: int = 0  # prompt + output at most: max_tokens clamped to the context limit; set when added
    block_table: list[int] = field(default_factory=list)
    slot: int = 0  # 0: none; slot 0 and block 0 are never owned, padding points at them
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions start..stop-1, over prompt and output."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - split]


@dataclass(slots=True)
class ScheduledRequest:
    """The tokens of one request in one step: positions num_computed_tokens .. + num_new_tokens - 1."""

    request: Request
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool  # True when the last of them is the request's newest token: the step yields a token

    @property
    def is_decode(self) -> bool:
        """One token of a sequence that already has state. A one-token first chunk is prefill: it starts from zero."""
        return self.num_new_tokens == 1 and self.num_computed_tokens > 0


@dataclass(slots=True)
class StepPlan:
    """One forward pass, ordered [decode | prefill]."""

    scheduled: list[ScheduledRequest]
    num_decodes: int
    num_tokens: int


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, its rank (1 = most likely), the best alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class StepOutput:
    """What a step gave, by request id. A request whose logits are not finite stands in ``errors``, not ``tokens``."""

    tokens: dict[str, SampledToken] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    # for requests with prompt_logprobs: an entry for each prompt token that this step's chunk predicts, in order; each
    # once in the request's life, so a recompute after a preemption gives only those that are missing
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(slots=True)
class RequestUpdate:
    """News of one request after a step; the front end turns ids into text."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string; None for an end token
    error: str | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None  # seconds on time.monotonic; with the last update


@dataclass(slots=True)
class EngineStats:
    """Counts at one moment, and totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    last_step_tokens: int = 0
