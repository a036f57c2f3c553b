"""The body of a request to a JSON object, whatever was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.server.errors import ApiError

MAX_BODY = 48 << 20  # a prompt of 1M tokens is 4 to 6 MB of JSON text, and about 8 MB as a list of ids
MAX_DRAIN = 512 << 20  # what is read and thrown away so that a client that sends too much still sees the answer
THREAD_FROM = 256 << 10  # larger bodies are parsed off the event loop, so that running streams go on

Receive = Callable[[], Awaitable[Mapping[str, Any]]]


async def read_json(headers: Mapping[str, str], receive: Receive) -> dict[str, Any]:
    """The JSON object in the body. Raises ApiError: 400 for anything that is not one, 413 beyond MAX_BODY."""
    kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"Content-Type must be application/json, got {kind!r}", param="Content-Type")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    data = await _read(receive)
    if encoding not in ("", "identity"):
        raise ApiError(400, f"Content-Encoding {encoding!r} is not supported", param="Content-Encoding")
    if len(data) < THREAD_FROM:
        return parse_json(data)
    return await asyncio.to_thread(parse_json, data)


async def _read(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client closed the connection before the body was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY:
            chunks.clear()
        else:
            chunks.append(chunk)
        if not message.get("more_body", False) or size > MAX_DRAIN:
            break
    if size > MAX_BODY:
        raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", headers={"Connection": "close"})
    return b"".join(chunks)


def parse_json(data: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, no NaN or Infinity, no repeated key, an object at the top. Raises ApiError 400."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 (byte {error.start})", param="body") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", param="body") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", param="body") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}", param="body")
    return value


def _no_constant(literal: str) -> None:
    raise ValueError(f"{literal} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"member {key[:80]!r} appears twice")
            seen.add(key)
    return members
