"""LLM: generate in this process, without a server."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tqdm import tqdm

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.outputs import CompletionOutput, RequestOutput, StreamChunk
from engine.text.output import OutputText
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.text.wide_tokenizer import WideTokenizer
from engine.types import (
    EngineStats,
    FinishReason,
    ParameterError,
    Request,
    RequestUpdate,
    SamplingParams,
)

Prompt = str | list[int]
Prompts = str | list[int] | list[str] | list[list[int]]


@dataclass(slots=True)
class _Sequence:
    """A request on its way, and where its news go."""

    prompt_index: int
    parent: RequestOutput
    output: CompletionOutput
    text: OutputText
    inbox: list[StreamChunk]  # of the call that submitted it


class LLM:
    """A loaded model that generates. Options are the fields of ``EngineConfig``.

        LLM("path/to/checkpoint", max_num_seqs=8).generate("Hello", SamplingParams(max_tokens=32))

    Not thread-safe. ``progress=False`` loads without a bar.
    """

    def __init__(self, model_dir: str | Path, *, progress: bool = True, **options: object) -> None:
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        for name in options:
            if name not in known:
                raise ParameterError(name, f"unknown option {name!r}; options are {', '.join(sorted(known))}")
        config = EngineConfig.from_options(options)
        tokenizer = load_tokenizer(model_dir)
        self._setup(EngineCore.from_dir(Path(model_dir), config, progress=progress), tokenizer)

    @classmethod
    def from_core(cls, core: EngineCore, tokenizer: Tokenizer | None) -> LLM:
        """Around an engine that exists already."""
        llm = cls.__new__(cls)
        llm._setup(core, tokenizer)
        return llm

    def _setup(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        if tokenizer is not None and tokenizer.vocab_size > core.vocab_size:
            raise ParameterError(
                "model_dir", f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary {core.vocab_size}"
            )
        if tokenizer is not None and tokenizer.vocab_size < core.vocab_size:
            tokenizer = WideTokenizer(tokenizer, core.vocab_size)
        self.core = core
        self.tokenizer = tokenizer
        self.eos_token_ids = core.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset())
        self._live: dict[str, _Sequence] = {}
        self._numbers = itertools.count()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def generate(
        self, prompts: Prompts, sampling: SamplingParams | Sequence[SamplingParams] | None = None, *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:  # fmt: skip
        """Run prompts to their end; one RequestOutput a prompt, in their order.

        ``prompts``: a string, a list of ids, or a list of either. Strings are encoded with control tokens recognised,
        nothing is added. ``sampling``: one for all, or one a prompt. Raises ParameterError before anything runs.
        """
        names, inbox, results = self._submit(prompts, sampling)
        num_tokens, start = 0, time.monotonic()
        with tqdm(total=len(names), desc="Generating", unit="seq", disable=not use_tqdm) as bar:
            for chunk in self._news(names, inbox):
                num_tokens += len(chunk.token_ids)
                rate = num_tokens / max(time.monotonic() - start, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
                bar.update(chunk.finish_reason is not None)
        return results

    def stream(
        self, prompts: Prompts, sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[StreamChunk]:
        """Yield the news of each sequence as it comes; arguments as ``generate``. Closing the generator aborts."""
        names, inbox, _ = self._submit(prompts, sampling)
        return self._news(names, inbox)

    def _news(self, names: list[str], inbox: list[StreamChunk]) -> Iterator[StreamChunk]:
        """``_chunks`` past its first item: inside the ``try``, so that dropping it unread ends its requests too."""
        chunks = self._chunks(names, inbox)
        next(chunks)
        return cast(Iterator[StreamChunk], chunks)

    def _chunks(self, names: list[str], inbox: list[StreamChunk]) -> Iterator[StreamChunk | None]:
        """None at once, then step until ``names`` have ended. A step may serve requests of other calls too."""
        remaining = len(names)
        try:
            yield None
            while True:
                news = inbox[:]
                inbox.clear()
                for chunk in news:
                    remaining -= chunk.finish_reason is not None
                    yield chunk
                if remaining == 0:
                    return
                if not inbox:
                    self._step()
        finally:
            self._drop(names)

    # ---- one request's way through ----

    def _submit(
        self, prompts: Prompts, sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[str], list[StreamChunk], list[RequestOutput]]:
        """Queue everything, or nothing when one of the prompts cannot be served."""
        items = _as_list(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            params = [sampling or SamplingParams()] * len(items)
        else:
            params = list(sampling)
        if len(params) != len(items):
            raise ParameterError("sampling", f"sampling must be one, or one a prompt ({len(items)}), got {len(params)}")
        names: list[str] = []
        inbox: list[StreamChunk] = []
        results = []
        try:
            for prompt_index, (prompt, one) in enumerate(zip(items, params, strict=True)):
                results.append(self._add(prompt_index, prompt, one, names, inbox))
        except BaseException:
            self._drop(names)
            raise
        return names, inbox, results

    def _add(
        self, prompt_index: int, prompt: Prompt, sampling: SamplingParams, names: list[str], inbox: list[StreamChunk]
    ) -> RequestOutput:
        if self.tokenizer is None and (isinstance(prompt, str) or sampling.stop):
            what = "prompt" if isinstance(prompt, str) else "stop"
            raise ParameterError(what, f"{what} needs a tokenizer, and the model directory has none: use token ids")
        ids = self.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) and self.tokenizer else prompt
        assert not isinstance(ids, str)
        request_id = str(next(self._numbers))
        text = prompt if isinstance(prompt, str) else None
        result = RequestOutput(request_id, text, list(ids), [], arrival_time=time.monotonic())
        if sampling.prompt_logprobs is not None:
            result.prompt_logprobs = [None]
        for index in range(sampling.n):
            output = CompletionOutput(index, logprobs=None if sampling.logprobs is None else [])
            result.outputs.append(output)
            # in the range of a seed, all around it
            seed = None if sampling.seed is None else (sampling.seed + index + 2**63) % 2**64 - 2**63
            prompt_logprobs = sampling.prompt_logprobs if index == 0 else None  # the same for every sequence
            own = dataclasses.replace(sampling, n=1, seed=seed, prompt_logprobs=prompt_logprobs)
            request = Request(f"{request_id}-{index}", list(ids), own, self.eos_token_ids)
            self.core.add(request)
            names.append(request.request_id)
            self._live[request.request_id] = _Sequence(
                prompt_index, result, output, OutputText(self.tokenizer, own), inbox
            )
        return result

    def _step(self) -> None:
        for update in self.core.step():
            sequence = self._live.get(update.request_id)
            if sequence is not None:
                self._take(sequence, update)

    def _take(self, sequence: _Sequence, update: RequestUpdate) -> None:
        output, parent = sequence.output, sequence.parent
        piece = sequence.text.feed(update.token_ids, update.finish_reason)
        reason, stop_reason = update.finish_reason, update.stop_reason
        if piece.stop is not None:
            if reason is None:
                self.core.abort(update.request_id)
            reason, stop_reason = FinishReason.STOP, piece.stop
        token_ids = update.token_ids[: piece.num_tokens]
        output.text += piece.text
        output.token_ids += token_ids
        if output.logprobs is not None:
            output.logprobs += update.logprobs[: piece.num_tokens]
        if parent.prompt_logprobs is not None:
            parent.prompt_logprobs += update.prompt_logprobs
        parent.num_cached_tokens = max(parent.num_cached_tokens, update.num_cached_tokens)
        if parent.first_token_time is None and token_ids:
            parent.first_token_time = time.monotonic()
        if reason is not None:
            output.finish_reason, output.stop_reason, output.error = reason.value, stop_reason, update.error
            parent.finished_time = time.monotonic()
            del self._live[update.request_id]
        where = (sequence.prompt_index, output.index)
        sequence.inbox.append(
            StreamChunk(*where, piece.text, token_ids, output.finish_reason, stop_reason, update.error)
        )

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if self._live.pop(name, None) is not None:
                self.core.abort(name)


def _as_list(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ParameterError("prompts", f"prompts must be a string or a list, got {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) and not isinstance(item, bool) for item in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    for item in prompts:
        if not isinstance(item, (str, list, tuple)):
            raise ParameterError(
                "prompts", f"prompts must be strings or lists of token ids, got an item of type {type(item).__name__}"
            )
    return [item if isinstance(item, str) else list(item) for item in prompts]  # type: ignore[arg-type]
