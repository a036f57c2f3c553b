"""``kimi-engine logits``: the logits of every position of a token list, computed by the runner that serves requests."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from engine.config import ConfigError, ModelConfig
from engine.engine_config import EngineConfig, add_device_argument
from engine.runner.runner import Runner
from engine.types import ParameterError, Request, SamplingParams, ScheduledRequest, StepPlan
from engine.weights.shards import CheckpointError

CHUNK_SIZE = 2048
ROWS_AT_ONCE = 256  # rows of logits made at a time: a row is a whole vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE.json", help="a JSON list of token ids")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="one array: logits [tokens, vocab]")
    parser.add_argument("--chunk-size", type=int, default=CHUNK_SIZE, metavar="N", help="tokens of one forward pass")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the model; only 1 so far")
    add_device_argument(parser)


def run(args: argparse.Namespace) -> int:
    try:
        if args.tp != 1:
            raise ParameterError("tp", f"--tp must be 1: running on several GPUs is not implemented, got {args.tp}")
        if args.chunk_size < 1:
            raise ParameterError("chunk_size", f"--chunk-size must be at least 1, got {args.chunk_size}")
        if not args.out.parent.is_dir():
            raise ParameterError("out", f"--out must be in a directory that is there, got {args.out}")
        config = ModelConfig.from_dir(args.model)
        tokens = read_tokens(args.tokens, config.vocab_size)
        chunk = min(args.chunk_size, len(tokens))
        engine = EngineConfig(
            max_num_seqs=1,
            num_slots=1,
            max_num_batched_tokens=chunk,
            num_blocks=-(-max(2, len(tokens)) // 64),
            block_size=64,
            device=args.device,
        )
        logits = all_logits(Runner.from_dir(args.model, engine), tokens, chunk)
    except (ConfigError, CheckpointError, ParameterError) as error:
        print(f"kimi-engine logits: error: {error}", file=sys.stderr)
        return 2
    with args.out.open("wb") as file:  # an open file: numpy would add a suffix to a name that has none
        np.savez(file, logits=logits)
    print(f"{logits.shape[0]} x {logits.shape[1]} logits written to {args.out}", file=sys.stderr)
    return 0


def read_tokens(path: Path, vocab_size: int) -> list[int]:
    """The token ids of a JSON file. Raises ParameterError naming the first one that cannot be used."""
    try:
        tokens = json.loads(path.read_text())
    except OSError as error:
        raise ParameterError("tokens", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ParameterError("tokens", f"{path} is not JSON: {error}") from error
    if not isinstance(tokens, list) or not tokens:
        raise ParameterError("tokens", f"{path} must hold a JSON list of at least one token id")
    for at, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ParameterError("tokens", f"{path}: entry {at} must be an id in [0, {vocab_size - 1}], got {token!r}")
    return tokens


def all_logits(runner: Runner, tokens: list[int], chunk_size: int) -> np.ndarray:
    """Logits float32 [tokens, vocab] of one sequence, fed in chunks."""
    request = Request("logits", tokens, SamplingParams(max_tokens=0))
    request.slot = 1
    request.block_table = list(range(1, -(-len(tokens) // runner.engine_config.block_size) + 1))
    out = np.empty((len(tokens), runner.vocab_size), np.float32)
    for start in range(0, len(tokens), chunk_size):
        stop = min(start + chunk_size, len(tokens))
        scheduled = ScheduledRequest(request, start, stop - start, samples=False)
        hidden = runner.forward(StepPlan([scheduled], int(scheduled.is_decode), stop - start))
        for at in range(start, stop, ROWS_AT_ONCE):
            end = min(at + ROWS_AT_ONCE, stop)
            out[at:end] = runner.logits(hidden[at - start : end - start]).cpu().numpy()
    return out
