"""``kimi-engine generate``: prompts in, text or ids out, without a server."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.engine_config import EngineConfig, add_engine_arguments
from engine.types import ParameterError, SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

SMOKE_TOKENS = 16
SMOKE_MODEL_LEN = 4096


class RequestFailedError(RuntimeError):
    """The engine failed on a request; what it logged says more."""

    def __init__(self, name: str, error: str) -> None:
        super().__init__(f"request {name} failed: {error.splitlines()[0]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint directory")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="text; may be given several times")
    source.add_argument("--tokens", metavar="FILE.json", help="a JSON list of token ids, or a list of such lists")
    source.add_argument(
        "--smoke", action="store_true", help=f"{SMOKE_TOKENS} tokens; without MODEL on a tiny checkpoint"
    )
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument("--json", action="store_true", help="one JSON object a sequence on standard output")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128)
    group.add_argument("--min-tokens", type=int, default=0)
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--n", type=int, default=1, help="sequences a prompt")
    group.add_argument("--sampling-seed", type=int, default=None, help="seed of each request's own random stream")
    group.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")
    group.add_argument("--ignore-eos", action="store_true")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from engine.llm import LLM

    with tempfile.TemporaryDirectory() as scratch:
        model = args.model
        if model is None:
            if not args.smoke:
                raise ParameterError("MODEL", "MODEL is required (a checkpoint directory), got none")
            from engine.tools import make_tiny

            model = scratch
            make_tiny.make(Path(scratch))
            if args.max_model_len is None:  # the tiny model's own limit would claim all memory for a moment
                args.max_model_len = SMOKE_MODEL_LEN
        # told before the weights are read: what is wrong with these
        prompts, sampling = _prompts(args), _sampling(args)
        if args.smoke:
            from engine.runner.operations import use_reference_where_missing

            use_reference_where_missing(Path(model), args.device)
        start = time.monotonic()
        llm = LLM(model, progress=sys.stderr.isatty(), **_options(args))
        loaded = time.monotonic()
        num_tokens = _stream(llm, prompts, sampling) if args.stream else _generate(llm, prompts, sampling, args.json)
        done = time.monotonic()
        rate = num_tokens / max(done - loaded, 1e-9)
        print(
            f"{num_tokens} tokens in {done - loaded:.2f} s ({rate:.1f} tokens/s), loaded in {loaded - start:.2f} s",
            file=sys.stderr,
        )
        if args.smoke and num_tokens != SMOKE_TOKENS:
            raise ParameterError("smoke", f"expected {SMOKE_TOKENS} tokens, got {num_tokens}")
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig.from_args(args)
    return {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}


def _sampling(args: argparse.Namespace) -> SamplingParams:
    if args.smoke:
        return SamplingParams(temperature=0, max_tokens=SMOKE_TOKENS, ignore_eos=True)
    return SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.sampling_seed,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def _prompts(args: argparse.Namespace) -> Any:
    if args.tokens:
        try:
            prompts = json.loads(Path(args.tokens).read_text())
        except OSError as error:
            raise ParameterError("tokens", f"cannot read {args.tokens}: {error.strerror}") from error
        except ValueError as error:
            raise ParameterError("tokens", f"{args.tokens} is not JSON: {error}") from error
        if not isinstance(prompts, list) or not prompts:
            raise ParameterError("tokens", f"{args.tokens} must hold a JSON list of token ids, or of such lists")
        return prompts
    if args.prompt:
        return args.prompt
    if args.smoke:
        return [1, 2, 3, 4]
    raise ParameterError("prompt", "one of --prompt, --tokens and --smoke is required, got none")


def _generate(llm: LLM, prompts: Any, sampling: SamplingParams, as_json: bool) -> int:
    num_tokens = 0
    for result in llm.generate(prompts, sampling, use_tqdm=sys.stderr.isatty()):
        for output in result.outputs:
            num_tokens += len(output.token_ids)
            if output.error is not None:
                raise RequestFailedError(result.request_id, output.error)
            if as_json:
                print(
                    json.dumps(
                        {
                            "prompt": result.prompt,
                            "prompt_token_ids": result.prompt_token_ids,
                            "index": output.index,
                            "text": output.text,
                            "token_ids": output.token_ids,
                            "finish_reason": output.finish_reason,
                            "stop_reason": output.stop_reason,
                        },
                        ensure_ascii=False,
                    )
                )
            else:
                print(output.text if llm.tokenizer is not None else " ".join(map(str, output.token_ids)))
    return num_tokens


def _stream(llm: LLM, prompts: Any, sampling: SamplingParams) -> int:
    num_tokens = 0
    ids_only = llm.tokenizer is None
    for chunk in llm.stream(prompts, sampling):
        num_tokens += len(chunk.token_ids)
        if chunk.error is not None:
            raise RequestFailedError(str(chunk.prompt_index), chunk.error)
        print("".join(f"{token} " for token in chunk.token_ids) if ids_only else chunk.text, end="", flush=True)
        if chunk.finish_reason is not None:
            print(flush=True)
    return num_tokens
