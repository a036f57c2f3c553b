from __future__ import annotations

import openai
import pytest

from tests.server.process import ServerProcess

FAKE = ["tests.server.fake_server"]


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
