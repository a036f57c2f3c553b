"""Reading a request body: how much is kept, how much is only read, and when reading ends."""

from __future__ import annotations

import asyncio

import pytest

from engine.server import body
from engine.server.errors import ApiError

CHUNK = b" " * 10


class Sender:
    """Sends ``total`` chunks; more reads than that fail the test instead of waiting for ever."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.sent = 0

    async def __call__(self) -> dict:
        assert self.sent < self.total, "read on after the end"
        self.sent += 1
        return {"type": "http.request", "body": CHUNK, "more_body": self.sent < self.total}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_BODY", 50)
    monkeypatch.setattr(body, "MAX_DRAIN", 200)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("total", "read", "status"),
    [
        (5, 5, 400),  # fits: parsed, and blanks are no JSON
        (6, 6, 413),  # read to its end, so that a client that is still sending sees the answer
        (20, 20, 413),
        (1000, 21, 413),  # given up at MAX_DRAIN
    ],
)
def test_a_body_is_read_to_its_end_but_not_for_ever(total: int, read: int, status: int) -> None:
    sender = Sender(total)
    with pytest.raises(ApiError) as error:
        asyncio.run(body.read_json({}, sender))
    assert (error.value.status, sender.sent) == (status, read)
    assert error.value.headers == ({"Connection": "close"} if status == 413 else {})


def test_a_client_that_leaves_within_its_body_is_told_apart() -> None:
    async def gone() -> dict:
        return {"type": "http.disconnect"}

    with pytest.raises(ApiError, match="closed the connection before the body was complete"):
        asyncio.run(body.read_json({}, gone))
