"""A runner without a model: a paged cache and slots of token ids, so that every step can be checked exactly."""

from __future__ import annotations

import array
import zlib
from collections.abc import Callable, Sequence

from engine.engine_config import EngineConfig
from engine.types import SampledToken, StepOutput, StepPlan, TokenLogprobs

VOCAB = 97


def next_token(tokens: Sequence[int]) -> int:
    """Depends on every token before it, so a lost, doubled or foreign token changes all that follow."""
    return zlib.crc32(array.array("i", tokens).tobytes()) % VOCAB


def solo_tokens(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class BrokenPlan(BaseException):
    """Not an Exception: the engine turns those into errors of requests, which would hide a failing check."""


class FakeRunner:
    """Keeps token ids where a model keeps states. Raises BrokenPlan as soon as a plan breaks a promise.

    ``before_step(plan)`` may raise (a failing step); ``request_errors`` maps request ids to per-request errors.
    """

    def __init__(self, config: EngineConfig, *, check: bool = True) -> None:
        self.engine_config = config
        self.eos_token_ids = frozenset({0})
        self.vocab_size = VOCAB
        assert config.num_blocks is not None
        assert config.num_slots is not None
        self.num_absorbed_tokens = [0] * (config.num_slots + 1)
        self.slot_tokens: list[list[int]] = [[-7] * 5 for _ in range(config.num_slots + 1)]  # stale content
        self.cache: dict[tuple[int, int], int] = {}
        self.check = check
        self.before_step: Callable[[StepPlan], None] | None = None
        self.request_errors: dict[str, str] = {}
        self.forgotten: list[str] = []
        self.prompt_positions: dict[str, int] = {}
        self.num_forwards = 0
        self.num_tokens_computed = 0
        self.plans: list[list[tuple[str, int, int]]] = []

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def execute(self, plan: StepPlan) -> StepOutput:
        if self.before_step is not None:
            self.before_step(plan)
        self.num_forwards += 1
        self.num_tokens_computed += plan.num_tokens
        output = StepOutput()
        if not self.check:
            for scheduled in plan.scheduled:
                done = scheduled.num_computed_tokens + scheduled.num_new_tokens
                self.num_absorbed_tokens[scheduled.request.slot] = done
                if scheduled.samples:
                    output.tokens[scheduled.request.request_id] = SampledToken(1)
            return output
        try:
            return self._execute(plan, output)
        except AssertionError as error:
            raise BrokenPlan(str(error)) from error

    def _execute(self, plan: StepPlan, output: StepOutput) -> StepOutput:
        self._check_shape(plan)
        self.plans.append([(s.request.request_id, s.num_computed_tokens, s.num_new_tokens) for s in plan.scheduled])
        for scheduled in plan.scheduled:
            request = scheduled.request
            start, stop = scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_new_tokens
            if start == 0:
                self.slot_tokens[request.slot] = []
            state = self.slot_tokens[request.slot]
            assert state == request.tokens(0, start), f"{request.request_id}: slot {request.slot} holds another state"
            state += request.tokens(start, stop)
            self.num_absorbed_tokens[request.slot] = stop
            size = self.engine_config.block_size
            for position in range(start, stop):
                cell = (request.block_table[position // size], position % size)
                self.cache[cell] = state[position]
            seen = [self.cache[request.block_table[p // size], p % size] for p in range(stop)]
            assert seen == state, f"{request.request_id}: its blocks hold another sequence"
            self._sample(scheduled.samples, request, start, stop, output)
        return output

    def _sample(self, samples: bool, request, start: int, stop: int, output: StepOutput) -> None:
        if request.request_id in self.request_errors:
            output.errors[request.request_id] = self.request_errors[request.request_id]
            return
        if samples:
            output.tokens[request.request_id] = SampledToken(next_token(request.tokens(0, stop)))
        if request.sampling.prompt_logprobs is not None:
            last = len(request.prompt_token_ids) - 1
            first = max(start, self.prompt_positions.get(request.request_id, 0))
            stop = min(stop, last)
            successors = [request.prompt_token_ids[p + 1] for p in range(first, stop)]
            output.prompt_logprobs[request.request_id] = [TokenLogprobs(t, -1.0, 1, []) for t in successors]
            self.prompt_positions[request.request_id] = max(first, stop)

    def _check_shape(self, plan: StepPlan) -> None:
        config = self.engine_config
        flags = [s.is_decode for s in plan.scheduled]
        assert flags == [True] * plan.num_decodes + [False] * (len(flags) - plan.num_decodes), "[decode | prefill]"
        assert plan.num_tokens == sum(s.num_new_tokens for s in plan.scheduled)
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert 0 < len(plan.scheduled) <= config.max_num_seqs
        ids = [s.request.request_id for s in plan.scheduled]
        assert len(set(ids)) == len(ids)
        for scheduled in plan.scheduled:
            request = scheduled.request
            assert scheduled.num_new_tokens >= 1
            assert scheduled.num_computed_tokens == request.num_computed_tokens
            end = scheduled.num_computed_tokens + scheduled.num_new_tokens
            assert end <= request.num_tokens
            assert scheduled.samples == (end == request.num_tokens and request.sampling.max_tokens != 0)
            if config.chunk_size is not None:
                assert scheduled.num_new_tokens <= config.chunk_size
