"""Whether a request is taken, and what becomes of all when the server ends; without a process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from engine.server.engine_client import EngineClient
from engine.server.errors import ApiError
from engine.server.generation import Generation
from engine.server.metrics import Metrics
from engine.server.protocol import ServingLimits
from engine.server.state import ServerState
from engine.types import EngineStats, FinishReason, Request, RequestUpdate, SamplingParams


def state(*, alive: bool = True) -> ServerState:
    engine = SimpleNamespace(is_alive=alive, dead=None)
    limits = ServingLimits(max_model_len=100, max_num_tokens=100, vocab_size=10)
    return ServerState(engine, None, limits, Metrics("m", EngineStats), ["m"], "m")  # type: ignore[arg-type]


def test_a_draining_server_takes_nothing() -> None:
    ours = state()
    ours.check_serving()
    ours.draining = True
    with pytest.raises(ApiError, match="the server is shutting down") as error:
        ours.check_serving()
    assert (error.value.status, error.value.headers) == (503, {"Retry-After": "5"})


def test_a_dead_engine_takes_nothing() -> None:
    with pytest.raises(ApiError, match="the engine is not running") as error:
        state(alive=False).check_serving()
    assert error.value.status == 503


def test_abort_all_ends_every_request_and_forgets_it() -> None:
    async def main() -> None:
        client = EngineClient()
        groups = [[Request(f"r{i}-{k}", [1], SamplingParams()) for k in range(2)] for i in range(3)]
        generations = [Generation(requests) for requests in groups]
        for requests, generation in zip(groups, generations, strict=True):
            client.submit(requests, generation)
        assert client.num_unfinished == 6
        client.abort_all("the server is shutting down")
        assert client.num_unfinished == 0
        for generation in generations:
            news: list[tuple[int, RequestUpdate]] = await asyncio.wait_for(generation.next(), 1)
            assert [(index, update.finish_reason) for index, update in news] == [
                (0, FinishReason.ERROR), (1, FinishReason.ERROR),
            ]  # fmt: skip
            assert {update.error for _, update in news} == {"the server is shutting down"}
            assert not generation.unfinished

    asyncio.run(main())
