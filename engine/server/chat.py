"""/v1/chat/completions: messages to ids, ids to deltas, streamed or whole."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from engine.server.chat_choice import ChatChoice, Piece, join_calls
from engine.server.chat_protocol import ChatRequest, parse_chat
from engine.server.job import Job, encode, truncate
from engine.server.state import ServerState
from engine.server.usage import Usage
from engine.text.chat import NUM_OPENER_TOKENS, encode_segments, render


class ChatAnswer:
    """Everything of one request: ``await ChatAnswer.start(...)``, then ``stream`` or ``whole``."""

    def __init__(self, state: ServerState, request: ChatRequest, prompt: list[int], client: str | None) -> None:
        self._options = request.options
        self._prompt = prompt
        self._request = request
        tokenizer = state.need_tokenizer("messages")
        self.model = state.check_model(request.options.model)
        self.job = Job(state, [prompt], request.options, kind="chatcmpl", param="messages", client_id=client)
        self._choices = [ChatChoice(tokenizer, request) for _ in range(self.job.num_choices)]
        continued = request.chat.continue_final_message or request.messages[-1].partial
        opener = NUM_OPENER_TOKENS if request.chat.add_generation_prompt and not continued else 0
        self._usage = Usage(len(prompt) - opener)
        self._created = int(time.time())
        both = ("reasoning_content", "reasoning")
        names = both if state.reasoning_field == "both" else (state.reasoning_field,)
        self._reasoning_names = names if request.include_reasoning else ()

    @classmethod
    async def start(cls, state: ServerState, body: Mapping[str, Any], client: str | None) -> ChatAnswer:
        """Check the body and hand it to the engine. Raises ParameterError or ApiError."""
        tokenizer = state.need_tokenizer("messages")
        request = parse_chat(body, state.limits, state.chat_defaults)
        state.check_model(request.options.model)
        if request.chat.tool_choice == "required":
            state.note_hint("tool_choice required")
        if (request.chat.response_format or {}).get("type", "text") != "text":
            state.note_hint("response_format")
        segments = render(request.messages, request.chat)
        size = sum(len(segment.text) for segment in segments)
        prompt = await encode(lambda: encode_segments(tokenizer, segments), size, "messages")
        return cls(state, request, truncate(prompt, request.options.truncate_prompt_tokens), client)

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
                piece = choice.feed(update)
                self._usage.add(update, choice.num_tokens)
                if choice.stopped_here:
                    self.job.end_choice(index)
                if piece is not None:
                    pieces.append((index, piece))
            self._usage.reasoning_tokens = sum(choice.parser.reasoning_tokens for choice in self._choices)
            if pieces:
                yield pieces

    async def stream(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Chunks as they come: the role at once, a finish chunk for each choice, usage last when asked for."""
        roles = [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self._choices))]
        if self._options.return_token_ids:
            for chunk in roles:
                chunk["prompt_token_ids"] = self._prompt
        yield roles
        async for pieces in self._pieces():
            yield [chunk for index, piece in pieces for chunk in self._chunks(index, piece)]
        if self._options.include_usage:
            yield [{**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage.as_json()}]

    def _chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        shown = [delta for delta in map(self._named, piece.deltas) if delta]
        chunks = [self._chunk(index, delta) for delta in shown]
        if piece.finish_reason is not None:
            chunks.append(self._chunk(index, {}))
            chunks[-1]["choices"][0].update(finish_reason=piece.finish_reason, stop_reason=piece.stop_reason)
        elif not chunks:  # reasoning that is not shown: its ids and logprobs still are
            chunks.append(self._chunk(index, {"content": ""}))
        first = chunks[0]["choices"][0]
        if piece.logprobs:
            first["logprobs"] = {"content": piece.logprobs}
        if self._options.return_token_ids:
            for chunk in chunks:
                chunk["choices"][0]["token_ids"] = []
            first["token_ids"] = piece.token_ids
        return chunks

    async def whole(self) -> dict[str, Any]:
        """The complete answer: the sum of the deltas."""
        sums = [Piece() for _ in self._choices]
        async for pieces in self._pieces():
            for index, piece in pieces:
                total = sums[index]
                total.deltas += piece.deltas
                total.logprobs += piece.logprobs
                total.token_ids += piece.token_ids
                total.finish_reason, total.stop_reason = piece.finish_reason, piece.stop_reason
        answer = self._head("chat.completion")
        answer["choices"] = [self._choice(index, total) for index, total in enumerate(sums)]
        answer["usage"] = self._usage.as_json()
        if self._options.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    def _choice(self, index: int, total: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _text(total.deltas, "content")}
        for name in self._reasoning_names:
            message[name] = _text(total.deltas, "reasoning_content")
        calls = join_calls(total.deltas, self._choices[index].parser.unfinished_call)
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": {"content": total.logprobs} if self._request.logprobs else None,
            "finish_reason": total.finish_reason,
            "stop_reason": total.stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = total.token_ids
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.job.id, "object": kind, "created": self._created, "model": self.model}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._options.continuous_usage:
            chunk["usage"] = self._usage.as_json()
        return chunk

    def _named(self, delta: dict[str, Any]) -> dict[str, Any]:
        if "reasoning_content" not in delta:
            return delta
        return dict.fromkeys(self._reasoning_names, delta["reasoning_content"])


def _text(deltas: list[dict[str, Any]], name: str) -> str | None:
    return "".join(delta.get(name, "") for delta in deltas) or None
