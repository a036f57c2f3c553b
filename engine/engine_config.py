"""EngineConfig: how the engine runs a model, and the command line options that set it. Standard library only."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.types import ParameterError

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
POLICIES = ("fcfs", "priority")
MOE_WEIGHTS = ("fp8", "mxfp4")
MOE_ACTIVATIONS = ("auto", "bf16", "fp8")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine. None means "decided when the model is loaded"; the runner returns a resolved copy.

    max_model_len          prompt + output tokens of one request; None: the model's own limit
    max_num_seqs           requests that run at once
    max_num_batched_tokens tokens of one forward pass, at least max_num_seqs
    block_size             tokens of one MLA cache block
    num_blocks, num_slots  usable MLA blocks / KDA state slots; None: from the memory that is free
    chunk_size             upper bound of the prefill tokens one request gets per step; None: only the budget bounds it
    scheduling_policy      "fcfs", or "priority" (lower Request.priority first, then arrival)
    max_num_queued_reqs    waiting requests beyond those that can start at once; None: no bound
    moe_activation         how inputs enter the routed experts' products: "bf16" as they are, "fp8" quantised to E4M3;
                           "auto": bf16, as checkpoints that quantise weights alone were made for
    moe_weights            convert plain bf16 experts on loading; None: experts stay as they are stored
    check_invariants       compare scheduler, memories and state slots after each step (tests)

    Raises ParameterError naming the field.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 16384
    block_size: int = 64
    num_blocks: int | None = None
    num_slots: int | None = None
    chunk_size: int | None = None
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    moe_activation: str = "auto"
    moe_weights: str | None = None
    gpu_memory_utilization: float = 0.9
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _check_int(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_blocks", "num_slots", "chunk_size"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.max_num_queued_reqs is not None:
            _check_int("max_num_queued_reqs", self.max_num_queued_reqs, 0)
        _check_int("seed", self.seed, -(2**63))
        for name, choices in (
            ("scheduling_policy", POLICIES),
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("moe_activation", MOE_ACTIVATIONS),
        ):
            if getattr(self, name) not in choices:
                raise ParameterError(name, f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.moe_weights is not None and self.moe_weights not in MOE_WEIGHTS:
            raise ParameterError(
                "moe_weights", f"moe_weights must be one of {', '.join(MOE_WEIGHTS)}, got {self.moe_weights!r}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Otherwise a step in which every request decodes would not fit into one pass.
            raise ParameterError(
                "max_num_batched_tokens",
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}",
            )
        use = self.gpu_memory_utilization
        if isinstance(use, bool) or not isinstance(use, (int, float)) or not (math.isfinite(use) and 0 < use <= 1):
            raise ParameterError("gpu_memory_utilization", f"gpu_memory_utilization must be in (0, 1], got {use!r}")

    def resolved(self, *, max_model_len: int, num_blocks: int, num_slots: int) -> EngineConfig:
        """A copy with the three numbers that depend on model and memory filled in."""
        return dataclasses.replace(self, max_model_len=max_model_len, num_blocks=num_blocks, num_slots=num_slots)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EngineConfig:
        """From parsed options; an option the parser does not have keeps its default."""
        given = vars(args)
        return cls.from_options({f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From what a user chose. Of max_num_seqs and max_num_batched_tokens the one left out fits the other."""
        chosen = dict(options)
        seqs, tokens = chosen.pop("max_num_seqs", None), chosen.pop("max_num_batched_tokens", None)
        if seqs is None:
            seqs = cls._fitted("max_num_seqs", 256, tokens, min)
        if tokens is None:
            tokens = cls._fitted("max_num_batched_tokens", 16384, seqs, max)
        return cls(max_num_seqs=seqs, max_num_batched_tokens=tokens, **chosen)

    @staticmethod
    def _fitted(name: str, default: int, other: object, bound: Callable[[int, int], int]) -> int:
        if not isinstance(other, int) or isinstance(other, bool) or other < 1:
            return default  # the other one is refused, or left out as well
        fitted = bound(default, other)
        if fitted != default:
            logger.warning("%s is %d instead of %d: a pass must hold a token of each sequence", name, fitted, default)
        return fitted


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """``--device``, which every command that runs the model takes."""
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="where the model runs; auto: cuda when there is one"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for every EngineConfig field, with the spelling vLLM uses; ``EngineConfig.from_args`` reads them back."""
    add_device_argument(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("--max-model-len", type=parse_size, default=None, help="prompt + output tokens; also 32k, 1M")
    group.add_argument("--max-num-seqs", type=int, default=None, help="requests that run at once (default 256)")
    group.add_argument(
        "--max-num-batched-tokens", type=parse_size, default=None, help="tokens of one forward pass (default 16384)"
    )
    group.add_argument("--block-size", type=int, default=64, help="tokens of one MLA cache block")
    group.add_argument("--num-blocks", type=int, default=None, help="MLA cache blocks (default: from memory)")
    group.add_argument("--num-slots", type=int, default=None, help="KDA state slots (default: from memory)")
    group.add_argument("--chunk-size", type=parse_size, default=None, help="most prefill tokens of a request per step")
    group.add_argument("--scheduling-policy", choices=POLICIES, default="fcfs")
    group.add_argument("--max-num-queued-reqs", type=int, default=None, help="refuse requests beyond this queue length")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="activations; auto: bfloat16 on CUDA")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--moe-activation", choices=MOE_ACTIVATIONS, default="auto", help="inputs of the routed experts; auto: bf16"
    )
    group.add_argument("--moe-weights", choices=MOE_WEIGHTS, default=None, help="convert plain bf16 experts on loading")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    group.add_argument("--check-invariants", action="store_true", help="check all memory accounting after each step")


def parse_size(text: str) -> int:
    """A token count: ``4096``, ``32k`` (x 1,000), ``32K`` (x 1,024), ``1m``, ``1M`` likewise (vLLM's reading)."""
    factors = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
    number, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    try:
        return int(float(number) * factor) if factor > 1 else int(number)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"expected a token count such as 4096, 32k or 1M, got {text!r}") from None


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ParameterError(name, f"{name} must be an integer of at least {low}, got {value!r}")
