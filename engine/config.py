"""The model's dimensions, read from a published Kimi K3 ``config.json``.

Strict on purpose: a field is used, or demanded to have the one value that the code implements, or stands on a
list of fields without effect; anything else is an error that names the field. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config_fields import (
    NO_EFFECT_QUANT,
    NO_EFFECT_QUANT_WEIGHTS,
    NO_EFFECT_TEXT,
    NO_EFFECT_TOP,
    REQUIRED_LINEAR,
    REQUIRED_QUANT,
    REQUIRED_QUANT_WEIGHTS,
    REQUIRED_TEXT,
    ConfigError,
    Fields,
    demand_dtype,
)

MAX_ATTN_RES_BLOCKS = 15  # of attn_res.mix
LOWEST_GATE_BOUND = -5.0  # the chunk form takes exp of 16 tokens' sum of gates, and exp(80) still fits fp32
A_LOG_SIZE = 128  # as published: one value a head, the rest zeros


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of one Kimi K3 text model. Layer numbers are 0-based; names are those of ``text_config``."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    intermediate_size: int
    first_k_dense_replace: int
    attn_res_block_size: int
    kda_num_heads: int
    gate_lower_bound: float
    mla_layers: tuple[int, ...]
    num_attention_heads: int
    q_lora_rank: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    routed_expert_hidden_size: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int
    situ_beta: float
    situ_linear_beta: float | None
    expert_format: str  # "mxfp4" or "bf16": how the checkpoint stores the routed experts
    eos_token_ids: tuple[int, ...]
    kda_head_dim: int = 128
    conv_kernel_size: int = 4
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm: a class default of the publisher

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.mla_layers)

    @property
    def kda_dim(self) -> int:
        """Channels of q, k or v in a KDA layer."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def num_attn_res_blocks(self) -> int:
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read ``config.json`` of a checkpoint directory (or the file itself)."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            data = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Parse the nested published form. Raises ConfigError naming the field."""
        if not isinstance(data, dict):
            raise ConfigError(f"config must be a JSON object, got {type(data).__name__}")
        if "text_config" not in data:
            raise ConfigError(
                "config has no text_config: the published form is nested (model_type kimi_k3, text_config inside it), "
                f"got a flat one with model_type {data.get('model_type')!r}"
            )
        top = Fields("", data)
        top.demand("model_type", "kimi_k3")
        top.demand("tie_word_embeddings", False, optional=True)
        demand_dtype(top, optional=True)
        eos = top.token_ids("eos_token_id", optional=True)
        text = Fields("text_config.", top.take("text_config"))
        top.finish(NO_EFFECT_TOP)
        return _parse_text(text, eos)


def _parse_text(text: Fields, top_eos: tuple[int, ...]) -> ModelConfig:
    for name, value in REQUIRED_TEXT.items():
        if name == "dtype":
            demand_dtype(text, optional=False)
        else:
            text.demand(name, value)
    num_layers = text.integer("num_hidden_layers")
    heads = text.integer("num_attention_heads")
    text.demand("num_key_value_heads", heads, optional=True)
    linear = Fields("text_config.linear_attn_config.", text.take("linear_attn_config"))
    for name, value in REQUIRED_LINEAR.items():
        linear.demand(name, value)
    mla_layers = _layer_lists(linear, num_layers)
    lower_bound = linear.number("gate_lower_bound", positive=False)
    if not LOWEST_GATE_BOUND <= lower_bound < 0:
        raise ConfigError(f"{linear.where}gate_lower_bound must be in [{LOWEST_GATE_BOUND}, 0), got {lower_bound}")
    kda_heads = linear.integer("num_heads", high=A_LOG_SIZE)
    linear.finish(frozenset())

    experts = text.integer("num_experts", high=1024)
    groups = text.integer("num_expert_group", high=experts)
    topk_group = text.integer("topk_group", high=groups)
    if experts % groups:
        raise ConfigError(f"text_config.num_expert_group must divide num_experts {experts}, got {groups}")
    if groups > 1:
        text.demand("use_grouped_topk", True, optional=True)
    text.left.discard("use_grouped_topk")  # without effect when there is one group
    quant = text.data.get("quantization_config")
    text.left.discard("quantization_config")
    config = ModelConfig(
        hidden_size=text.integer("hidden_size", multiple=32),
        num_hidden_layers=num_layers,
        vocab_size=text.integer("vocab_size"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        rms_norm_eps=text.number("rms_norm_eps"),
        intermediate_size=text.integer("intermediate_size", multiple=32),
        first_k_dense_replace=text.integer("first_k_dense_replace", low=0, high=num_layers),
        attn_res_block_size=text.integer("attn_res_block_size"),
        kda_num_heads=kda_heads,
        gate_lower_bound=lower_bound,
        mla_layers=mla_layers,
        num_attention_heads=heads,
        q_lora_rank=text.integer("q_lora_rank"),
        num_experts=experts,
        num_experts_per_token=text.integer("num_experts_per_token", high=experts // groups * topk_group),
        num_shared_experts=text.integer("num_shared_experts"),
        routed_expert_hidden_size=text.integer("routed_expert_hidden_size", multiple=32),
        moe_intermediate_size=text.integer("moe_intermediate_size", multiple=32),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        num_expert_group=groups,
        topk_group=topk_group,
        # absent betas have a meaning of their own: beta 1, and no bound on the linear half
        situ_beta=text.optional_number("activation_situ_beta") or 1.0,
        situ_linear_beta=text.optional_number("activation_situ_linear_beta"),
        expert_format="bf16" if quant is None else _quantization(quant),
        eos_token_ids=tuple(sorted({*text.token_ids("eos_token_id", optional=True), *top_eos})),
    )
    text.finish(NO_EFFECT_TEXT)
    if config.num_attn_res_blocks > MAX_ATTN_RES_BLOCKS:
        raise ConfigError(
            f"text_config.attn_res_block_size must make at most {MAX_ATTN_RES_BLOCKS} blocks of {num_layers} layers, "
            f"got {config.attn_res_block_size}"
        )
    too_high = [i for i in config.eos_token_ids if i >= config.vocab_size]
    if too_high:
        raise ConfigError(f"eos_token_id must be below vocab_size {config.vocab_size}, got {too_high}")
    return config


def _layer_lists(linear: Fields, num_layers: int) -> tuple[int, ...]:
    """The MLA layers, 0-based; the config's two lists are 1-based and must share out all layers."""
    lists = {name: linear.take(name) for name in ("full_attn_layers", "kda_layers")}
    for name, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise ConfigError(f"{linear.where}{name} must be a list of layer numbers, got {value!r}")
    both = sorted(lists["full_attn_layers"] + lists["kda_layers"])
    if both != list(range(1, num_layers + 1)):
        raise ConfigError(
            f"{linear.where}full_attn_layers and kda_layers (1-based) must hold each of the layers 1..{num_layers} "
            f"once, got {both}"
        )
    return tuple(sorted(i - 1 for i in lists["full_attn_layers"]))


def _quantization(data: Any) -> str:
    quant = Fields("text_config.quantization_config.", data)
    for name, value in REQUIRED_QUANT.items():
        quant.demand(name, value)
    quant.demand("kv_cache_scheme", None, optional=True)
    groups = quant.take("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ConfigError(f"{quant.where}config_groups must hold one group, got {groups!r}")
    quant.finish(NO_EFFECT_QUANT)
    name, value = next(iter(groups.items()))
    group = Fields(f"{quant.where}config_groups.{name}.", value)
    group.demand("format", REQUIRED_QUANT["format"], optional=True)
    group.demand("input_activations", None, optional=True)
    group.demand("output_activations", None, optional=True)
    group.demand("targets", ["Linear"])
    weights = Fields(group.where + "weights.", group.take("weights"))
    group.finish(frozenset())
    for name, value in REQUIRED_QUANT_WEIGHTS.items():
        weights.demand(name, value)
    weights.demand("symmetric", True, optional=True)
    weights.demand("dynamic", False, optional=True)
    weights.finish(NO_EFFECT_QUANT_WEIGHTS)
    return "mxfp4"
