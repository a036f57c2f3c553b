"""Which tokens of which requests run in the next forward pass. Pure Python over ids; budget.py holds the token split.

Why it cannot deadlock: a request is refused when it could not fit into the memories alone (``add``), growth may preempt
everything of lower rank, and the best-ranked running request always gets its token or chunk. So each step advances the
best-ranked request, and each request becomes the best-ranked one at last.
"""

from __future__ import annotations

import time

from engine.cache.manager import CacheManager
from engine.engine_config import EngineConfig
from engine.scheduler.budget import prefill_budget, split_prefill
from engine.scheduler.finish import finish_reason
from engine.scheduler.queue import Rank, RankedRequests
from engine.types import (
    FinishReason,
    QueueFullError,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledToken,
    ScheduledRequest,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)


class Scheduler:
    """Continuous batching with chunked prefill over two memories.

    ``schedule`` plans a step and ``update`` (or ``fail``) takes its result; between the two, ``abort`` is allowed.
    Cost of a step is O(running).
    """

    def __init__(self, config: EngineConfig, cache: CacheManager) -> None:
        self.config = config
        self.cache = cache
        self._by_priority = config.scheduling_policy == "priority"
        self._requests: dict[str, Request] = {}
        self._ranks: dict[str, Rank] = {}
        # Collected over the chunks, delivered with the first update. A recompute reports no position twice.
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._waiting = RankedRequests()
        self._running = RankedRequests()
        self._num_added = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> RankedRequests:
        return self._running

    def add(self, request: Request) -> None:
        """Queue a validated request (``EngineCore.add`` validates). QueueFullError when too many wait already."""
        limit = self.config.max_num_queued_reqs
        if limit is not None:
            seats = min(self.config.max_num_seqs - len(self._running), self.cache.slots.num_free)
            queued = max(0, len(self._waiting) - seats)
            if len(self._waiting) >= seats and queued >= limit:
                raise QueueFullError(f"{queued} requests are queued, the limit max_num_queued_reqs is {limit}")
        self._num_added += 1
        rank = (request.priority if self._by_priority else 0, request.arrival_time, self._num_added)
        self._requests[request.request_id] = request
        self._ranks[request.request_id] = rank
        request.status = RequestStatus.WAITING
        self._waiting.add(request, rank)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is and free what it holds. False if it is not known (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._remove(request)
        return True

    # ---- planning ----

    def schedule(self) -> StepPlan | None:
        """Plan the next forward pass, or None when nothing can run. Takes memory and preempts as needed."""
        decodes, prefilling = self._plan_decodes()
        if self._waiting:
            now = time.monotonic()
            while (request := self._startable()) is not None:
                self._start(request, now)
                prefilling.append(request)
        if not prefilling:
            return StepPlan(decodes, len(decodes), len(decodes)) if decodes else None
        prompts = [(self._ranks[r.request_id][0], r.num_tokens - r.num_computed_tokens) for r in prefilling]
        budget = prefill_budget(self.config.max_num_batched_tokens, len(decodes))
        prefills: list[ScheduledRequest] = []
        num_tokens = len(decodes)
        for request, chunk in zip(prefilling, split_prefill(prompts, budget, self.config.chunk_size), strict=True):
            if chunk:
                num_tokens += chunk
                scheduled = _scheduled(request, chunk)
                # A chunk of one token of a sequence that has state runs as a decode.
                (decodes if scheduled.is_decode else prefills).append(scheduled)
        return StepPlan(decodes + prefills, len(decodes), num_tokens)

    def _plan_decodes(self) -> tuple[list[ScheduledRequest], list[Request]]:
        """One token for each running request that has one left to compute; the other running ones, in rank order.

        Goes from the best rank down and preempts from the worst up, so a victim is never one already planned.
        """
        decodes: list[ScheduledRequest] = []
        prefilling: list[Request] = []
        block_size = self.cache.block_size
        for request in self._running:  # a victim leaves at the end, where the iteration has not been yet
            computed, num_tokens = request.num_computed_tokens, request.num_tokens
            if num_tokens - computed != 1 or computed == 0:
                prefilling.append(request)  # holds the blocks of all its tokens since it was admitted
            elif num_tokens <= len(request.block_table) * block_size or self._grow(request, num_tokens):
                decodes.append(ScheduledRequest(request, computed, 1, num_tokens < request.max_num_tokens))
        return decodes, prefilling

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Get blocks for ``num_tokens``, preempting from the worst rank up; False if the request itself had to go."""
        while not self.cache.grow(request, num_tokens):
            victim = self._running.last()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _startable(self) -> Request | None:
        """The first request in line, if a seat and both memories are there for it. Nothing overtakes it.

        Beside its own blocks one block for each running request must stay free: each of them needs its next one
        within block_size steps, and admitting into the last blocks would only buy a preemption.
        """
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return None
        request = self._waiting.first()
        return request if self.cache.can_admit(request.num_tokens, reserve=len(self._running)) else None

    def _start(self, request: Request, now: float) -> None:
        rank = self._ranks[request.request_id]
        self._waiting.remove(rank)
        self.cache.admit(request)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        self._running.add(request, rank)

    def _preempt(self, request: Request) -> None:
        """Free both memories; the request waits at its old place and is recomputed from token 0, output included."""
        rank = self._ranks[request.request_id]
        self._running.remove(rank)
        self.cache.release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request, rank)

    # ---- results ----

    def update(self, plan: StepPlan, output: StepOutput) -> list[RequestUpdate]:
        """Take the result of a step: advance each request, append its token, end those that are done."""
        updates: list[RequestUpdate] = []
        now = time.monotonic()
        running = RequestStatus.RUNNING  # looked up once: the loop is most of a step's cost on the host
        tokens, errors, prompt_logprobs = output.tokens, output.errors, output.prompt_logprobs
        for scheduled in plan.scheduled:
            request = scheduled.request
            request_id = request.request_id
            if request.status is not running:
                continue  # aborted while the step ran
            if request_id in errors:
                updates.append(self._finish(request, FinishReason.ERROR, error=errors[request_id]))
                continue
            request.num_computed_tokens += scheduled.num_new_tokens
            if request_id in prompt_logprobs:
                self._prompt_logprobs.setdefault(request_id, []).extend(prompt_logprobs[request_id])
            if not scheduled.samples:
                # A middle chunk is progress without news; a prompt that asked for no token (max_tokens=0) is done.
                if request.num_computed_tokens == request.num_tokens:
                    of_prompt = self._end_of_prompt(request)
                    updates.append(self._finish(request, FinishReason.LENGTH))
                    updates[-1].prompt_logprobs = of_prompt
                continue
            sampled = tokens.get(request_id)
            if sampled is None:
                message = "the step gave neither a token nor an error for this request"
                updates.append(self._finish(request, FinishReason.ERROR, error=message))
                continue
            updates.append(self._append(request, sampled, now))
        return updates

    def _append(self, request: Request, sampled: SampledToken, now: float) -> RequestUpdate:
        token = sampled.token_id
        request.output_token_ids.append(token)
        self.generation_tokens += 1
        of_prompt = self._end_of_prompt(request) if len(request.output_token_ids) == 1 else None
        if request.first_token_time is None:
            request.first_token_time = now
        reason, stop_reason = finish_reason(request, token)
        if reason is None:
            update = RequestUpdate(request.request_id, [token])
            update.num_cached_tokens = request.num_cached_tokens
        else:
            update = self._finish(request, reason, stop_reason=stop_reason)
            update.token_ids.append(token)
        if sampled.logprobs is not None:
            update.logprobs.append(sampled.logprobs)
        if of_prompt:
            update.prompt_logprobs = of_prompt
        return update

    def _end_of_prompt(self, request: Request) -> list[TokenLogprobs]:
        """Called once in a request's life, when its prompt is through (not after a recompute)."""
        self.prompt_tokens += len(request.prompt_token_ids)
        return self._prompt_logprobs.pop(request.request_id, [])

    def fail(self, plan: StepPlan, message: str) -> list[RequestUpdate]:
        """The step as a whole failed: its requests end with an error, everything else is untouched."""
        live = [s.request for s in plan.scheduled if s.request.status is RequestStatus.RUNNING]
        return [self._finish(request, FinishReason.ERROR, error=message) for request in live]

    def restart(self, plan: StepPlan) -> None:
        """The step was cut off, and nobody knows what its states absorbed: its requests begin anew, as preempted."""
        for scheduled in plan.scheduled:
            if scheduled.request.status is RequestStatus.RUNNING:
                self._preempt(scheduled.request)

    def _finish(
        self, request: Request, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None
    ) -> RequestUpdate:
        self._remove(request)
        return RequestUpdate(
            request.request_id,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
        )

    def _remove(self, request: Request) -> None:
        rank = self._ranks.pop(request.request_id)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(rank)
            self.cache.release(request)
        else:
            self._waiting.remove(rank)
        request.status = RequestStatus.FINISHED
        self._prompt_logprobs.pop(request.request_id, None)
        del self._requests[request.request_id]


def _scheduled(request: Request, num_new_tokens: int) -> ScheduledRequest:
    done = request.num_computed_tokens + num_new_tokens == request.num_tokens
    samples = done and request.num_tokens < request.max_num_tokens
    return ScheduledRequest(request, request.num_computed_tokens, num_new_tokens, samples)
