"""Bad requests: each is a 4xx with a JSON error naming the member, and the server goes on."""

from __future__ import annotations

import gzip
import json
import socket
import time

import httpx
import psutil
import pytest

from tests.server.test_chat_output import TOOLS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]

# (the member to be named, what is sent beside a good prompt)
BAD_COMPLETIONS = [
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": 1e308}),
    ("temperature", {"temperature": "0.7"}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": -0.1}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 0.5}),
    ("min_p", {"min_p": 2}),
    ("presence_penalty", {"presence_penalty": 1e9}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("n", {"n": 0}),
    ("n", {"n": -1}),
    ("n", {"n": 10_000}),
    ("n", {"n": 1.5}),
    ("n", {"n": 2, "temperature": 0}),
    ("n", {"n": 1000, "prompt": ["a"] * 64}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": "16"}),
    ("seed", {"seed": 2**70}),
    ("seed", {"seed": "x"}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": 3}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": "yes"}}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": [3]}),
    ("stop", {"stop": {"a": "b"}}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [10**6]}),
    ("stop_token_ids", {"stop_token_ids": "5"}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("min_tokens", {"min_tokens": 30}),
    ("suffix", {"suffix": "end"}),
    ("echo", {"echo": 1}),
    ("ignore_eos", {"ignore_eos": "no"}),
    ("priority", {"priority": 3}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("best_of", {"best_of": 2}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("cache_salt", {"cache_salt": ""}),
    ("model", {"model": 5}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": ["a", [5]]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [262]}),
    ("prompt", {"prompt": [2**40]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": "x" * 5000}),
]
BAD_CHATS = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
    ("tools", {"tools": []}),
    ("tools[0].type", {"tools": [{"function": {"name": "f"}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": "sometimes", "tools": TOOLS}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "calc"}}, "tools": TOOLS}),
    ("reasoning_effort", {"reasoning_effort": "banana"}),
    ("reasoning_effort", {"reasoning_effort": "medium"}),
    ("reasoning_effort", {"reasoning_effort": 5}),
    ("chat_template_kwargs.thinking_effort", {"chat_template_kwargs": {"thinking_effort": "none"}}),
    ("chat_template_kwargs.thinking", {"chat_template_kwargs": {"thinking": "yes"}}),
    ("thinking.type", {"thinking": {"type": "maybe"}}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 10**6}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("messages", {"continue_final_message": True}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 9000}]}),
]


def check_error(response: httpx.Response, status: int, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    if param is not None:
        assert error["param"] == param
        assert param.split("[")[0].split(".")[0] in error["message"]
    assert len(error["message"]) < 700


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize(("param", "members"), BAD_COMPLETIONS)
def test_bad_completion(http, param, members):
    check_error(http.post(COMPLETIONS, json={"prompt": "hi", **members}), 400, param)


@pytest.mark.parametrize(("param", "members"), BAD_CHATS)
def test_bad_chat(http, param, members):
    check_error(http.post(CHAT, json={"messages": USER, **members}), 400, param)


def test_good_requests_work_between_bad_ones(http):
    for _, members in BAD_COMPLETIONS[::4]:
        assert http.post(COMPLETIONS, json={"prompt": "hi", **members}).status_code == 400
        good = http.post(COMPLETIONS, json={"prompt": "<<ok>>"})
        assert good.json()["choices"][0]["text"] == "ok"


@pytest.mark.parametrize(
    "members",
    [
        {"unknown_member": {"a": 1}, "user": "u", "store": True, "metadata": {}, "service_tier": "auto"},
        {"max_tokens": 10**12},
        {"stop": [], "logprobs": None, "stream_options": None, "logit_bias": {}},
        {"seed": -1, "top_k": -1, "repetition_penalty": 1.0},
    ],
)
def test_accepted_completions(http, members):
    assert http.post(COMPLETIONS, json={"prompt": "<<x>>", **members}).status_code == 200


@pytest.mark.parametrize(
    "members",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"reasoning_effort": "medium", "thinking": {"type": "disabled"}},
        {"messages": [{"role": "system", "content": "only"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ""}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{bad"}}]}
            ]
        },
        {"response_format": {"type": "text"}, "top_logprobs": None},
        {"max_tokens": 5, "max_completion_tokens": 3},
    ],
)
def test_accepted_chats(http, members):
    answer = http.post(CHAT, json={"messages": USER, "max_completion_tokens": 5, **members})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "hi"',
        b"",
        b"[]",
        b'"hi"',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b'{"prompt": "hi", "prompt": "ho"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"x": ' + b'{"a":' * 100_000,
        b'{"prompt": "hi", "seed": ' + b"9" * 10_000 + b"}",
    ],
    ids=["truncated", "empty", "list", "string", "nan", "infinity", "twice", "utf8", "deep", "deeper", "long number"],
)
def test_broken_bodies(http, body):
    start = time.monotonic()
    response = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    check_error(response, 400)
    assert time.monotonic() - start < 1


def test_tools_nested_deeply_are_no_internal_error(http):
    schema: dict = {}
    for _ in range(900):
        schema = {"a": schema}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = json.dumps({"messages": USER, "tools": tools, "max_tokens": 1})
    response = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair(http, text):
    """JSON can spell what no text holds; each place of it is a 400, or is replaced, and never a 500."""
    bodies = [
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": "x", "model": text}),
        (COMPLETIONS, {"prompt": "x", "stop": [text], "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        (CHAT, {"messages": [{"role": text}]}),
        (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": text}}], "max_tokens": 1}),
        ("/tokenize", {"prompt": text}),
    ]
    for path, body in bodies:
        response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), (path, body, response.text)


def test_wrong_content_type_and_encoding(http):
    data = b'{"prompt": "hi"}'
    check_error(http.post(COMPLETIONS, content=data, headers={"Content-Type": "text/plain"}), 400, "Content-Type")
    bomb = gzip.compress(b" " * (64 << 20))
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    check_error(http.post(COMPLETIONS, content=bomb, headers=headers), 400, "Content-Encoding")


def test_huge_body_is_refused_and_freed(server, http):
    parent = psutil.Process(server.process.pid)
    before = parent.memory_info().rss
    body = b'{"prompt": "' + b"x" * (64 << 20) + b'"}'
    response = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    check_error(response, 413)
    assert parent.memory_info().rss - before < 32 << 20


def test_routes_models_and_methods(http):
    check_error(http.post(COMPLETIONS, json={"prompt": "hi", "model": "gpt"}), 404, "model")
    check_error(http.get("/v1/unknown"), 404)
    check_error(http.post("/v1/responses", json={}), 404)
    check_error(http.get(COMPLETIONS), 405)
    check_error(http.delete("/health"), 405)
    check_error(http.post("/tokenize", json={}), 400, "prompt")
    check_error(http.post("/tokenize", json={"messages": []}), 400, "messages")
    check_error(http.post("/detokenize", json={}), 400, "tokens")
    check_error(http.post("/detokenize", json={"tokens": [10**9]}), 400, "tokens")
    check_error(http.post("/detokenize", json={"tokens": ["a"]}), 400, "tokens")
    check_error(http.post("/detokenize", json={"tokens": [True]}), 400, "tokens")


def test_no_http_at_all(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert b"400" in connection.recv(200)
    assert httpx.get(server.url + "/health").status_code == 200
