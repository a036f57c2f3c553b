"""Clients that leave, read slowly or come in crowds."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time

import httpx
import pytest

from tests.server.process import ServerProcess


def post(server: ServerProcess, body: dict, path: str = "/v1/completions", key: str = "none") -> socket.socket:
    """A raw connection that has sent a request and reads nothing by itself."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, end: bytes, timeout: float = 60) -> bytes:
    """Everything the server sends until it ends in ``end``."""
    connection.settimeout(timeout)
    data = b""
    while not data.endswith(end):
        piece = connection.recv(1 << 20)
        assert piece, f"the connection closed after {data[-200:]!r}"
        data += piece
    return data


def wait_for(condition, timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


LONG = {"prompt": "long", "max_tokens": 4000}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["at once", "mid stream", "half close"])
def test_leaving_frees_everything(server, stream, n, how):
    aborted = server.gauge_sum("vllm:request_success_total", 'finished_reason="abort"')
    connection = post(server, {**LONG, "stream": stream, "n": n})
    if how == "mid stream":
        wait_for(lambda: server.gauge("vllm:num_requests_running") == n)
        if stream:
            connection.recv(500)
    if how == "half close":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    start = time.monotonic()
    server.wait_idle(timeout=2)
    assert time.monotonic() - start < 2
    if how == "mid stream":
        assert server.gauge_sum("vllm:request_success_total", 'finished_reason="abort"') == aborted + n
    connection.close()


def test_a_slow_reader_holds_nobody(server, client):
    """A stream that nobody reads: the engine still finishes it, and others run at full speed beside it."""
    body = {"prompt": "long", "max_tokens": 2000, "logprobs": 20, "stream": True, "return_token_ids": True}
    slow = [post(server, body) for _ in range(2)]  # about 1 MB of events each, far above all socket buffers
    start = time.monotonic()
    for _ in range(5):
        assert client.completions.create(model="k3", prompt="<<quick>>").choices[0].text == "quick"
    assert time.monotonic() - start < 5
    server.wait_idle(timeout=60)  # all 2 x 2000 tokens were generated though nobody read
    data = read_until(slow[0], b"data: [DONE]\n\n\r\n0\r\n\r\n")
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 2000
    assert len(events) < 2000  # what came while it did not read was put together
    for connection in slow:
        connection.close()


async def collect(client: httpx.AsyncClient, body: dict) -> tuple[str, list[int]]:
    text, ids = "", []
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}
    ) as response:
        done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["text"]
                ids += choice["token_ids"]
    assert done
    return text, ids


def test_64_streams_equal_their_solo_runs(server):
    bodies = [{"prompt": f"prompt number {i}", "max_tokens": 5 + i % 20} for i in range(64)]

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            solo = [await collect(client, body) for body in bodies]
            together = await asyncio.gather(*(collect(client, body) for body in bodies))
        assert together == solo
        assert [len(ids) for _, ids in solo] == [5 + i % 20 for i in range(64)]

    asyncio.run(main())


def churn(server: ServerProcess, count: int, *, longest: int = 3000) -> None:
    """``count`` requests that leave at random moments, beside others that must not notice: all of these send the
    same greedy request, so all their answers must be equal."""
    rng = random.Random(count)
    stop = threading.Event()
    failures: list[str] = []
    successes: list[str] = []
    witnessed = {"prompt": "<<" + "witness " * 4 + ">>", "max_tokens": 40, "temperature": 0}

    def ask() -> str:
        answer = httpx.post(server.url + "/v1/completions", json=witnessed, timeout=120)
        return answer.json()["choices"][0]["text"]

    expected = ask()

    def witness() -> None:
        while not stop.is_set():
            try:
                text = ask()
            except Exception as error:
                text = repr(error)
            (successes if text == expected else failures).append(text)

    witnesses = [threading.Thread(target=witness) for _ in range(3)]
    for thread in witnesses:
        thread.start()
    live: list[socket.socket] = []
    for _ in range(count):
        body = {
            "prompt": "x" * rng.choice([1, 50, longest]),
            "max_tokens": rng.choice([1, 50, 600]),
            "n": rng.choice([1, 1, 2]),
        }
        body["stream"] = rng.random() < 0.7
        if rng.random() < 0.3:
            chat = {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}
            chat.pop("prompt", None)
            live.append(post(server, chat, "/v1/chat/completions"))
        else:
            live.append(post(server, body))
        time.sleep(rng.random() * 0.01)
        while len(live) > rng.randrange(1, 40):
            live.pop(rng.randrange(len(live))).close()
    for connection in live:
        connection.close()
    stop.set()
    for thread in witnesses:
        thread.join()
    assert not failures
    assert successes
    server.wait_idle(timeout=20)


def test_random_disconnects(server):
    churn(server, 60)


@pytest.mark.slow
def test_a_thousand_random_disconnects(server):
    churn(server, 1000)
