"""Kimi K3's output back to OpenAI deltas: reasoning, content and tool calls told apart by token id.

A marker runs from the id of ``<|open|>`` or ``<|close|>`` to the next ``<|sep|>``; what spells a marker in ordinary
tokens is text. The state depends on ids alone, never on how they were cut into ``feed`` calls, so the deltas of every
chunking add up to the same answer, and a whole answer is the sum of its deltas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from engine.text.chat_calls import CallParser
from engine.text.utf8 import Utf8Text

# Characters of reasoning held back at the start: a model that answers without thinking shows so only by how its text
# ends. An answer up to this long is then pure content; a longer one was already streamed as reasoning and is repeated
# as content. A few characters are two or three tokens of K3: the first token's latency hardly grows.
THINK_HOLD = 8
_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')


class OutputTokenizer(Protocol):
    special_tokens: dict[str, int]

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class OutputParser:
    """Feed generated ids, collect deltas ``{"reasoning_content"}``, ``{"content"}``, ``{"tool_calls"}``.

    ``thinking``: whether the prompt ended inside the think channel (else the response channel). Without ``tools``, or
    with ``tool_choice`` "none", calls are parsed and dropped. ``first_call`` numbers the first call's id (calls
    of the whole conversation count). ``ignore_end``: what follows an end id is content (a request with ignore_eos).
    ``reasoning_tokens`` counts the ids of the think channel without its markers;
    ``unfinished_call`` is the index of a call that the end cut off, else None.
    """

    def __init__(
        self,
        tokenizer: OutputTokenizer,
        *,
        thinking: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | None = "auto",
        first_call: int = 0,
        ignore_end: bool = False,
    ) -> None:
        special = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self._open, self._close, self._sep = (special.get(name) for name in ("<|open|>", "<|close|>", "<|sep|>"))
        self._ends = {special[name] for name in ("<|end_of_msg|>", "[EOS]") if name in special}
        self._after_end = "response" if ignore_end else "end"
        self._marker: list[int] | None = None  # ids since an open or close, until its sep
        self._opens = False
        self._state = "think" if thinking else "response"
        self._text = Utf8Text()
        self._held: list[str] | None = [] if thinking else None  # reasoning not yet released
        self._thought: list[str] = []  # released reasoning, as long as it may turn out to be the answer
        self._may_be_answer = thinking
        self._calls = CallParser(first_call) if tools and tool_choice != "none" else None
        self._deltas: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self.unfinished_call: int | None = None

    def feed(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Deltas that these ids complete; none for an unfinished marker or code point."""
        for token in ids:
            if self._state == "end":
                break
            if token in self._ends:
                self._leave_message()
                self._state = self._after_end
            elif token in (self._open, self._close):
                self._marker = []  # an unfinished marker before it is dropped
                self._opens = token == self._open
            elif token == self._sep:
                if self._marker is not None:
                    tag = self._tokenizer.decode_bytes(self._marker).decode("utf-8", "replace")
                    self._marker = None
                    self._on_marker(tag)
            elif self._marker is not None:
                self._marker.append(token)
            elif not self._tokenizer.is_special(token):
                self._on_text(token)
        return self._take()

    def finish(self, reason: str) -> tuple[list[dict[str, Any]], str]:
        """The rest, and the finish reason: ``length`` after a cut, else ``tool_calls`` after any, else ``stop``."""
        self._marker = None
        if reason == "length":
            self._flush_text()
            self._release_held()
            self.unfinished_call = self._calls.open_index if self._calls else None
        elif self._state != "end":
            self._leave_message()
        self._state = "end"
        calls = self._calls is not None and self._calls.count > 0
        return self._take(), "tool_calls" if reason == "stop" and calls else reason

    # ---- states: think, response, between (a channel closed), tools, after_tools, closed, end

    def _on_marker(self, tag: str) -> None:
        name = tag.split(" ", 1)[0]
        if self._state == "tools" and name not in ("tools", "message"):
            self._flush_text()
            if self._calls is not None:
                attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(tag)}
                self._emit_calls(self._calls.on_marker(self._opens, name, attributes))
            return
        if self._state in ("closed", "end"):
            return
        if not self._opens and name == "message":
            self._leave_message()
        elif self._opens and name == "response":
            if self._state in ("think", "between"):
                self._leave_channel()
                self._state = "response"
        elif self._opens and name == "tools":
            if self._state in ("think", "response", "between"):
                self._leave_channel()
                self._state = "tools"
        elif self._opens and name == "think":
            if self._state in ("between", "response"):
                self._leave_channel()
                self._state = "think"
        elif name == "think" and self._state == "think":
            self._leave_channel()
            self._state = "response"  # text before the response tag would be lost otherwise
        elif name == "response" and self._state == "response":
            self._leave_channel()
            self._state = "between"
        elif name == "response" and self._state == "think":
            self._leave_channel(answer=True)
            self._state = "between"
        elif name == "tools" and self._state == "tools":
            self._leave_channel()
            self._state = "after_tools"

    def _leave_message(self) -> None:
        self._leave_channel(answer=self._state == "think")
        if self._state != "end":
            self._state = "closed"

    def _leave_channel(self, *, answer: bool = False) -> None:
        self._flush_text()
        if self._state == "tools" and self._calls is not None:
            self._emit_calls(self._calls.close())
        if answer and self._may_be_answer:
            content = "".join(self._thought + (self._held or []))
            self._held = None
            if not self._thought:
                self.reasoning_tokens = 0
            self._emit("content", content)
        else:
            self._release_held()
        self._may_be_answer = False
        self._thought = []

    def _on_text(self, token: int) -> None:
        if self._state == "think":
            self.reasoning_tokens += 1
            self._add_text(self._text.feed(self._tokenizer.decode_bytes([token])))
        elif self._state in ("response", "tools"):
            self._add_text(self._text.feed(self._tokenizer.decode_bytes([token])))

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._state == "think":
            if self._held is not None:
                self._held.append(text)
                if sum(map(len, self._held)) > THINK_HOLD:
                    self._release_held()
            else:
                if self._may_be_answer:
                    self._thought.append(text)
                self._emit("reasoning_content", text)
        elif self._state == "response":
            self._emit("content", text)
        elif self._state == "tools" and self._calls is not None:
            self._emit_calls(self._calls.on_text(text))

    def _flush_text(self) -> None:
        self._add_text(self._text.finish())

    def _release_held(self) -> None:
        text = "".join(self._held or [])
        self._held = None
        if text:
            if self._may_be_answer:
                self._thought.append(text)
            self._emit("reasoning_content", text)

    def _emit(self, key: str, text: str) -> None:
        if not text:
            return
        if self._deltas and key in self._deltas[-1]:
            self._deltas[-1][key] += text
        else:
            self._deltas.append({key: text})

    def _emit_calls(self, pieces: list[dict[str, Any]]) -> None:
        for piece in pieces:
            last = self._deltas[-1].get("tool_calls") if self._deltas else None
            # a head, which carries the id, stays alone: clients look for empty arguments there
            if last and last[0]["index"] == piece["index"] and "id" not in last[0]:
                last[0]["function"]["arguments"] += piece["function"]["arguments"]
            else:
                self._deltas.append({"tool_calls": [piece]})

    def _take(self) -> list[dict[str, Any]]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
