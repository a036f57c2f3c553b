"""Errors as HTTP clients see them: a status and an OpenAI-style JSON body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_MESSAGE = 600  # an error repeats user input only up to here

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that gets no answer. ``param`` names the member at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})


def queue_full() -> ApiError:
    return ApiError(503, "too many requests are waiting; try again later", headers={"Retry-After": "1"})


def engine_dead() -> ApiError:
    return ApiError(503, "the engine is not running")


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_bytes(status: int, message: str, param: str | None = None) -> bytes:
    """ASCII, so that an echoed lone surrogate cannot break the answer."""
    return json.dumps(error_object(status, message, param)).encode()
