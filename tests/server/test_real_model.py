"""The whole way, HTTP to logits: one server over a small random checkpoint."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time

import httpx
import openai
import pytest

from tests.server.process import ROOT, ServerProcess
from tests.server.test_chat_api import stream, total
from tests.server.test_chat_output import TOOLS
from tests.server.test_disconnect import churn, post, read_until, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Overrides the fake one: all tests here run on the real core and runner."""
    model = tmp_path_factory.mktemp("served") / "tiny"
    subprocess.run([sys.executable, "-m", "engine", "make-tiny", str(model)], cwd=ROOT, check=True)
    process = ServerProcess(
        ["engine", "serve"], str(model), "--served-model-name", "tiny", "--max-model-len", "1024",
        "--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--check-invariants", "--device", "cpu",
        "--disable-uvicorn-access-log",
    )  # fmt: skip
    yield process
    log = process.log
    assert process.stop() == 0
    assert "Traceback" not in log, log


def complete(server, **body) -> dict:
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_greedy_text_stream_and_ids(server, client):
    whole = client.completions.create(model="tiny", prompt="Once upon", max_tokens=24, temperature=0)
    parts = client.completions.create(model="tiny", prompt="Once upon", max_tokens=24, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    ids = httpx.post(server.url + "/tokenize", json={"prompt": "Once upon"}).json()["tokens"]
    answer = complete(server, prompt=ids, max_tokens=24, temperature=0, return_token_ids=True)
    assert answer["choices"][0]["text"] == whole.choices[0].text
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"])


def test_chat_stream_equals_whole(server, client):
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=40, temperature=0)
    chunks = stream(server, {"messages": messages, "max_tokens": 40, "temperature": 0})
    assert total(chunks, "content") == whole.choices[0].message.content
    assert total(chunks, "reasoning_content") == whole.choices[0].message.model_extra["reasoning_content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole.choices[0].finish_reason


@pytest.mark.parametrize("seed", range(4))
def test_random_chat_output_streams_as_the_whole(server, seed):
    """Random weights write markup, special tokens and broken UTF-8 alike."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "max_tokens": 40,
        "seed": seed,
        "n": 3,
        "stop": ["e", "\n"],
        "return_token_ids": True,
        "ignore_eos": seed % 2 == 0,
    }
    whole = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"]
    chunks = stream(server, body)
    for i, choice in enumerate(whole):
        parts = [chunk for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert total(parts, "content") == choice["message"]["content"]
        assert total(parts, "reasoning_content") == choice["message"]["reasoning_content"]
        assert parts[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        ids = [token for part in parts for token in part["choices"][0].get("token_ids", ())]
        assert ids == choice["token_ids"]


def test_stop_across_token_borders(server):
    text = complete(server, prompt="abc", max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    middle = text[5:9]
    assert len(middle) == 4
    answer = complete(server, prompt="abc", max_tokens=30, temperature=0, ignore_eos=True, stop=[middle])["choices"][0]
    assert answer["text"] == text[: text.index(middle)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", middle)
    server.wait_idle()


def test_seed_and_n(server):
    body = {"prompt": "abc", "max_tokens": 16, "temperature": 1, "seed": 11, "n": 2, "return_token_ids": True}
    first, second = complete(server, **body), complete(server, **body)
    ids = [choice["token_ids"] for choice in first["choices"]]
    assert ids == [choice["token_ids"] for choice in second["choices"]]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 1}, {"top_p": 0.01}, {"temperature": 0}, {"min_p": 0.5}])
@pytest.mark.parametrize("num", [0, 1, 20])
def test_logprobs(server, sampling, num):
    response = httpx.post(
        server.url + "/v1/completions", json={"prompt": "abc", "max_tokens": 4, "logprobs": num, **sampling}
    )
    logprobs = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob <= 0
        assert token in top
        assert sum(map(math.exp, top.values())) < 1 + 1e-4  # float32 log-softmax over the vocabulary


def test_echo_scores_equal_generation_scores(server):
    """What was generated scores the same when it is sent back as a prompt, as lm-eval does."""
    greedy = {"temperature": 0, "logprobs": 1}
    answer = complete(server, prompt=[5, 6, 7, 8], max_tokens=12, ignore_eos=True, return_token_ids=True, **greedy)
    choice = answer["choices"][0]
    ids = [5, 6, 7, 8, *choice["token_ids"]]
    scored = complete(server, prompt=[ids], max_tokens=1, echo=True, **greedy)["choices"][0]["logprobs"]
    assert len(scored["tokens"]) == len(ids) + 1
    expected = choice["logprobs"]["token_logprobs"]
    # chunk sizes differ between the two runs, so fp32 sums are taken in another order
    assert scored["token_logprobs"][4:-1] == pytest.approx(expected, abs=1e-3)


async def tokens(client: httpx.AsyncClient, body: dict) -> tuple[list[int], list[float]]:
    """Ids and top-2 gaps of a streamed answer."""
    ids, gaps = [], []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                ids += choice["token_ids"]
                for top in (choice["logprobs"] or {"top_logprobs": []})["top_logprobs"]:
                    best = sorted(top.values(), reverse=True)[:2]
                    gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return ids, gaps


def test_64_streams_equal_their_solo_runs(server):
    bodies = [
        {
            "prompt": [(i * 7 + j) % 250 for j in range(1 + i % 50)],
            "max_tokens": 4 + i % 5,
            "temperature": 0,
            "logprobs": 2,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        for i in range(64)
    ]

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            solo = [await tokens(client, body) for body in bodies]
            together = await asyncio.gather(*(tokens(client, body) for body in bodies))
        differing = 0
        for body, (alone, gaps), (ids, _) in zip(bodies, solo, together, strict=True):
            assert len(alone) == len(ids) == body["max_tokens"]
            first = next((i for i, (a, b) in enumerate(zip(alone, ids, strict=True)) if a != b), None)
            if first is not None:
                differing += 1
                assert gaps[first] < 1e-3, f"differs at {first} though the best two are {gaps[first]} apart"
        assert differing <= 6

    asyncio.run(main())


def test_mixed_batch_each_equal_to_its_solo_run(server):
    """Greedy, seeded, penalised, with logprobs, stop and n in one batch (F120)."""
    bodies = [
        {"temperature": 0},
        {"temperature": 1, "seed": 3},
        {"temperature": 0.7, "seed": 4, "top_k": 5, "n": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 1},
        {"temperature": 0, "logprobs": 5},
        {"temperature": 1, "seed": 5, "stop_token_ids": [65], "min_p": 0.01},
    ]
    common = {"max_tokens": 12, "return_token_ids": True}
    bodies = [{"prompt": f"prompt {i}", **common, **body} for i, body in enumerate(bodies)]
    solo = [complete(server, **body) for body in bodies]

    async def main() -> list[dict]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return [
                answer.json()
                for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            ]

    for alone, mixed in zip(solo, asyncio.run(main()), strict=True):
        assert [c["token_ids"] for c in mixed["choices"]] == [c["token_ids"] for c in alone["choices"]]


def test_cancelling_a_stream_frees_its_memory(server, client):
    parts = client.completions.create(
        model="tiny", prompt="abc", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(parts))
    assert server.gauge("kimi:state_slots_used") == 1
    assert server.gauge("vllm:kv_cache_usage_perc") > 0
    parts.close()
    server.wait_idle(timeout=5)


def test_long_prompts_make_progress_beside_short_ones(server):
    """Prompts of several chunks: steps without output must not stall anything (F097)."""
    long = [post(server, {"prompt": [i] * 1000, "max_tokens": 2, "ignore_eos": True}) for i in range(1, 5)]
    start = time.monotonic()
    assert complete(server, prompt="hi", max_tokens=2)["usage"]["completion_tokens"] <= 2
    assert time.monotonic() - start < 20
    for connection in long:
        assert b'"completion_tokens":2' in read_until(connection, b"}}")
        connection.close()


def test_fifty_requests_closed_after_three_chunks(server):
    connections = []
    for i in range(50):
        connection = post(server, {"prompt": f"p{i}", "max_tokens": 900, "stream": True, "ignore_eos": True})
        connections.append(connection)
    wait_for(lambda: server.gauge("vllm:num_requests_running") == 50, timeout=30)
    for connection in connections:
        connection.recv(3000)
        connection.close()
    server.wait_idle(timeout=10)


def test_random_disconnects(server):
    churn(server, 40, longest=400)


@pytest.mark.slow
def test_a_thousand_random_disconnects(server):
    churn(server, 1000, longest=400)


def test_openai_errors_have_their_types(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=9)
