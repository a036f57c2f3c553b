"""/v1/completions: ids from the engine to text choices, streamed or whole."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.server.job import Job, encode, truncate
from engine.server.logprobs import CompletionLogprobs
from engine.server.protocol import CompletionRequest, parse_completion
from engine.server.state import ServerState
from engine.server.usage import Usage
from engine.text.output import OutputText
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason, RequestUpdate, SamplingParams


@dataclass(slots=True)
class Piece:
    """What a choice has to show after an update."""

    text: str = ""
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionChoice:
    """One sequence. ``feed`` gives None while its tokens show nothing yet."""

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, prompt: list[int] | None) -> None:
        """``prompt``: the ids to echo, or None."""
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._echo = prompt
        self._text = OutputText(tokenizer, sampling)
        self._logprobs = CompletionLogprobs(tokenizer) if sampling.logprobs is not None else None
        self._ids: list[int] = []
        self.num_tokens = 0  # of the last update: those behind a stop string do not count
        self.done = False
        self.stopped_here = False  # by a stop string, while the engine would go on

    def feed(self, update: RequestUpdate, echo_text: str = "") -> Piece | None:
        text = echo_text if self._echo is not None else ""
        if self._echo is not None:
            self._add_prompt(self._echo, update)
            self._echo = None
        new = self._text.feed(update.token_ids, update.finish_reason)
        text += new.text
        self.num_tokens = new.num_tokens
        self._ids += update.token_ids[: new.num_tokens]
        if self._logprobs is not None:
            for entry in update.logprobs[: new.num_tokens]:
                self._logprobs.add(entry.token_id, entry, hidden=self._is_hidden(entry.token_id))
        reason: str | None = None if update.finish_reason is None else update.finish_reason.value
        stop_reason = update.stop_reason
        if new.stop is not None:
            self.stopped_here = update.finish_reason is None
            reason, stop_reason = FinishReason.STOP.value, new.stop
        self.done = reason is not None
        if not text and not self.done and self._tokenizer is not None:
            return None
        ids, self._ids = self._ids, []
        return Piece(text, self._logprobs.take() if self._logprobs else None, ids, reason, stop_reason)

    def _add_prompt(self, prompt: list[int], update: RequestUpdate) -> None:
        if self._logprobs is None:
            return
        self._logprobs.add(prompt[0], None)
        for token_id, entry in zip(prompt[1:], update.prompt_logprobs, strict=True):
            self._logprobs.add(token_id, entry)

    def _is_hidden(self, token_id: int) -> bool:
        return (
            self._tokenizer is not None and self._sampling.skip_special_tokens and self._tokenizer.is_special(token_id)
        )


class CompletionAnswer:
    """Everything of one request: ``await CompletionAnswer.start(...)``, then ``stream`` or ``whole``."""

    def __init__(self, state: ServerState, request: CompletionRequest, prompts: list[list[int]], client: str | None):
        self._options = request.options
        self._prompts = prompts
        self.model = state.check_model(request.options.model)
        self.job = Job(state, prompts, request.options, kind="cmpl", param="prompt", client_id=client)
        n = request.options.sampling.n
        self._choices = [
            CompletionChoice(state.tokenizer, request.options.sampling, prompts[i // n] if request.echo else None)
            for i in range(self.job.num_choices)
        ]
        self._echo_texts = [
            _echo_text(state.tokenizer, given, ids) for given, ids in zip(request.prompts, prompts, strict=True)
        ]
        self._usage = Usage(sum(map(len, prompts)))
        self._head = {"id": self.job.id, "object": "text_completion", "created": int(time.time()), "model": self.model}

    @classmethod
    async def start(cls, state: ServerState, body: Mapping[str, Any], client: str | None) -> CompletionAnswer:
        """Check the body and hand it to the engine. Raises ParameterError or ApiError."""
        request = parse_completion(body, state.limits)
        state.check_model(request.options.model)
        prompts = []
        for given in request.prompts:
            ids = given if isinstance(given, list) else await _encode_prompt(state, given)
            prompts.append(truncate(ids, request.options.truncate_prompt_tokens))
        return cls(state, request, prompts, client)

    @property
    def is_stream(self) -> bool:
        return self._options.stream

    async def _pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        async for news in self.job.updates():
            pieces = []
            for index, update in news:
                choice = self._choices[index]
                if choice.done:
                    continue
                piece = choice.feed(update, self._echo_texts[index // self._options.sampling.n])
                self._usage.add(update, choice.num_tokens)
                if choice.stopped_here:
                    self.job.end_choice(index)
                if piece is not None:
                    pieces.append((index, piece))
            if pieces:
                yield pieces

    async def stream(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Chunks as they come."""
        started: set[int] = set()
        async for pieces in self._pieces():
            chunks = []
            for index, piece in pieces:
                choice = self._choice(index, piece)
                if self._options.return_token_ids and index not in started:
                    choice["prompt_token_ids"] = self._prompts[index // self._options.sampling.n]
                chunk = {**self._head, "choices": [choice]}
                if self._options.return_token_ids and not started:
                    chunk["prompt_token_ids"] = self._prompt_ids()
                started.add(index)
                if self._options.continuous_usage:
                    chunk["usage"] = self._usage.as_json()
                chunks.append(chunk)
            yield chunks
        if self._options.include_usage:
            yield [{**self._head, "choices": [], "usage": self._usage.as_json()}]

    async def whole(self) -> dict[str, Any]:
        """The complete answer: the sum of the pieces."""
        sums = [Piece() for _ in self._choices]
        async for pieces in self._pieces():
            for index, piece in pieces:
                _append(sums[index], piece)
        choices = [self._choice(index, piece) for index, piece in enumerate(sums)]
        answer: dict[str, Any] = {**self._head, "choices": choices, "usage": self._usage.as_json()}
        if self._options.return_token_ids:
            for index, choice in enumerate(choices):
                choice["prompt_token_ids"] = self._prompts[index // self._options.sampling.n]
            answer["prompt_token_ids"] = self._prompt_ids()
        return answer

    def _prompt_ids(self) -> list[int] | list[list[int]]:
        return self._prompts[0] if len(self._prompts) == 1 else self._prompts

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice


async def _encode_prompt(state: ServerState, text: str) -> list[int]:
    tokenizer = state.need_tokenizer("prompt")
    # special: a client may send a rendered conversation, as the reference tokenizer's encode allows
    return await encode(lambda: tokenizer.encode(text, special=True), len(text), "prompt")


def _echo_text(tokenizer: Tokenizer | None, given: str | list[int], ids: list[int]) -> str:
    if tokenizer is None:
        return ""
    return given if isinstance(given, str) else tokenizer.decode(ids, skip_special_tokens=False)


def _append(into: Piece, piece: Piece) -> None:
    into.text += piece.text
    into.token_ids += piece.token_ids
    into.finish_reason, into.stop_reason = piece.finish_reason, piece.stop_reason
    if into.logprobs is None:
        into.logprobs = piece.logprobs
    elif piece.logprobs is not None:
        for name, values in piece.logprobs.items():
            into.logprobs[name] += values
