"""The golden checkpoint, which has no tokenizer, over HTTP: token ids in, the expected ids and scores out."""

from __future__ import annotations

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.server.process import ROOT, ServerProcess

GOLDEN = ROOT / "tests" / "data" / "tiny-k3"
PROMPTS = ("prompt_1", "prompt_7", "prompt_64", "prompt_200")


@pytest.fixture(scope="module")
def expected():
    return load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="module")
def answers(expected):
    """All prompts at once in one request, greedy, with the scores of their own tokens."""
    server = ServerProcess(
        ["engine", "serve"], str(GOLDEN), "--max-model-len", "512", "--max-num-seqs", "4", "--device", "cpu"
    )
    body = {
        "prompt": [expected[f"{name}.ids"].tolist() for name in PROMPTS],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    assert server.stop() == 0
    return dict(zip(PROMPTS, response.json()["choices"], strict=True))


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_continuation(name, expected, answers):
    assert answers[name]["token_ids"] == expected[f"{name}.greedy"].tolist()
    assert answers[name]["text"] == ""


@pytest.mark.parametrize("name", PROMPTS[1:])
def test_prompt_scores(name, expected, answers):
    """log-softmax of the golden logits at each prompt token; 5e-4 is the golden's own bound for a logit, and a
    log-softmax is at most two logit errors away."""
    ids = expected[f"{name}.ids"].long()
    scores = torch.log_softmax(expected[f"{name}.logits"][:-1].float(), dim=-1)
    right = scores.gather(1, ids[1:, None]).squeeze(1)
    got = answers[name]["logprobs"]["token_logprobs"]
    assert got[0] is None
    torch.testing.assert_close(torch.tensor(got[1 : len(ids)]), right, rtol=0, atol=1e-3)
    assert answers[name]["logprobs"]["tokens"][: len(ids)] == [str(i) for i in ids.tolist()]
