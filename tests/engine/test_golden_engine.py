"""The golden's greedy continuations through scheduler and core: chunked, side by side, preempted."""

from __future__ import annotations

import pytest

from engine.types import FinishReason, Request, SamplingParams
from tests.engine.drive import PROMPTS, expected
from tests.engine.real import drain, real_core

# Every greedy step of the golden has a margin of 0.08 or more, far above fp32 rounding: tokens must be equal.
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(("chunk_size", "blocks"), [(None, 128), (2, 128), (None, 76), (16, 76), (33, 76)])
def test_greedy_through_the_engine(chunk_size: int | None, blocks: int) -> None:
    """76 blocks of 4 hold the four prompts and half of what they generate, so that one of them must yield."""
    golden = expected()
    core = real_core(chunk_size=chunk_size, num_blocks=blocks, block_size=4, max_model_len=240)
    requests = [Request(str(n), golden[f"prompt_{n}.ids"].tolist(), GREEDY) for n in PROMPTS]
    for r in requests:
        core.add(r)
    outcomes = drain(core)
    for n in PROMPTS:
        assert outcomes[str(n)].token_ids == golden[f"prompt_{n}.greedy"].tolist()
        assert outcomes[str(n)].finish_reason == FinishReason.LENGTH
    assert (sum(r.num_preemptions for r in requests) > 0) == (blocks == 76)
