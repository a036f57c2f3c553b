"""``kimi-engine plan CONFIG --gpu b300|h200 --tp N``: what a rank holds, what is left for requests, if it fits."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.config import ConfigError, ModelConfig
from engine.engine_config import parse_size
from engine.runner.memory import activation_bytes, slot_bytes, token_bytes
from engine.types import ParameterError
from engine.weights.mapping import checkpoint_tensors

GPU_BYTES = {"h200": 143771 << 20, "b300": 275040 << 20}  # what the driver reports as the card's memory
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the report: ``layers`` layers hold ``total`` bytes together, ``rank`` of them on each rank.

    What stands outside the layers counts as one.
    """

    name: str
    layers: int
    total: int
    rank: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All in bytes. ``per_sequence`` is the state and the cache of one sequence of ``context`` tokens on one rank."""

    parts: tuple[Part, ...]
    usable: int
    activations: int
    state: int
    cache_per_token: int
    per_sequence: int

    @property
    def weights(self) -> int:
        return sum(p.rank for p in self.parts)

    @property
    def free(self) -> int:
        return self.usable - self.weights - self.activations

    @property
    def num_sequences(self) -> int:
        return max(0, self.free // self.per_sequence)


def make_plan(
    config: ModelConfig, *, gpu: str, tp: int, context: int, utilization: float = 0.9, batched_tokens: int = 16384
) -> MemoryPlan:
    """Split the checkpoint over ``tp`` ranks as the table in engine/weights/mapping.py says.

    Heads, MLP widths, vocabulary and whole experts are split; norms, router, latent and low-rank projections and the
    MLA cache are on every rank. Raises ParameterError when ``tp`` does not divide what has to be split.
    """
    if tp < 1:
        raise ParameterError("tp", f"--tp must be at least 1, got {tp}")
    for name in ("kda_num_heads", "num_attention_heads", "num_experts", "vocab_size", "moe_intermediate_size"):
        if getattr(config, name) % tp:
            raise ParameterError("tp", f"--tp must divide {name} {getattr(config, name)}, got {tp}")
    if not 0 < utilization <= 1:
        raise ParameterError("gpu_memory_utilization", f"--gpu-memory-utilization must be in (0, 1], got {utilization}")
    if batched_tokens < 1:
        raise ParameterError(
            "max_num_batched_tokens", f"--max-num-batched-tokens must be at least 1, got {batched_tokens}"
        )
    if not 1 <= context <= config.max_position_embeddings:
        raise ParameterError("context", f"--context must be in [1, {config.max_position_embeddings}], got {context}")
    totals: dict[str, list[int]] = {}
    layers: dict[str, set[str]] = {}
    for spec in checkpoint_tensors(config, experts=(0,)):  # all experts are alike
        size = math.prod(spec.shape) * spec.dtype.itemsize * (1 if spec.expert is None else config.num_experts)
        total = totals.setdefault(spec.part, [0, 0])
        total[0] += size
        total[1] += size if spec.split is None else size // tp
        layers.setdefault(spec.part, set()).add(spec.target.split(".")[1] if spec.target.startswith("layers.") else "")
    parts = tuple(Part(name, len(layers[name]), total, rank) for name, (total, rank) in totals.items())
    state, cache = slot_bytes(config, BF16_BYTES) // tp, token_bytes(config, BF16_BYTES)
    return MemoryPlan(
        parts=parts,
        usable=int(GPU_BYTES[gpu] * utilization),
        activations=activation_bytes(config, batched_tokens, BF16_BYTES),
        state=state,
        cache_per_token=cache,
        per_sequence=state + cache * context,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="config.json, or a checkpoint directory")
    parser.add_argument("--gpu", choices=sorted(GPU_BYTES), required=True)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the model")
    parser.add_argument("--context", type=parse_size, default=32768, metavar="L", help="tokens of each sequence")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--max-num-batched-tokens", type=parse_size, default=16384, help="tokens of one forward pass")


def run(args: argparse.Namespace) -> int:
    try:
        config = ModelConfig.from_dir(args.config)
        plan = make_plan(
            config,
            gpu=args.gpu,
            tp=args.tp,
            context=args.context,
            utilization=args.gpu_memory_utilization,
            batched_tokens=args.max_num_batched_tokens,
        )
    except (ConfigError, ParameterError) as error:
        print(f"kimi-engine plan: error: {error}", file=sys.stderr)
        return 2
    print(report(plan, gpu=args.gpu, tp=args.tp, context=args.context))
    return 0


def report(plan: MemoryPlan, *, gpu: str, tp: int, context: int) -> str:
    """The table that ``kimi-engine plan`` prints."""
    lines = [f"{'bytes of weights':36} {'layers':>6} {'a layer':>16} {'all ranks':>21} {f'one rank of {tp}':>18}"]
    for p in plan.parts:
        lines.append(f"  {p.name:34} {p.layers:6} {p.total // p.layers:16,} {p.total:21,} {p.rank:18,}")
    total = sum(p.total for p in plan.parts)
    lines += [
        f"  {'all weights':34} {'':6} {'':16} {total:21,} {plan.weights:18,}",
        "",
        f"one rank of {tp} on {gpu}",
        f"  {'usable memory':36} {plan.usable:20,}",
        f"  {'weights':36} {plan.weights:20,}",
        f"  {'activations (estimate)':36} {plan.activations:20,}",
        f"  {'left for requests':36} {plan.free:20,}",
        f"  {'KDA state, a sequence':36} {plan.state:20,}",
        f"  {'MLA cache, a token':36} {plan.cache_per_token:20,}",
        f"  {f'a sequence of {context:,} tokens':36} {plan.per_sequence:20,}",
        "",
    ]
    if plan.weights > plan.usable:
        lines.append(f"does not fit: the weights alone need {plan.weights - plan.usable:,} bytes more on each rank")
    elif plan.num_sequences < 1:
        lines.append(f"does not fit: no room for one sequence of {context:,} tokens")
    else:
        tokens = plan.free // plan.cache_per_token if plan.cache_per_token else 0
        lines.append(
            f"fits: {plan.num_sequences:,} sequences of {context:,} tokens; "
            f"without their states the cache would hold {tokens:,} tokens"
        )
    return "\n".join(lines)
