"""From final hidden states to tokens, for all requests of a step at once.

Order of operations: the model's own logits give the log-probabilities that are reported; then banned ids, penalties,
temperature, min-p, top-k, top-p. Temperature 0 takes the largest logit, ties to the lower id. A draw is made by
inverting the cumulative distribution at one uniform number that depends only on the request's seed and on how many
tokens it has: batch mates, chunking and preemption do not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.runner import logprobs
from engine.runner.penalties import PenaltyCounts, apply_penalties
from engine.types import Request, SampledToken, ScheduledRequest, StepOutput, StepPlan

NOT_FINITE = "the model's output for this request is not finite"
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class _State:
    """What is kept of a request between its tokens."""

    seed: int
    counts: PenaltyCounts | None = None
    prompt_logprobs_done: int = 1  # positions of the prompt reported so far; the first has no prediction


class Sampler:
    """Holds the requests' random streams and penalty counts; everything else is a function of the step."""

    def __init__(self, vocab_size: int, seed: int, device: torch.device) -> None:
        self.vocab_size, self.seed, self.device = vocab_size, seed, device
        self.num_seen = 0
        self.states: dict[str, _State] = {}

    def forget(self, request_id: str) -> None:
        self.states.pop(request_id, None)

    def sample(
        self, plan: StepPlan, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> StepOutput:
        """hidden [T, H] of the plan's tokens, ``logits_of`` [*, H] -> [*, vocab] f32."""
        output = StepOutput()
        last = torch.tensor([s.num_new_tokens for s in plan.scheduled], device=hidden.device).cumsum(0) - 1
        finite = hidden[last].isfinite().all(-1).tolist()
        rows = []  # indices into plan.scheduled of those that get a token
        start = 0
        for i, s in enumerate(plan.scheduled):
            request, part = s.request, hidden[start : start + s.num_new_tokens]
            start += s.num_new_tokens
            if not finite[i]:
                output.errors[request.request_id] = NOT_FINITE
                continue
            if request.sampling.prompt_logprobs is not None:
                self._prompt_logprobs(s, part, logits_of, output)
            if s.samples:
                rows.append(i)
        if rows:
            logits = logits_of(hidden[last[torch.tensor(rows, device=last.device)]])
            self._tokens([plan.scheduled[i].request for i in rows], logits, output)
        return output

    def _state(self, request: Request) -> _State:
        state = self.states.get(request.request_id)
        if state is None:
            seed = request.sampling.seed
            if seed is None:  # its own stream: the engine's seed and the order in which requests first ran
                seed = int(_mix(np.array([self.seed % 2**64], np.uint64), np.array([self.num_seen], np.uint64))[0])
            self.num_seen += 1
            state = self.states[request.request_id] = _State(seed % 2**64)
        return state

    def _prompt_logprobs(
        self,
        s: ScheduledRequest,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        output: StepOutput,
    ) -> None:
        """Entries for the prompt tokens that this chunk predicts; a recomputed chunk reports nothing twice."""
        request, state = s.request, self._state(s.request)
        first = max(s.num_computed_tokens + 1, state.prompt_logprobs_done)
        stop = min(s.num_computed_tokens + s.num_new_tokens + 1, len(request.prompt_token_ids))
        if first >= stop:
            return
        rows = hidden[first - 1 - s.num_computed_tokens : stop - 1 - s.num_computed_tokens]
        targets, k = request.prompt_token_ids[first:stop], request.sampling.prompt_logprobs
        assert k is not None
        entries = []
        for at in range(0, len(targets), 64):  # a vocabulary of logits for each row: only so many at a time
            entries += logprobs.describe(logits_of(rows[at : at + 64]), targets[at : at + 64], [k] * len(rows))
        output.prompt_logprobs[request.request_id] = entries
        state.prompt_logprobs_done = stop

    def _tokens(self, requests: list[Request], raw: torch.Tensor, output: StepOutput) -> None:
        finite = raw.isfinite().all(-1)
        raw = torch.where(finite[:, None], raw, 0.0)
        states = [self._state(r) for r in requests]
        logits = self._restrict(requests, states, raw)
        possible = finite & (logits.amax(-1) > -torch.inf)
        greedy = logits.argmax(-1)  # the first of equal maxima
        drawn_rows = [i for i, r in enumerate(requests) if r.sampling.temperature > 0]
        if drawn_rows:
            index = torch.tensor(drawn_rows, device=raw.device)
            some = [requests[i] for i in drawn_rows]
            seeds = np.array([states[i].seed for i in drawn_rows], np.uint64)
            counts = np.array([len(r.output_token_ids) for r in some], np.uint64)
            greedy[index] = draw(logits[index], some, uniform(seeds, counts))
        tokens, good = torch.stack([greedy, possible.long()]).tolist()

        wanted = [i for i, r in enumerate(requests) if r.sampling.logprobs is not None and good[i]]
        entries = {}
        if wanted:
            ks = [requests[i].sampling.logprobs or 0 for i in wanted]
            described = logprobs.describe(raw[torch.tensor(wanted, device=raw.device)], [tokens[i] for i in wanted], ks)
            entries = dict(zip(wanted, described, strict=True))
        for i, request in enumerate(requests):
            if good[i]:
                output.tokens[request.request_id] = SampledToken(tokens[i], entries.get(i))
            else:
                output.errors[request.request_id] = NOT_FINITE

    def _restrict(self, requests: list[Request], states: list[_State], raw: torch.Tensor) -> torch.Tensor:
        """Ban the ids that would end a request below its min_tokens, and apply penalties; only rows that ask for it."""
        banned = [
            (i, t)
            for i, r in enumerate(requests)
            if len(r.output_token_ids) < r.sampling.min_tokens
            for t in {*r.eos_token_ids, *r.sampling.stop_token_ids}
            if t < self.vocab_size
        ]
        penalised = [i for i, r in enumerate(requests) if PenaltyCounts.needed(r.sampling)]
        if not banned and not penalised:
            return raw
        logits = raw.clone()
        if penalised:
            for i in penalised:
                if states[i].counts is None:
                    states[i].counts = PenaltyCounts(requests[i], self.vocab_size, self.device)
            counts = [c for i in penalised if (c := states[i].counts) is not None]
            index = torch.tensor(penalised, device=raw.device)
            logits[index] = apply_penalties(logits[index], [requests[i] for i in penalised], counts)
        if banned:
            row, token = torch.tensor(banned, device=raw.device).T
            logits[row, token] = -torch.inf
        return logits


def draw(logits: torch.Tensor, requests: list[Request], uniforms: np.ndarray) -> torch.Tensor:
    """Draw one id per row, logits [n, vocab], uniforms [n] in [0, 1) -> [n] int64."""
    column = _columns(requests, logits.device)
    # the largest logit becomes 0 before the division, so no temperature, however small, overflows
    logits = (logits - logits.amax(-1, keepdim=True)) / column("temperature")
    if any(r.sampling.min_p > 0 for r in requests):
        logits = logits.masked_fill(logits < column("min_p").log(), -torch.inf)
    u = torch.from_numpy(uniforms).to(logits.device)
    cut = [i for i, r in enumerate(requests) if r.sampling.top_k > 0 or r.sampling.top_p < 1]
    if not cut:
        return _invert(logits.softmax(-1), u)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    cut_rows = set(cut)
    whole = [i for i in range(len(requests)) if i not in cut_rows]
    if whole:
        index = torch.tensor(whole, device=logits.device)
        tokens[index] = _invert(logits[index].softmax(-1), u[index])
    index = torch.tensor(cut, device=logits.device)
    tokens[index] = _draw_cut(logits[index], [requests[i] for i in cut], u[index])
    return tokens


def _draw_cut(logits: torch.Tensor, requests: list[Request], u: torch.Tensor) -> torch.Tensor:
    """top-k, then top-p over what is left, on sorted rows; the best id always stays."""
    column = _columns(requests, logits.device)
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)  # stable: of equal ids the lower one stays
    k = torch.tensor([r.sampling.top_k if r.sampling.top_k > 0 else 2**31 for r in requests], device=logits.device)
    ordered = ordered.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= k[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    probs = probs.masked_fill((before >= column("top_p")) & (column("top_p") < 1), 0.0)
    return ids.gather(-1, _invert(probs, u)[:, None]).squeeze(-1)


def _columns(requests: list[Request], device: torch.device) -> Callable[[str], torch.Tensor]:
    tiny = torch.finfo(torch.float32).tiny  # a smaller member would become 0, which means something else

    def column(name: str) -> torch.Tensor:
        values = [[v if (v := getattr(r.sampling, name)) == 0 else max(v, tiny)] for r in requests]
        return torch.tensor(values, dtype=torch.float32, device=device)

    return column


def _invert(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative probability exceeds u of the total; never one of probability 0."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)  # fp32 sums over a large vocabulary would lose its tail
    return torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True).squeeze(-1)


def uniform(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each pair of uint64 (seed, count); 52 bits, so that u times a total stays below it."""
    return (_mix(seeds, counts) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Hash two uint64 arrays: the splitmix64 finaliser over the first, then over that and the second."""
    with np.errstate(over="ignore"):
        return _splitmix(_splitmix(a + GOLDEN) ^ ((b + np.uint64(1)) * GOLDEN))


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
