from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from engine.text.tokenizer import load_tokenizer
from tests.server.process import ServerProcess

FAKE = ["tests.server.fake_server"]
MERGES = Path(__file__).parents[2].parent / "shared" / "tokenizer" / "tiktoken.model"


@pytest.fixture(scope="session")
def k3_tokenizer(tmp_path_factory):
    """Kimi K3's own tokenizer, where its merge file lies beside the project."""
    if not MERGES.exists():
        pytest.skip(f"K3's merge file is not at {MERGES}")
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>"}
    table = {str(163584 + i): {"content": name, "special": i < 3} for i, name in names.items()}
    model = tmp_path_factory.mktemp("k3-tokenizer")
    (model / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    (model / "tiktoken.model").symlink_to(MERGES)
    return load_tokenizer(model)


@pytest.fixture(scope="session")
def fake_dir(tmp_path_factory):
    """A model directory with a tokenizer, for the fake engine."""
    path = tmp_path_factory.mktemp("fake-model")
    (path / "tokenizer").touch()
    return path


@pytest.fixture(scope="session")
def server(fake_dir):
    """One server over the fake engine for all tests that do not need options of their own."""
    process = ServerProcess(
        FAKE,
        str(fake_dir),
        "--served-model-name",
        "k3",
        "alias",
        "--disable-uvicorn-access-log",
        "--max-num-seqs",
        "96",
    )
    yield process
    log = process.log
    assert process.stop() == 0
    assert "Traceback" not in log, log


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
