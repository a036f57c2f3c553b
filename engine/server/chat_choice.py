"""One sequence of a chat: ids to deltas, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.server.chat_protocol import ChatRequest
from engine.server.logprobs import chat_logprobs
from engine.text.chat import OutputParser
from engine.text.stop import StopMatcher
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason, RequestUpdate, SamplingParams

TEXT_FIELDS = ("reasoning_content", "content")


@dataclass(slots=True)
class Piece:
    """What a choice has to show after an update: deltas in order, and what goes with the first of them."""

    deltas: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatChoice:
    """One sequence: parser, then stop strings on the text of each channel (never on tool calls)."""

    def __init__(self, tokenizer: Tokenizer, request: ChatRequest) -> None:
        sampling: SamplingParams = request.options.sampling
        self._tokenizer = tokenizer
        self._num_top = sampling.logprobs
        self.parser = OutputParser(
            tokenizer,
            thinking=request.opens_thinking,
            tools=list(request.chat.tools) or [tool for message in request.messages for tool in message.tools],
            tool_choice=request.chat.tool_choice,
            first_call=request.num_past_calls,
            ignore_end=sampling.ignore_eos,
        )
        self._stops = {name: StopMatcher(sampling.stop, sampling.include_stop_str_in_output) for name in TEXT_FIELDS}
        self._channel: str | None = None  # whose stop matcher may hold text
        self._piece = Piece()
        self._stop_seen: str | None = None
        self._first_call_only = not request.parallel_tool_calls
        self._min_tokens = sampling.min_tokens
        self._hides_stop_id = not sampling.include_stop_str_in_output
        self._num_seen = 0
        self.num_tokens = 0  # of the last update: those behind a stop string do not count
        self.done = False
        self.stopped_here = False

    def feed(self, update: RequestUpdate) -> Piece | None:
        piece = self._piece
        self.num_tokens = self._feed_ids(update, piece.deltas)
        piece.token_ids += update.token_ids[: self.num_tokens]
        if self._num_top is not None:
            piece.logprobs += chat_logprobs(self._tokenizer, update.logprobs[: self.num_tokens], self._num_top)
        if update.finish_reason is not None and self._stop_seen is None:
            # a stop id of the request's own may come anywhere: what is open then is cut off, not complete
            cut = update.finish_reason is FinishReason.LENGTH or update.stop_reason is not None
            rest, reason = self.parser.finish("length" if cut else "stop")
            self._filter(rest, piece.deltas)
            self._flush(piece.deltas)
            if update.finish_reason is not FinishReason.LENGTH and reason == "length":
                reason = "stop"
            piece.finish_reason, piece.stop_reason = reason, update.stop_reason
        if self._stop_seen is not None:
            self.stopped_here = update.finish_reason is None
            piece.finish_reason, piece.stop_reason = "stop", self._stop_seen
        self.done = piece.finish_reason is not None
        if not piece.deltas and not self.done:
            return None
        self._piece = Piece()
        return piece

    def _feed_ids(self, update: RequestUpdate, out: list[dict[str, Any]]) -> int:
        """How many ids count: all, or those up to the one that completed a stop string."""
        ids = update.token_ids
        for index, token in enumerate(ids):
            self._num_seen += 1
            # a stop id of the request's own shows no text; the end token must reach the parser, it ends a channel
            if update.stop_reason is not None and self._hides_stop_id and index == len(ids) - 1:
                continue
            self._filter(self.parser.feed([token]), out)
            if self._stop_seen is not None:
                return index + 1
        return len(ids)

    def _filter(self, deltas: list[dict[str, Any]], out: list[dict[str, Any]]) -> None:
        for delta in deltas:
            if self._stop_seen is not None:
                return
            name = next(iter(delta))
            if name != self._channel:
                self._flush(out)
                self._channel = name
            if name in self._stops and self._num_seen <= self._min_tokens:
                _add_text(out, name, delta[name])
            elif name in self._stops:
                text, self._stop_seen = self._stops[name].feed(delta[name])
                _add_text(out, name, text)
            elif not (self._first_call_only and delta["tool_calls"][0]["index"] > 0):
                out.append(delta)

    def _flush(self, out: list[dict[str, Any]]) -> None:
        """A stop string does not reach from one channel into the next."""
        if self._channel in self._stops and self._stop_seen is None:
            _add_text(out, self._channel, self._stops[self._channel].flush())


def join_calls(deltas: list[dict[str, Any]], unfinished: int | None) -> list[dict[str, Any]]:
    """The complete calls of a streamed answer, without the one that the end cut off."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for item in delta.get("tool_calls", ()):
            if "id" in item:
                calls.append({"id": item["id"], "type": "function", "function": dict(item["function"])})
            else:
                calls[item["index"]]["function"]["arguments"] += item["function"]["arguments"]
    return [call for index, call in enumerate(calls) if index != unfinished]


def _add_text(out: list[dict[str, Any]], name: str, text: str) -> None:
    if not text:
        return
    if out and name in out[-1]:
        out[-1][name] += text
    else:
        out.append({name: text})
