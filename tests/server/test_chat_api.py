"""/v1/chat/completions, /tokenize and the small routes, over the fake engine."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.test_chat_output import TOOLS

ANSWER = "<<Let me think.{-think}}{+response}}It is 4 🙂.{-response}}{-message}}>>"
CALL = (
    '<<hm, call it{-think}}{+response}}{-response}}{+tools}}{+call tool="calc" index="1"}}'
    '{+argument key="x" type="number"}}1{-argument}}{+argument key="s" type="string"}}a "b" é{-argument}}{-call}}'
    '{+call tool="calc" index="2"}}{-call}}{-tools}}{-message}}>>'
)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def stream(server, body: dict) -> list[dict]:
    """All chunks of a streamed answer; what every stream promises is checked on the way."""
    url = server.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            assert None not in choice["delta"].values()
            assert not {"content", "reasoning_content"} <= set(choice["delta"])
    return chunks


def total(chunks: list[dict], name: str) -> str | None:
    return "".join(choice["delta"].get(name, "") for chunk in chunks for choice in chunk["choices"]) or None


def test_reasoning_and_content(client):
    answer = client.chat.completions.create(model="k3", messages=user(ANSWER), max_tokens=200)
    message = answer.choices[0].message
    assert answer.id.startswith("chatcmpl-")
    assert message.content == "It is 4 🙂."
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "Let me think."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("Let me think.")


def test_stream_adds_up_to_the_whole(client, server):
    body = {"messages": user(ANSWER), "max_tokens": 200, "stream_options": {"include_usage": True}}
    chunks = stream(server, body)
    whole = client.chat.completions.create(model="k3", messages=user(ANSWER), max_tokens=200)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert total(chunks, "content") == whole.choices[0].message.content
    assert total(chunks, "reasoning_content") == total(chunks, "reasoning") == "Let me think."
    ends = [i for i, chunk in enumerate(chunks) if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
    assert ends == [len(chunks) - 2]
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole.usage.model_dump(exclude_none=True)
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_usage_only_when_asked(server):
    body = {"messages": user(ANSWER), "max_tokens": 40}
    assert all("usage" not in chunk and chunk["choices"] for chunk in stream(server, body))
    body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(server, body)]
    assert counts == sorted(counts)
    assert counts[-1] == 40


def test_tool_calls_stream_and_whole(client, server):
    whole = client.chat.completions.create(model="k3", messages=user(CALL), tools=TOOLS, max_tokens=400)
    calls = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    assert [(c.id, c.function.name) for c in calls] == [("calc_0", "calc"), ("calc_1", "calc")]
    assert [json.loads(c.function.arguments) for c in calls] == [{"x": 1, "s": 'a "b" é'}, {}]
    with client.chat.completions.stream(model="k3", messages=user(CALL), tools=TOOLS, max_tokens=400) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls
    assert [(c.id, c.function.name, c.function.arguments) for c in streamed] == [
        (c.id, c.function.name, c.function.arguments) for c in calls
    ]
    first = client.chat.completions.create(
        model="k3", messages=user(CALL), tools=TOOLS, max_tokens=400, parallel_tool_calls=False
    )
    assert len(first.choices[0].message.tool_calls) == 1
    for other in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        plain = client.chat.completions.create(model="k3", messages=user(CALL), max_tokens=400, **other)
        assert plain.choices[0].message.tool_calls is None
        assert plain.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "starts_thinking"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking_effort": "low"}}, True),
        ({"thinking": {"type": "enabled", "effort": "low"}}, True),
    ],
)
def test_thinking_switches(server, extra, starts_thinking):
    body = {"messages": user("hi"), **extra}
    ids = httpx.post(server.url + "/tokenize", json=body).json()["tokens"]
    opener = [259, *(b"think" if starts_thinking else b"response"), 260 + 1]
    assert ids[-len(opener) :] == opener
    answer = httpx.post(server.url + "/v1/chat/completions", json={**body, "max_tokens": 20}).json()
    message = answer["choices"][0]["message"]
    assert bool(message["reasoning_content"]) == starts_thinking
    assert bool(message["content"]) != starts_thinking
    assert answer["usage"]["prompt_tokens"] == len(ids) - len(opener) + (len(opener) - 3)


def test_effort_changes_the_prompt(server):
    def prompt(**extra) -> str:
        body = {"messages": user("hi"), **extra}
        ids = httpx.post(server.url + "/tokenize", json=body).json()["tokens"]
        return httpx.post(server.url + "/detokenize", json={"tokens": ids}).json()["prompt"]

    assert "thinking_effort=max" in prompt()
    assert "thinking_effort=low" in prompt(reasoning_effort="low")
    assert "thinking_effort=high" in prompt(reasoning_effort="low", thinking={"type": "enabled", "effort": "high"})
    assert "thinking_effort" not in prompt(chat_template_kwargs={"thinking_effort": None})
    assert "tool_choice=required" in prompt(tools=TOOLS, tool_choice="required")
    assert "response_format=json_object" in prompt(response_format={"type": "json_object"})


def test_stop_string_in_content(client, server):
    parameters = {"model": "k3", "messages": user(ANSWER), "max_tokens": 200, "stop": ["is 4"]}
    answer = client.chat.completions.create(**parameters)
    assert answer.choices[0].message.content == "It "
    assert answer.choices[0].finish_reason == "stop"
    chunks = stream(server, {"messages": user(ANSWER), "stop": "is 4"})
    assert total(chunks, "content") == "It "
    server.wait_idle()


def test_a_stop_that_never_matches_changes_nothing(server):
    chunks = stream(server, {"messages": user(ANSWER), "stop": "x" * 40})
    assert total(chunks, "content") == "It is 4 🙂."
    assert total(chunks, "reasoning_content") == "Let me think."


def test_logprobs(client, server):
    answer = client.chat.completions.create(
        model="k3", messages=user(ANSWER), max_tokens=60, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert bytes(b for item in content for b in item.bytes).decode().startswith("Let me think.")
    assert all(len(item.top_logprobs) == 2 and item.top_logprobs[1].logprob == -9999.0 for item in content)
    body = {"messages": user(ANSWER), "max_tokens": 60, "logprobs": True, "top_logprobs": 2}
    items = [
        item
        for chunk in stream(server, body)
        for choice in chunk["choices"]
        if choice["logprobs"]
        for item in choice["logprobs"]["content"]
    ]
    assert [item["token"] for item in items] == [item.token for item in content]


def test_n_choices(server):
    chunks = stream(server, {"messages": user("hi"), "max_tokens": 15, "n": 3, "seed": 5})
    assert sorted(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]) == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("reasoning", "")
    assert len(set(texts)) == 3


def test_reasoning_can_be_left_out(server):
    body = {"messages": user(ANSWER), "max_tokens": 200, "include_reasoning": False, "return_token_ids": True}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"][0]
    assert "reasoning_content" not in answer["message"]
    chunks = stream(server, body)
    assert total(chunks, "reasoning_content") is None
    assert total(chunks, "content") == "It is 4 🙂."
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", ())]
    assert ids == answer["token_ids"]


def test_continued_answer(server):
    messages = [*user("<<ly four.{-response}}{-message}}>>"), {"role": "assistant", "content": "Exact"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "ly four."


def test_tool_history_round_trip(server):
    messages = [
        *user(ANSWER),
        {"role": "assistant", "tool_calls": [{"id": "calc_0", "function": {"name": "calc", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "calc_0", "content": "18"},
        *user(CALL),
    ]
    answer = httpx.post(server.url + "/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).json()
    assert answer["choices"][0]["message"]["reasoning_content"] is not None


def test_models_and_small_routes(server):
    models = httpx.get(server.url + "/v1/models").json()
    assert [entry["id"] for entry in models["data"]] == ["k3", "alias"]
    assert httpx.get(server.url + "/health").content == b""
    assert httpx.head(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/ping").status_code == 200
    assert httpx.get(server.url + "/version").json()["version"]
    assert httpx.get(server.url + "/load").json() == {"server_load": 0}
    assert httpx.get(server.url + "/tokenizer_info").json()["eos_token"] == "[EOS]"


def test_tokenize_and_back(server):
    text = "héllo <|sep|>"
    answer = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["tokens"][-1] == 261  # a raw prompt may hold control tokens
    assert httpx.post(server.url + "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert httpx.post(server.url + "/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert httpx.post(server.url + "/detokenize", json={"tokens": [0xC3]}).json() == {"prompt": "�"}


def test_request_id_comes_back(server):
    response = httpx.get(server.url + "/health", headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"


def test_metrics_names(server):
    text = httpx.get(server.url + "/metrics").text
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
        "kimi:state_slots_used", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:request_success_total", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket", "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket", "vllm:request_prompt_tokens_bucket",
        "vllm:iteration_tokens_total_bucket",
    ):  # fmt: skip
        assert f"{name}{{" in text, name


def test_stop_token_gives_no_text_and_min_tokens_holds_for_stop_strings(server):
    script = "<<a{-think}}{+response}}hello hello>>"

    def ask(**extra):
        body = {"messages": [{"role": "user", "content": script}], "max_tokens": 60, **extra}
        whole = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"][0]
        chunks = stream(server, body)
        assert total(chunks, "content") == whole["message"]["content"]
        return whole["message"]["content"], whole["finish_reason"], whole["stop_reason"]

    first = len(b"a" + b"cthinks" + b"oresponses" + b"hello")  # a marker is two ids and its name
    assert ask(stop_token_ids=[ord("l")]) == ("he", "stop", ord("l"))
    assert ask(stop_token_ids=[ord("l")], include_stop_str_in_output=True) == ("hel", "stop", ord("l"))
    assert ask(stop=["el"]) == ("h", "stop", "el")
    assert ask(stop=["el"], min_tokens=first) == ("hello h", "stop", "el")


def test_request_id_of_the_client_comes_back(server):
    body = {"messages": [{"role": "user", "content": "<<a>>"}], "stream": True}
    for path, json_body in (("/v1/chat/completions", body), ("/v1/chat/completions", {})):
        response = httpx.post(server.url + path, json=json_body, headers={"X-Request-Id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
