"""EngineCore: scheduler and runner joined in one step. The only module that holds both.

    schedule -> run (one forward pass, sampling included) -> update

Errors stay with their owner. A request whose logits are not finite ends alone; a step that raises ends the requests of
that step; both give back their memory at once and the engine goes on. What is not a request's fault (broken
accounting, a lost device, step after step that fails) is raised.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.cache.block_pool import CacheAccountingError
from engine.cache.manager import CacheManager
from engine.engine_config import EngineConfig
from engine.scheduler.scheduler import Scheduler
from engine.types import (
    EngineDeadError,
    EngineStats,
    ParameterError,
    Request,
    RequestUpdate,
    StepOutput,
    StepPlan,
)

if TYPE_CHECKING:
    from engine.config import ModelConfig

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 32  # in a row: a request can break only its own step, so by then it is the engine that is broken


class StepRunner(Protocol):
    """What the core needs of a runner; ``engine.runner.runner.Runner`` is the real one.

    ``execute`` may raise: EngineDeadError when it can run nothing any more, anything else when this one step failed.
    """

    engine_config: EngineConfig
    eos_token_ids: frozenset[int]
    vocab_size: int
    num_absorbed_tokens: list[int]

    def execute(self, plan: StepPlan) -> StepOutput: ...

    def forget(self, request_id: str) -> None: ...


class EngineCore:
    """Runs requests to their end, one forward pass per ``step``. Not thread-safe: one thread owns it."""

    def __init__(self, runner: StepRunner, engine_config: EngineConfig | None = None) -> None:
        """``engine_config`` must be resolved (the runner's own is, and is the default)."""
        config = engine_config or runner.engine_config
        if config.max_model_len is None or config.num_blocks is None or config.num_slots is None:
            raise ValueError("engine_config must have max_model_len, num_blocks and num_slots filled in by the runner")
        self.runner = runner
        self.config = config
        self.cache = CacheManager(config.num_blocks, config.block_size, config.num_slots)
        self.scheduler = Scheduler(config, self.cache)
        self.max_num_tokens = min(config.max_model_len, self.cache.max_tokens)
        self._num_steps = 0
        self._failed_steps = 0  # in a row
        self._last_step_tokens = 0

    @classmethod
    def from_dir(cls, model_dir: Path, engine_config: EngineConfig, *, progress: bool = True) -> EngineCore:
        """Load a checkpoint directory and build the engine on it."""
        from engine.runner.runner import Runner  # deferred: imports torch, which unit tests of the core do without

        runner = Runner.from_dir(Path(model_dir), engine_config, progress=progress)
        return cls(runner, runner.engine_config)

    @property
    def model_config(self) -> ModelConfig:
        """The parsed config.json of the loaded model."""
        config: ModelConfig = self.runner.model_config  # type: ignore[attr-defined]
        return config

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.runner.eos_token_ids

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.num_waiting + self.scheduler.num_running > 0

    def add(self, request: Request) -> None:
        """Queue a request. prompt + max_tokens beyond the context limit is clamped (it ends with "length").

        A request without eos_token_ids gets the model's. Raises ParameterError (naming the member) for a prompt that
        is empty, out of the vocabulary or too long, an id already in use, or max_tokens=0 without prompt_logprobs;
        QueueFullError when max_num_queued_reqs wait already.
        """
        if request.request_id in self.scheduler:
            raise ParameterError("request_id", f"request_id {request.request_id!r} is already in use")
        self._check_prompt(request.prompt_token_ids)
        num_prompt, limit = len(request.prompt_token_ids), self.max_num_tokens
        max_tokens = request.sampling.max_tokens
        if max_tokens == 0 and request.sampling.prompt_logprobs is None:
            raise ParameterError("max_tokens", "max_tokens must be at least 1 unless prompt_logprobs is set, got 0")
        if num_prompt + (max_tokens != 0) > limit:
            whose = "max_model_len" if limit == self.config.max_model_len else "the memory of num_blocks * block_size"
            raise ParameterError(
                "prompt",
                f"the prompt has {num_prompt} tokens, which leaves no room for a new one: at most {limit} tokens, "
                f"prompt and output together, are possible ({whose})",
            )
        request.max_num_tokens = limit if max_tokens is None else min(limit, num_prompt + max_tokens)
        if not request.eos_token_ids:
            request.eos_token_ids = self.runner.eos_token_ids
        self.scheduler.add(request)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise ParameterError("prompt", "the prompt must have at least one token, got none")
        if not set(map(type, ids)) <= {int}:
            raise ParameterError("prompt", "the prompt must be a list of integer token ids")
        if min(ids) < 0 or max(ids) >= self.runner.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.runner.vocab_size)
            raise ParameterError("prompt", f"prompt token ids must be in [0, {self.runner.vocab_size}), got {wrong}")

    def abort(self, request_id: str) -> bool:
        """End a request at once and free what it holds; it gets no further update. False if it is not known."""
        known = self.scheduler.abort(request_id)
        if known:
            self.runner.forget(request_id)
            if self.config.check_invariants:
                self.check()
        return known

    def step(self) -> list[RequestUpdate]:
        """One forward pass. Returns the news of requests that got a token or ended; a middle chunk gives none.

        Raises EngineDeadError when the device is lost or MAX_FAILED_STEPS steps in a row failed. Interrupted (Ctrl-C),
        the requests of the step wait to be recomputed, and the engine can be used on.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            if self.has_work:  # a silent return would make the caller spin for ever
                raise RuntimeError(f"the scheduler can run none of its {self.scheduler.num_waiting} requests")
            return []
        try:
            output = self.runner.execute(plan)
        except EngineDeadError:
            raise
        except Exception as error:  # whatever it was, it belongs to the requests of this step and to nobody else
            logger.exception("a step of %d requests failed", len(plan.scheduled))
            self._failed_steps += 1
            what = f"{type(error).__name__}: {error}"
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineDeadError(f"the last {self._failed_steps} steps all failed, at last with {what}") from error
            updates = self.scheduler.fail(plan, what)
        except BaseException:
            self.scheduler.restart(plan)
            raise
        else:
            self._failed_steps = 0
            updates = self.scheduler.update(plan, output)
        self._num_steps += 1
        self._last_step_tokens = plan.num_tokens
        for update in updates:
            if update.finish_reason is not None:
                self.runner.forget(update.request_id)
                if update.error is not None:
                    logger.error("request %s ended with an error: %s", update.request_id, update.error)
        if self.config.check_invariants:
            self.check()
        return updates

    def check(self) -> None:
        """Raise CacheAccountingError unless blocks and slots are conserved with one owner each, and each running
        request's slot holds exactly the tokens the scheduler counts. Costs O(num_blocks + num_slots)."""
        self.cache.check(self.scheduler.running)
        for request in self.scheduler.running:
            absorbed = self.runner.num_absorbed_tokens[request.slot]
            # Before its first chunk a request's slot still holds the state of the previous tenant.
            if request.num_computed_tokens and absorbed != request.num_computed_tokens:
                raise CacheAccountingError(
                    f"{request.request_id}: slot {request.slot} holds {absorbed} tokens, "
                    f"the scheduler counts {request.num_computed_tokens}"
                )

    def stats(self) -> EngineStats:
        """Counts at this moment and totals since the start."""
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            blocks_used=self.cache.blocks.num_used,
            blocks_total=self.cache.blocks.num_blocks,
            slots_used=self.cache.slots.num_used,
            slots_total=self.cache.slots.num_slots,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens=self.scheduler.prompt_tokens,
            generation_tokens=self.scheduler.generation_tokens,
            last_step_tokens=self._last_step_tokens,
        )
