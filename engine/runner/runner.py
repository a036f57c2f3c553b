"""The device side of a step: inputs, one forward pass, sampling. It holds no queue and decides nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch

from engine.config import ConfigError, ModelConfig
from engine.engine_config import EngineConfig
from engine.model.context import ModelState
from engine.model.kimi_k3 import KimiK3
from engine.runner import memory
from engine.runner.inputs import prepare
from engine.runner.operations import require_operations
from engine.runner.sampler import Sampler
from engine.types import EngineDeadError, ParameterError, StepOutput, StepPlan
from engine.weights.loader import load_model
from kimi_kernels import reference_operations

logger = logging.getLogger(__name__)


class Runner:
    """A loaded model with its two memories.

    ``num_absorbed_tokens`` says by slot how many tokens the slot's state holds; ``num_forwards`` and
    ``num_tokens_computed`` count since start.
    """

    def __init__(
        self,
        model: KimiK3,
        engine_config: EngineConfig,
        state: ModelState,
        *,
        dtype: torch.dtype,
        device: torch.device,
        eos_token_ids: frozenset[int],
    ) -> None:
        """``engine_config`` is a resolved one. ``Runner.from_dir`` is the usual way to get here."""
        assert engine_config.num_slots is not None
        self.model, self.model_config, self.engine_config, self.state = model, model.config, engine_config, state
        self.dtype, self.device = dtype, device
        self.eos_token_ids = eos_token_ids
        self.vocab_size = model.config.vocab_size
        self.num_absorbed_tokens = [0] * (engine_config.num_slots + 1)
        self.num_forwards = 0
        self.num_tokens_computed = 0
        self._sampler = Sampler(self.vocab_size, engine_config.seed, device)

    @classmethod
    def from_dir(cls, model_dir: Path, engine_config: EngineConfig, *, progress: bool = True) -> Runner:
        """Load a checkpoint directory. Raises ConfigError, CheckpointError or ParameterError before anything runs."""
        model_dir = Path(model_dir)
        config = ModelConfig.from_dir(model_dir)
        eos = frozenset(config.eos_token_ids) | _end_tokens(model_dir, config.vocab_size)
        device = choose_device(engine_config.device)
        dtype = choose_dtype(engine_config.dtype, device)
        if engine_config.moe_weights is not None:
            raise ParameterError("moe_weights", f"converting experts to {engine_config.moe_weights} is not implemented")
        if device.type == "cuda" and config.expert_format == "bf16" and "moe.experts" not in reference_operations():
            raise ParameterError(
                "moe_weights", "experts in plain bf16 run on CUDA only when converted, which is not implemented"
            )
        activation = choose_moe_activation(engine_config.moe_activation, dtype)
        engine_config = dataclasses.replace(engine_config, moe_activation=activation)
        if device.type == "cuda":
            require_operations(config)
            # cuBLAS may otherwise round partial sums to bf16 when it splits K
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        if device.type == "cpu":  # what cannot fit is told before the weights are read
            memory.resolve(config, engine_config, memory.memory_budget(config, engine_config, device, 4), 4)
        model = load_model(model_dir, config, device, moe_activation=activation, progress=progress)
        budget = memory.memory_budget(config, engine_config, device, dtype.itemsize)
        resolved = memory.resolve(config, engine_config, budget, dtype.itemsize)
        state = memory.allocate(config, resolved, device, dtype)
        logger.info(
            "%d blocks of %d tokens, %d state slots, max_model_len %d, on %s in %s, %s into the experts",
            resolved.num_blocks, resolved.block_size, resolved.num_slots, resolved.max_model_len, device, dtype,
            activation,
        )  # fmt: skip
        if device.type == "cuda" and (names := reference_operations()):
            logger.warning("on the plain-torch reference instead of kernels: %s", ", ".join(sorted(names)))
        return cls(model, resolved, state, dtype=dtype, device=device, eos_token_ids=eos)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Run the plan's tokens -> final hidden states [T, H]. Slots and blocks absorb the tokens."""
        for s in plan.scheduled:
            held = self.num_absorbed_tokens[s.request.slot]
            if s.num_computed_tokens not in (0, held):
                raise ValueError(
                    f"slot {s.request.slot} holds {held} tokens, but request {s.request.request_id} is planned at "
                    f"{s.num_computed_tokens}"
                )
        token_ids, context = prepare(plan, self.engine_config.block_size, self.device)
        hidden = self.model(token_ids, context, self.state, self.dtype)
        self.num_forwards += 1
        self.num_tokens_computed += plan.num_tokens
        for s in plan.scheduled:
            self.num_absorbed_tokens[s.request.slot] = s.num_computed_tokens + s.num_new_tokens
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [*, H] -> [*, vocab] f32."""
        return self.model.logits(hidden)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """One forward pass, then a token for each request whose newest token was in it.

        A request whose hidden state or logits are not finite gets an error instead; the others are not touched by it.
        Raises EngineDeadError when the step failed and left the device unusable.
        """
        try:
            hidden = self.forward(plan)
            return self._sampler.sample(plan, hidden, self.model.logits)
        except Exception as error:
            self._require_device(error)
            raise

    def _require_device(self, error: Exception) -> None:
        """EngineDeadError if ``error`` has left a device that refuses everything (a fault inside a kernel does)."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as lost:
            raise EngineDeadError(
                f"the device is lost: {lost}; first seen as {type(error).__name__}: {error}"
            ) from error

    def memory_table(self) -> list[tuple[str, int]]:
        """(what, bytes) of everything that stays on the device, for the start-up log."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for module in self.model.modules():
            for experts in (getattr(module, "w13", None), getattr(module, "w2", None)):
                tensors += [
                    t for t in (getattr(experts, "data", None), getattr(experts, "scale", None)) if t is not None
                ]
        weights = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}
        state = self.state
        return [
            ("weights", sum(weights.values())),
            ("MLA cache", state.mla_cache.nbytes),
            ("KDA state", state.kda_state.nbytes + state.conv_state.nbytes),
        ]

    def forget(self, request_id: str) -> None:
        """Drop what the sampler keeps of a request (random stream, penalty counts)."""
        self._sampler.forget(request_id)


def choose_device(name: str) -> torch.device:
    """ "auto" is cuda when torch has one. Raises ParameterError when cuda is asked for and absent."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ParameterError("device", "device cuda was asked for, but torch finds no CUDA device")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Activations: "auto" is bf16 on CUDA (all the kernels take) and float32 on the CPU."""
    if name == "float32" and device.type == "cuda":
        raise ParameterError("dtype", "dtype float32 runs on the CPU only: the CUDA kernels take bfloat16")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def choose_moe_activation(name: str, dtype: torch.dtype) -> str:
    """How inputs enter the experts' products, once for all batches. "auto" is bf16: K3 quantises its weights only.

    Raises ParameterError for fp8 with float32 activations, which the reference does not quantise.
    """
    if name == "fp8" and dtype == torch.float32:
        raise ParameterError("moe_activation", "moe_activation fp8 needs dtype bfloat16, got float32")
    return "bf16" if name == "auto" else name


def _end_tokens(model_dir: Path, vocab_size: int) -> frozenset[int]:
    """End ids beside the config's: of generation_config.json, and the tokenizer's own eos_token.

    The published tokenizer names another end token than the model config does, and the model ends turns with either.
    """
    generation, tokenizer = model_dir / "generation_config.json", model_dir / "tokenizer_config.json"
    value = _read_object(generation).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    table = _read_object(tokenizer)
    try:
        for token_id, token in table.get("added_tokens_decoder", {}).items():
            if token.get("content") == table.get("eos_token"):
                ids = [*ids, int(token_id)]
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{tokenizer}: added_tokens_decoder must map ids to objects ({error})") from error
    if not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
        raise ConfigError(f"{model_dir}: end token ids must be below the vocabulary's {vocab_size}, got {ids!r}")
    return frozenset(ids)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data
