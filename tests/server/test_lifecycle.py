"""Start, options, keys, full queues, a model without a tokenizer, death and shutdown, each with a server of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from tests.server.conftest import FAKE
from tests.server.process import ROOT, ServerProcess
from tests.server.test_disconnect import post, read_until, wait_for

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def small(fake_dir):
    """Two requests at once, one waiting, keys, one reasoning name."""
    server = ServerProcess(
        FAKE, str(fake_dir), "--max-num-seqs", "2", "--max-num-queued-reqs", "1", "--api-key", "one", "two",
        "--reasoning-field", "reasoning", "--default-chat-template-kwargs", '{"thinking_effort":"low"}',
        "--scheduling-policy", "priority", "--override-generation-config", '{"temperature": 0}',
        "--stream-interval", "5",
        env={"KIMI_ENGINE_LOG_STATS_INTERVAL": "0.2"},
    )  # fmt: skip
    yield server
    assert server.stop() == 0


def key(name: str = "one") -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_start_up_log(small):
    log = small.log
    parts = [
        "kimi-engine ",
        "engine ready after",
        "weights",
        "MLA cache",
        "KDA state",
        "total",
        "routes:",
        "serving on http",
    ]
    positions = [log.find(part) for part in parts]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert "one" not in log.split("options:")[1].split("\n")[0].replace("None", "")


def test_api_key(small):
    for headers in ({}, key("three"), {"Authorization": "one"}, {"Authorization": "Bearer ö".encode()}):
        response = httpx.get(small.url + "/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "AuthenticationError"
    assert httpx.post(small.url + "/v1/completions", content=b"{bad").status_code == 401
    assert httpx.get(small.url + "/v1/models", headers=key("two")).status_code == 200
    for path in ("/health", "/metrics", "/version"):
        assert httpx.get(small.url + path).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=small.url + "/v1", api_key="wrong").models.list()


def test_full_queue_is_503_with_retry_after(small):
    body = {"prompt": "long", "max_tokens": 4000, "stream": True}
    connections = [post(small, body, key="one") for _ in range(3)]
    wait_for(lambda: small.gauge("vllm:num_requests_waiting") == 1)
    response = httpx.post(small.url + "/v1/completions", json={"prompt": "x"}, headers=key())
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    for connection in connections:
        connection.close()
    small.wait_idle()
    assert httpx.post(small.url + "/v1/completions", json={"prompt": "<<x>>"}, headers=key()).status_code == 200
    response = httpx.post(small.url + "/v1/completions", json={"prompt": ["x"] * 4}, headers=key())
    assert response.status_code == 400  # it could never be queued
    assert "only 3" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue(small, stream):
    """A request that waits and whose client leaves never runs; those that run do not notice."""
    running = [post(small, {"prompt": "long", "max_tokens": 4000, "stream": True}, key="one") for _ in range(2)]
    wait_for(lambda: small.gauge("vllm:num_requests_running") == 2)
    waiting = post(small, {"prompt": "x", "max_tokens": 4000, "stream": stream}, key="one")
    wait_for(lambda: small.gauge("vllm:num_requests_waiting") == 1)
    waiting.close()
    wait_for(lambda: small.gauge("vllm:num_requests_waiting") == 0)
    assert small.gauge("vllm:num_requests_running") == 2
    for connection in running:
        connection.close()
    small.wait_idle()


def test_operator_defaults(small):
    prompt = "<<thinking hard{-think}}{+response}}ok{-response}}{-message}}>>"
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True}
    with httpx.stream("POST", small.url + "/v1/chat/completions", json=body, headers=key()) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    names = {name for chunk in chunks for name in chunk["choices"][0]["delta"]}
    assert names == {"role", "content", "reasoning"}
    assert len(chunks) < 18  # --stream-interval 5
    ids = httpx.post(small.url + "/tokenize", json={"messages": body["messages"]}).json()["tokens"]
    assert b"thinking_effort=low" in bytes(i for i in ids if i < 256)
    response = httpx.post(small.url + "/v1/completions", json={"prompt": "x", "n": 2}, headers=key())
    assert response.json()["error"]["param"] == "n"  # the operator's temperature 0 counts
    assert (
        httpx.post(small.url + "/v1/completions", json={"prompt": "x", "priority": 3}, headers=key()).status_code == 200
    )


def test_stats_line(small):
    httpx.post(small.url + "/v1/completions", json={"prompt": "x", "max_tokens": 300}, headers=key())
    wait_for(lambda: "Avg generation throughput" in small.log)
    assert "Running: " in small.log
    assert "GPU KV cache usage: " in small.log


def test_without_a_tokenizer(tmp_path):
    server = ServerProcess(FAKE, str(tmp_path))
    url = server.url + "/v1/completions"
    answer = httpx.post(url, json={"prompt": [65, 66], "max_tokens": 3, "logprobs": 2, "return_token_ids": True}).json()
    choice = answer["choices"][0]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 3
    assert all(name.isdecimal() for top in choice["logprobs"]["top_logprobs"] for name in top)
    with httpx.stream(
        "POST", url, json={"prompt": [65], "max_tokens": 3, "stream": True, "return_token_ids": True}
    ) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 3
    for path, body, param in (
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "text"}, "prompt"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ):
        response = httpx.post(server.url + path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    assert server.stop() == 0


def test_sigterm_lets_streams_finish(fake_dir):
    server = ServerProcess(FAKE, str(fake_dir))
    events: list[str] = []
    ready = threading.Event()

    def read() -> None:
        body = {"prompt": "long", "max_tokens": 1000, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    events.append(line)
                    ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    whole = post(server, {"prompt": "<<whole>>", "max_tokens": 1000, "ignore_eos": True})
    assert ready.wait(20)
    wait_for(lambda: server.gauge("vllm:num_requests_running") == 2)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url + "/health")
    assert server.stop(timeout=60) == 0
    reader.join()
    assert events[-1] == "data: [DONE]"
    assert sum(len(json.loads(line[6:])["choices"][0]["token_ids"]) for line in events[:-1]) == 1000
    assert b'"completion_tokens":1000' in read_until(whole, b"}}")


def test_streams_that_outlast_the_drain_are_ended_and_told(fake_dir):
    server = ServerProcess(FAKE, str(fake_dir), env={"FAKE_STEP_S": "0.02", "FAKE_DRAIN_S": "1"})
    stream = post(server, {"prompt": "long", "max_tokens": 4000, "stream": True})
    whole = post(server, {"prompt": "long", "max_tokens": 4000})
    wait_for(lambda: server.gauge("vllm:num_requests_running") == 2)
    start = time.monotonic()
    assert server.stop(timeout=30) == 0
    assert 1 < time.monotonic() - start < 15
    data = read_until(stream, b"data: [DONE]\n\n\r\n0\r\n\r\n")
    error = json.loads([line for line in data.split(b"\n") if line.startswith(b"data: ")][-2][6:])["error"]
    assert error["type"] == "ServiceUnavailableError"
    assert b" 503 " in whole.recv(1 << 16).split(b"\r\n")[0]


def test_a_second_interrupt_ends_at_once(fake_dir):
    server = ServerProcess(FAKE, str(fake_dir), env={"FAKE_STEP_S": "0.05"})
    connection = post(server, {"prompt": "long", "max_tokens": 4000, "stream": True})
    wait_for(lambda: server.gauge("vllm:num_requests_running") == 1)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(5) == 130
    connection.close()


def test_engine_death_is_told(fake_dir):
    server = ServerProcess(FAKE, str(fake_dir))
    response = httpx.post(server.url + "/v1/completions", json={"prompt": "die"})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the engine is not running"
    assert httpx.head(server.url + "/health").status_code == 503
    for path in ("/health", "/v1/models"):
        assert httpx.get(server.url + path).status_code == 503
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 503
    server.wait_idle(0)  # gauges do not stay at what the engine last told
    assert server.gauge_sum("vllm:request_success_total", 'finished_reason="error"') == 1
    assert server.stop() == 1


def test_a_failed_step_tells_the_client_an_id_and_the_log_the_cause(fake_dir):
    server = ServerProcess(FAKE, str(fake_dir))
    for body in ({"prompt": "fail"}, {"prompt": "fail", "stream": True}):
        response = httpx.post(server.url + "/v1/completions", json=body)
        error = json.loads(response.text.removeprefix("data: ").splitlines()[0])["error"]
        assert (error["code"], error["type"]) == (500, "InternalServerError")
        assert "RuntimeError" not in response.text
        assert "nvidia0" not in response.text
        request_id = re.search(r"cmpl-\w+", error["message"])[0]
        cause = f"request {request_id} failed: RuntimeError: words of /dev/nvidia0"
        wait_for(lambda cause=cause: cause in server.log)
    httpx.post(server.url + "/v1/completions", json={"prompt": "frozen"})
    wait_for(lambda: " frozen" in server.log)
    frozen, rest = re.search(r"(\d+) of (\d+) frozen", server.log).groups()
    assert int(frozen) > 10 * int(rest), "full garbage collections go over all that was loaded"
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "<<on>>"}).json()["choices"][0]["text"] == "on"
    assert server.stop() == 0


def test_engine_killed_under_a_stream_ends_it_with_an_error(fake_dir):
    server = ServerProcess(FAKE, str(fake_dir))
    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        assert server.gauge("vllm:num_requests_running") == 1
        found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout
        for pid in found.split():
            os.kill(int(pid), signal.SIGKILL)
        *_, error, done = lines
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert done == "data: [DONE]"
    server.wait_idle(0)
    assert server.stop() == 1


def test_killing_the_server_leaves_no_engine(fake_dir):
    server = ServerProcess(FAKE, str(fake_dir))
    children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout.split()
    assert children
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}/exe") and _alive(pid) for pid in children))


def _alive(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--no-such-option"], 2, "unrecognized arguments"),
        (["--tensor-parallel-size", "2"], 2, "--tensor-parallel-size 2 is not implemented"),
        (["--kv-cache-dtype", "fp8"], 2, "--kv-cache-dtype fp8 is not implemented"),
        (["--speculative-config", "{}"], 2, "--speculative-config"),
        (["--enable-prefix-caching"], 2, "--enable-prefix-caching"),
        (["--port", "99999"], 2, "--port"),
        (["--max-logprobs", "50"], 2, "--max-logprobs"),
        (["--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["--default-chat-template-kwargs", "[]"], 2, "JSON object"),
        (["--max-model-len", "many"], 2, "token count"),
        (["--default-chat-template-kwargs", '{"thinking_effort": "medium"}'], 2, "thinking_effort must be one of"),
        (["--default-chat-template-kwargs", '{"thinking": "no"}'], 2, "thinking must be true or false"),
        (["--default-chat-template-kwargs", '{"effort": "low"}'], 2, "got 'effort'"),
        (["--override-generation-config", '{"temperature": 9}'], 2, "temperature must be in [0, 2]"),
        (["--override-generation-config", '{"max_new_tokens": 9}'], 2, "got 'max_new_tokens'"),
        (["--tokenizer", "/no/such/directory"], 2, "--tokenizer"),
        (["--ssl-certfile", "/no/such/file"], 2, "--ssl-certfile"),
    ],
)
def test_bad_options(tmp_path, options, code, message):
    command = [sys.executable, "-m", "tests.server.cli", str(tmp_path), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_accepted_options_of_published_commands(fake_dir):
    server = ServerProcess(
        FAKE, str(fake_dir), "--reasoning-parser", "kimi_k3", "--tool-call-parser", "kimi_k3",
        "--enable-auto-tool-choice", "--trust-remote-code", "--tensor-parallel-size", "1", "--language-model-only",
        "--gpu-memory-utilization", "0.9", "--max-model-len", "2k", "--no-enable-prefix-caching", "--enforce-eager",
        "--load-format", "fastsafetensors", "--limit-mm-per-prompt", "{}", "--enable-chunked-prefill",
        "--enable-log-requests", "--host", "127.0.0.1",
    )  # fmt: skip
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == 2000
    httpx.post(server.url + "/v1/completions", json={"prompt": "a secret prompt"})
    assert "Received request cmpl-" in server.log
    assert "secret" not in server.log
    assert server.stop() == 0


def test_port_in_use_is_a_clear_error(server, fake_dir):
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "tests.server.fake_server", str(fake_dir), "--port", port]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2
    assert "cannot listen on" in done.stderr
