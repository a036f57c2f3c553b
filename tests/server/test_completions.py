"""/v1/completions with the official client, over the fake engine."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.fake_engine import TOKENIZER
from tests.server.test_disconnect import wait_for


def joined(stream) -> tuple[str, list]:
    chunks = list(stream)
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks


def test_text_and_usage(client):
    answer = client.completions.create(model="k3", prompt="<<hello world>>", max_tokens=50)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello world", "stop")
    assert answer.usage.prompt_tokens == len("<<hello world>>")
    assert answer.usage.completion_tokens == len("hello world") + 1  # the end token counts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("text", ["plain", "<<äöü 🚀 中文, never cut>>"])
def test_stream_adds_up_to_the_whole(client, text):
    parameters = {"model": "k3", "prompt": text, "max_tokens": 40}
    whole = client.completions.create(**parameters)
    text, chunks = joined(client.completions.create(**parameters, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].text
    assert all("�" not in chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        whole.choices[0].finish_reason
    ]
    assert len({chunk.id for chunk in chunks}) == 1


def test_prompt_forms(client):
    ids = TOKENIZER.encode("abc")
    texts = {
        client.completions.create(model="k3", prompt=prompt, max_tokens=4).choices[0].text
        for prompt in ("abc", ["abc"], ids, [ids])
    }
    assert len(texts) == 1
    answer = client.completions.create(model="k3", prompt=["a", "b", "c"], max_tokens=4, n=2, temperature=1, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 24
    for prompt, first in (("a", 0), ("b", 2), ("c", 4)):
        one = client.completions.create(model="k3", prompt=prompt, max_tokens=4, n=2, seed=7)
        assert [c.text for c in one.choices] == [c.text for c in answer.choices[first : first + 2]]
        for k in range(2):  # the k-th answer samples with seed + k
            alone = client.completions.create(model="k3", prompt=prompt, max_tokens=4, seed=7 + k)
            assert alone.choices[0].text == answer.choices[first + k].text


def test_n_streams_every_index(client):
    stream = client.completions.create(model="k3", prompt="x", max_tokens=8, n=3, seed=1, stream=True)
    texts = {0: "", 1: "", 2: ""}
    ends = []
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason:
            ends.append(chunk.choices[0].index)
    whole = client.completions.create(model="k3", prompt="x", max_tokens=8, n=3, seed=1)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(ends) == [0, 1, 2]
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(server, client, stream):
    """One byte per token, so that every stop string crosses token borders."""
    parameters = {
        "model": "k3",
        "prompt": "<<say STO, then STOP and more text>>",
        "max_tokens": 100,
        "stop": ["STOP", "zz"],
    }
    answer = client.completions.create(**parameters, stream=stream)
    if stream:
        text, chunks = joined(answer)
        last = chunks[-1].choices[0]
    else:
        text, last = answer.choices[0].text, answer.choices[0]
    assert text == "say STO, then "
    assert (last.finish_reason, last.model_extra["stop_reason"]) == ("stop", "STOP")
    with_stop = client.completions.create(**parameters, extra_body={"include_stop_str_in_output": True})
    assert with_stop.choices[0].text == "say STO, then STOP"
    server.wait_idle()


def test_stop_held_text_comes_out_at_the_end(client):
    answer = client.completions.create(model="k3", prompt="<<ends in STO>>", max_tokens=100, stop="STOP")
    assert answer.choices[0].text == "ends in STO"


def test_stop_token_id(client):
    body = {"stop_token_ids": [ord("!")]}
    answer = client.completions.create(model="k3", prompt="<<wait! no>>", max_tokens=100, extra_body=body)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == ord("!")


def test_logprobs_are_json_numbers(server):
    body = {"prompt": "hello", "max_tokens": 5, "logprobs": 3, "temperature": 0}
    response = httpx.post(server.url + "/v1/completions", json=body)
    logprobs = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {5}
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == -0.5
        assert min(top.values()) == -9999.0


def test_echo_with_logprobs_as_lm_eval_asks(server):
    prompts = [list(b"The quick fox"), list(b"ab")]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choices = httpx.post(server.url + "/v1/completions", json=body).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["tokens"][: len(prompt)] == [chr(i) for i in prompt]
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))
        assert choice["text"].startswith(bytes(prompt).decode())
        assert len(choice["text"]) == len(prompt) + 1


def test_each_choice_belongs_to_its_prompt(server):
    """n answers a prompt, prompt after prompt: text, logprobs and ids of each echo its own."""
    prompts = ["ab", "cde", "f"]
    body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 0, "max_tokens": 3, "return_token_ids": True}
    choices = httpx.post(server.url + "/v1/completions", json=body).json()["choices"]
    given: dict[int, list[int]] = {}
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                given.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert [choice["index"] for choice in choices] == list(range(6))
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        assert choice["text"].startswith(prompt)
        assert len(choice["text"]) == len(prompt) + 3
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["prompt_token_ids"] == given[index] == list(prompt.encode())


@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_without_a_new_token(server, logprobs):
    body = {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = httpx.post(server.url + "/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs:
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5


def test_token_ids_are_returned(server):
    body = {"prompt": "<<hi>>", "max_tokens": 9, "return_token_ids": True}
    answer = httpx.post(server.url + "/v1/completions", json=body).json()
    assert answer["prompt_token_ids"] == list(b"<<hi>>")
    assert answer["choices"][0]["token_ids"] == [*b"hi", 258]
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [i for choice in choices for i in choice["token_ids"]] == [*b"hi", 258]
    assert choices[0]["prompt_token_ids"] == json.loads(events[0])["prompt_token_ids"] == list(b"<<hi>>")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_events_are_framed_to_the_byte(server, route):
    body = {"prompt": "ab", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 20, "stream": True}
    response = httpx.post(f"{server.url}/v1/{route}", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    for event in events:
        assert b"\n" not in event
        assert json.loads(event.removeprefix(b"data: "))["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_token_gives_no_text_and_min_tokens_holds_for_stop_strings(server, client, stream):
    def ask(**extra):
        answer = client.completions.create(
            model="k3", prompt="<<hello hello>>", max_tokens=20, stream=stream, extra_body=extra
        )
        pieces = list(answer) if stream else [answer]
        last = pieces[-1].choices[0]
        return "".join(piece.choices[0].text for piece in pieces), last.finish_reason, last.model_extra["stop_reason"]

    assert ask(stop_token_ids=[ord("l")]) == ("he", "stop", ord("l"))
    assert ask(stop_token_ids=[ord("l")], include_stop_str_in_output=True) == ("hel", "stop", ord("l"))
    assert ask(stop=["el"]) == ("h", "stop", "el")
    assert ask(stop=["el"], min_tokens=4) == ("hello h", "stop", "el")


def test_prompt_fills_the_context(client, server):
    limit = httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"]
    answer = client.completions.create(model="k3", prompt=[65] * (limit - 3), max_tokens=100)
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    response = httpx.post(server.url + "/v1/completions", json={"prompt": [65] * limit})
    assert response.status_code == 400
    assert str(limit) in response.json()["error"]["message"]


def test_ignore_eos_gives_exactly_max_tokens(client):
    body = {"ignore_eos": True}
    answer = client.completions.create(model="k3", prompt="<<hi>>", max_tokens=30, extra_body=body)
    assert answer.usage.completion_tokens == 30
    assert answer.choices[0].finish_reason == "length"


def test_truncated_prompt(server):
    body = {"prompt": "abcdef", "max_tokens": 1, "truncate_prompt_tokens": 2, "return_token_ids": True}
    assert httpx.post(server.url + "/v1/completions", json=body).json()["prompt_token_ids"] == [*b"ef"]


def test_one_bad_request_in_a_step_fails_alone(server, client):
    response = httpx.post(server.url + "/v1/completions", json={"prompt": "nan"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "nan", "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert json.loads(lines[0][6:])["error"]["code"] == 500
    wait_for(lambda: "not finite" in server.log)
    assert lines[-1] == "data: [DONE]"
    assert client.completions.create(model="k3", prompt="<<ok>>").choices[0].text == "ok"


@pytest.mark.parametrize("name", ["max_tokens", "logprobs", "priority", "best_of", "truncate_prompt_tokens"])
def test_true_is_no_integer(server, name):
    response = httpx.post(server.url + "/v1/completions", json={"prompt": "a", name: True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_stop_string_ends_the_sequence_in_the_engine_too(server, client):
    server.wait_idle()
    before = server.gauge("vllm:generation_tokens_total")
    client.completions.create(model="k3", prompt="<<" + "ab" * 1500 + ">>", max_tokens=900, stop="bab")
    server.wait_idle()
    assert server.gauge("vllm:generation_tokens_total") - before < 500


def test_buckets_are_those_of_the_dashboards(server):
    text = httpx.get(server.url + "/metrics").text
    ends = {"time_to_first_token": "2560.0", "inter_token_latency": "80.0", "e2e_request_latency": "7680.0"}
    for name, last in ends.items():
        lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}_seconds_bucket")]
        assert f'le="{last}"' in lines[-2]
        assert 'le="+Inf"' in lines[-1]
