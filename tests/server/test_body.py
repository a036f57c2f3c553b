"""Reading a request body: how much is kept, how much is only read, and when reading ends."""

from __future__ import annotations

import asyncio

import pytest

from engine.server import body
from engine.server.errors import ApiError


class Chunk(bytes):
    """Counts how many of its kind are held at once."""

    held = most = 0

    def __init__(self, *_: object) -> None:
        Chunk.held += 1
        Chunk.most = max(Chunk.most, Chunk.held)

    def __del__(self) -> None:
        Chunk.held -= 1


class Sender:
    """Sends ``total`` chunks; more reads than that fail the test instead of waiting for ever."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.sent = 0

    async def __call__(self) -> dict:
        assert self.sent < self.total, "read on after the end"
        self.sent += 1
        return {"type": "http.request", "body": Chunk(b" " * 10), "more_body": self.sent < self.total}


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
def test_a_body_is_read_to_its_end_but_not_for_ever(
    total: int, read: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(total)
    monkeypatch.setattr(Chunk, "held", 0)
    monkeypatch.setattr(Chunk, "most", 0)
    with pytest.raises(ApiError) as error:
        asyncio.run(body.read_json({}, sender))
    assert (error.value.status, sender.sent) == (status, read)
    assert Chunk.most <= 5 + 2  # what fits, one in hand and one on its way: the rest is thrown away as it comes
    assert error.value.headers == ({"Connection": "close"} if status == 413 else {})


def test_more_is_read_than_is_kept() -> None:
    assert body.MAX_DRAIN > body.MAX_BODY > 8_000_000  # a prompt of 1M ids


def test_a_client_that_leaves_within_its_body_is_told_apart() -> None:
    async def gone() -> dict:
        return {"type": "http.disconnect"}

    with pytest.raises(ApiError, match="closed the connection before the body was complete"):
        asyncio.run(body.read_json({}, gone))
