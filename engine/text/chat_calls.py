"""The tools channel: markers and text to streamed OpenAI tool calls."""

from __future__ import annotations

import json
from typing import Any


class CallParser:
    """Builds ``tool_calls`` delta items. String arguments stream as they come, other types once they are complete.

    The head (id, name) of the first call goes out with its tag: a client then knows at once that a tool is called. The
    head of a later call waits for its first argument tag or its close, a few tokens on: a call that is cut off right
    after its tag then leaves nothing behind that would have to be taken back.
    """

    def __init__(self, first_call: int = 0) -> None:
        self._first = first_call
        self.count = 0  # calls whose head went out
        self._name: str | None = None  # of the open call
        self._head_sent = False
        self._num_arguments = 0
        self._whole = False  # a json element gave the whole arguments object
        self._key: str | None = None  # of the open argument; "" for a json element
        self._kind = ""
        self._buffer = ""
        self._pieces: list[dict[str, Any]] = []

    @property
    def open_index(self) -> int | None:
        """Index of a call that was announced and not finished."""
        return self.count - 1 if self._name is not None and self._head_sent else None

    def on_marker(self, opens: bool, name: str, attributes: dict[str, str]) -> list[dict[str, Any]]:
        if opens and name == "call":
            self._end_call()
            self._name = attributes.get("tool") or None
            if self.count == 0:
                self._send_head()
        elif self._name is None:
            pass  # a call without a name is dropped with all it holds
        elif opens and name in ("argument", "json"):
            self._end_argument()
            self._begin_argument(name, attributes)
        elif not opens and name in ("argument", "json"):
            self._end_argument()
        elif not opens and name == "call":
            self._end_call()
        return self._take()

    def on_text(self, text: str) -> list[dict[str, Any]]:
        if self._key is not None:
            if self._kind == "string":
                self._arguments(_escaped(text))
            else:
                self._buffer += text
        return self._take()

    def close(self) -> list[dict[str, Any]]:
        """The channel ended; a call left open is ended so that its arguments stay valid JSON."""
        self._end_call()
        return self._take()

    def _begin_argument(self, name: str, attributes: dict[str, str]) -> None:
        self._send_head()
        self._buffer = ""
        if name == "json":
            if self._num_arguments == 0 and not self._whole:
                self._key, self._kind = "", "json"
            return
        if self._whole or "key" not in attributes:
            return
        self._key = attributes["key"]
        self._kind = attributes.get("type", "string")
        self._arguments(f"{'{' if self._num_arguments == 0 else ', '}{_string(self._key)}: ")
        self._num_arguments += 1
        if self._kind == "string":
            self._arguments('"')

    def _end_argument(self) -> None:
        if self._key is None:
            return
        if self._kind == "string":
            self._arguments('"')
        elif self._kind == "json":
            self._whole = True
            self._arguments(self._buffer if self._buffer.strip() else "{}")
        else:
            self._arguments(self._buffer.strip() if _is_json(self._buffer) else _string(self._buffer))
        self._key = None
        self._buffer = ""

    def _end_call(self) -> None:
        if self._name is None:
            return
        self._send_head()
        self._end_argument()
        if not self._whole:
            self._arguments("{}" if self._num_arguments == 0 else "}")
        self._name = None
        self._head_sent = self._whole = False
        self._num_arguments = 0

    def _send_head(self) -> None:
        if self._head_sent or self._name is None:
            return
        self._head_sent = True
        self._pieces.append(
            {
                "index": self.count,
                "id": f"{self._name}_{self._first + self.count}",
                "type": "function",
                "function": {"name": self._name, "arguments": ""},
            }
        )
        self.count += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._pieces.append({"index": self.count - 1, "function": {"arguments": text}})

    def _take(self) -> list[dict[str, Any]]:
        pieces, self._pieces = self._pieces, []
        return pieces


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _string(text)[1:-1]


def _is_json(text: str) -> bool:
    """Whether the text may stand in the arguments as it is. NaN and Infinity are not JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(literal: str) -> None:
    raise ValueError(literal)
