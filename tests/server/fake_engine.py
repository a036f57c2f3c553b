"""The real core over a runner without a model, for tests of everything around it.

What a prompt gets:
* ``<<TEXT>>`` in the prompt: the bytes of TEXT, with ``{+tag}}`` / ``{-tag}}`` as control tokens, then the end token;
* else printable bytes that depend on the whole prompt and the position, and never end by themselves.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import random
import re
import time
from pathlib import Path

from engine.core import EngineCore
from engine.types import SampledToken, StepOutput, StepPlan, TokenLogprobs
from tests.server.byte_tokenizer import NAMES, ByteTokenizer

TOKENIZER = ByteTokenizer()
STEP_S = float(os.environ.get("FAKE_STEP_S", "0.001"))
CHECK = os.environ.get("FAKE_CHECK", "1") == "1"


class FakeRunner:
    vocab_size = ByteTokenizer.vocab_size
    eos_token_ids = frozenset({NAMES["<|end_of_msg|>"], NAMES["[EOS]"]})

    def __init__(self, config) -> None:
        self.engine_config = config.resolved(
            max_model_len=config.max_model_len or 4096,
            num_blocks=config.num_blocks or 1024,
            num_slots=config.num_slots or config.max_num_seqs,
        )
        self.num_absorbed_tokens = [0] * (self.engine_config.num_slots + 1)
        self._scripts: dict[str, list[int] | None] = {}

    def memory_table(self) -> list[tuple[str, int]]:
        return [("weights", 3 << 20), ("MLA cache", 5 << 20), ("KDA state", 1 << 20)]

    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(STEP_S)
        output = StepOutput()
        for scheduled in plan.scheduled:
            request = scheduled.request
            self.num_absorbed_tokens[request.slot] = scheduled.num_computed_tokens + scheduled.num_new_tokens
            if request.prompt_token_ids == list(b"die"):
                os._exit(3)
            if request.prompt_token_ids == list(b"fail"):
                raise RuntimeError("words of /dev/nvidia0")
            if request.sampling.prompt_logprobs is not None:
                stop = scheduled.num_computed_tokens + scheduled.num_new_tokens
                ids = request.prompt_token_ids[scheduled.num_computed_tokens + 1 : stop + 1]
                output.prompt_logprobs[request.request_id] = [
                    logprobs(i, request.sampling.prompt_logprobs) for i in ids
                ]
            if request.prompt_token_ids == list(b"frozen"):
                output.errors[request.request_id] = f"{gc.get_freeze_count()} of {len(gc.get_objects())} frozen"
                continue
            if not scheduled.samples:
                continue
            if request.prompt_token_ids == list(b"nan"):
                output.errors[request.request_id] = "the logits are not finite"
                continue
            token = self._token(request)
            entry = None if request.sampling.logprobs is None else logprobs(token, request.sampling.logprobs)
            output.tokens[request.request_id] = SampledToken(token, entry)
        return output

    def forget(self, request_id: str) -> None:
        self._scripts.pop(request_id, None)

    def _token(self, request) -> int:
        if request.request_id not in self._scripts:
            text = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
            found = re.search(r"<<(.*)>>", text, re.DOTALL)
            script = None
            if found:
                marked = found[1].replace("{+", "<|open|>").replace("{-", "<|close|>").replace("}}", "<|sep|>")
                script = TOKENIZER.encode(marked, special=True)
            self._scripts[request.request_id] = script
        script = self._scripts[request.request_id]
        position = len(request.output_token_ids)
        if script is not None:
            return script[position] if position < len(script) else NAMES["<|end_of_msg|>"]
        seed = (tuple(request.prompt_token_ids), request.sampling.seed or 0)
        return random.Random(hash(seed) + position).randrange(32, 127)


def logprobs(token: int, num_top: int) -> TokenLogprobs:
    """The chosen token first, one filtered away, the rest falling."""
    top = [(token, -0.5)] + [((token + i) % 256, -1.0 - i) for i in range(1, num_top)]
    if num_top > 1:
        top[-1] = (top[-1][0], -math.inf)
    return TokenLogprobs(token, -0.5, 1, top[:num_top])


def build(model_dir: Path, config) -> EngineCore:
    """Core factory, as ``EngineCore.from_dir``."""
    runner = FakeRunner(config)
    return EngineCore(runner, dataclasses.replace(runner.engine_config, check_invariants=CHECK))
