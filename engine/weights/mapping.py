"""Which checkpoint tensor goes where: the table from published names to the model's parameters.

Names, shapes and dtypes all follow from the config, so the table is also the list of what a checkpoint must hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from engine.config import A_LOG_SIZE, ModelConfig

PREFIX = "language_model."
SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")  # the image half of the published model

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
MXFP4_GROUP = 32  # elements along the input dimension that share one scale byte


class TensorSpec(NamedTuple):
    """One checkpoint tensor and its place.

    It fills rows ``row`` .. ``row + shape[0]`` of parameter ``target`` (of entry ``expert`` of it, if given), read in
    the target's shape: [P, 1, 4] fills [P, 4] rows and [1, H] fills an [H] vector. ``split`` says how tensor-parallel
    ranks share it: by "rows", by "cols", by whole "experts", or None: every rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: str
    row: int = 0
    expert: int | None = None
    split: str | None = None
    part: str = "other"  # the line of a size report it counts to


def checkpoint_tensors(config: ModelConfig, experts: Sequence[int] | None = None) -> Iterator[TensorSpec]:
    """Every text tensor of a checkpoint of ``config``, in the model's order; of the routed experts only ``experts``."""
    experts = range(config.num_experts) if experts is None else experts
    hidden, vocab = config.hidden_size, config.vocab_size
    ends = "embedding, head and final vectors"
    model = PREFIX + "model."
    yield TensorSpec(model + "embed_tokens.weight", (vocab, hidden), BF16, "embed", split="rows", part=ends)
    for i in range(config.num_hidden_layers):
        yield from _layer(config, i, experts)
    yield TensorSpec(model + "output_attn_res_norm.weight", (hidden,), BF16, "output_res.score_norm", part=ends)
    yield TensorSpec(model + "output_attn_res_proj.weight", (1, hidden), BF16, "output_res.score_proj", part=ends)
    yield TensorSpec(model + "norm.weight", (hidden,), BF16, "output_res.out_norm", part=ends)
    yield TensorSpec(PREFIX + "lm_head.weight", (vocab, hidden), BF16, "lm_head.weight", split="rows", part=ends)


def _layer(config: ModelConfig, i: int, experts: Sequence[int]) -> Iterator[TensorSpec]:
    name, target, hidden = f"{PREFIX}model.layers.{i}.", f"layers.{i}.", config.hidden_size
    vectors = "norms and AttnRes vectors"
    for res, norm, place in (
        ("self_attention_res", "input_layernorm", "attn_res"),
        ("mlp_res", "post_attention_layernorm", "mlp_res"),
    ):
        yield TensorSpec(f"{name}{res}_norm.weight", (hidden,), BF16, f"{target}{place}.score_norm", part=vectors)
        yield TensorSpec(f"{name}{res}_proj.weight", (1, hidden), BF16, f"{target}{place}.score_proj", part=vectors)
        yield TensorSpec(f"{name}{norm}.weight", (hidden,), BF16, f"{target}{place}.out_norm", part=vectors)
    if i in config.mla_layers:
        yield from _mla(config, name + "self_attn.", target + "attn.")
    else:
        yield from _kda(config, name + "self_attn.", target + "attn.")
    if config.is_moe(i):
        yield from _moe(config, name + "block_sparse_moe.", target + "mlp.")
        for e in experts:
            yield from _expert(config, f"{name}block_sparse_moe.experts.{e}.", target + "mlp.experts.", e)
    else:
        yield from _mlp(config, name + "mlp.", target + "mlp.", config.intermediate_size, "dense MLP")


def _stacked(
    name: str, target: str, cols: int, part: str, matrices: list[tuple[str, int, str | None]]
) -> Iterator[TensorSpec]:
    """Matrices (name, rows, split) that read the same input, one below the other in one parameter."""
    row = 0
    for matrix, rows, split in matrices:
        yield TensorSpec(f"{name}{matrix}.weight", (rows, cols), BF16, target, row=row, split=split, part=part)
        row += rows


def _kda(config: ModelConfig, name: str, target: str) -> Iterator[TensorSpec]:
    dim, heads, head_dim, hidden = config.kda_dim, config.kda_num_heads, config.kda_head_dim, config.hidden_size
    part = "KDA attention"
    inputs = [(f"{x}_proj", dim, "rows") for x in "qkvg"] + [("f_a_proj", head_dim, None), ("b_proj", heads, "rows")]
    yield from _stacked(name, target + "in_proj.weight", hidden, part, inputs)
    for at, x in enumerate("qkv"):
        conv = (dim, 1, config.conv_kernel_size)
        yield TensorSpec(
            f"{name}{x}_conv1d.weight", conv, F32, target + "conv_weight", row=at * dim, split="rows", part=part
        )
    yield TensorSpec(
        name + "f_b_proj.weight", (dim, head_dim), BF16, target + "f_b_proj.weight", split="rows", part=part
    )
    yield TensorSpec(name + "A_log", (A_LOG_SIZE,), F32, target + "a_log", part=part)
    yield TensorSpec(name + "dt_bias", (dim,), F32, target + "dt_bias", split="rows", part=part)
    yield TensorSpec(name + "o_norm.weight", (head_dim,), F32, target + "o_norm", part=part)
    yield TensorSpec(name + "o_proj.weight", (hidden, dim), BF16, target + "o_proj.weight", split="cols", part=part)


def _mla(config: ModelConfig, name: str, target: str) -> Iterator[TensorSpec]:
    heads, hidden, q_lora, latent = (
        config.num_attention_heads,
        config.hidden_size,
        config.q_lora_rank,
        config.kv_lora_rank,
    )
    nope, rope, v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    part = "MLA attention"
    inputs: list[tuple[str, int, str | None]] = [
        ("q_a_proj", q_lora, None),
        ("kv_a_proj_with_mqa", latent + rope, None),
        ("g_proj", heads * v_dim, "rows"),
    ]
    yield from _stacked(name, target + "in_proj.weight", hidden, part, inputs)
    yield TensorSpec(name + "q_a_layernorm.weight", (q_lora,), BF16, target + "q_a_norm", part=part)
    yield from _stacked(name, target + "q_b_proj.weight", q_lora, part, [("q_b_proj", heads * (nope + rope), "rows")])
    yield TensorSpec(name + "kv_a_layernorm.weight", (latent,), BF16, target + "kv_a_norm", part=part)
    yield from _stacked(name, target + "kv_b", latent, part, [("kv_b_proj", heads * (nope + v_dim), "rows")])
    yield from _stacked(name, target + "o_proj.weight", heads * v_dim, part, [("o_proj", hidden, "cols")])


def _mlp(config: ModelConfig, name: str, target: str, width: int, part: str) -> Iterator[TensorSpec]:
    gate_up: list[tuple[str, int, str | None]] = [("gate_proj", width, "rows"), ("up_proj", width, "rows")]
    yield from _stacked(name, target + "gate_up.weight", config.hidden_size, part, gate_up)
    yield from _stacked(name, target + "down.weight", width, part, [("down_proj", config.hidden_size, "cols")])


def _moe(config: ModelConfig, name: str, target: str) -> Iterator[TensorSpec]:
    hidden, latent, experts = config.hidden_size, config.routed_expert_hidden_size, config.num_experts
    part = "MoE without routed experts"
    yield from _stacked(name, target + "router.gate.weight", hidden, part, [("gate", experts, None)])
    yield TensorSpec(name + "gate.e_score_correction_bias", (experts,), F32, target + "router.bias", part=part)
    yield from _stacked(name, target + "latent_down.weight", hidden, part, [("routed_expert_down_proj", latent, None)])
    yield TensorSpec(name + "routed_expert_norm.weight", (latent,), BF16, target + "latent_norm", part=part)
    yield from _stacked(name, target + "latent_up.weight", latent, part, [("routed_expert_up_proj", hidden, None)])
    shared_width = config.moe_intermediate_size * config.num_shared_experts
    yield from _mlp(config, name + "shared_experts.", target + "shared.", shared_width, part)


def _expert(config: ModelConfig, name: str, target: str, e: int) -> Iterator[TensorSpec]:
    latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
    # w1 is the gate and w3 the up matrix: together w13, gate rows first
    for matrix, stack, rows, cols, row in (
        ("w1", "w13", width, latent, 0),
        ("w3", "w13", width, latent, width),
        ("w2", "w2", latent, width, 0),
    ):
        for suffix, field, per_byte, dtype in EXPERT_TENSORS[config.expert_format]:
            yield TensorSpec(
                f"{name}{matrix}.{suffix}",
                (rows, cols // per_byte),
                dtype,
                f"{target}{stack}.{field}",
                row=row,
                expert=e,
                split="experts",
                part="routed experts",
            )


# by format: checkpoint suffix, field of ExpertWeights, input elements per stored value, dtype
EXPERT_TENSORS: dict[str, tuple[tuple[str, str, int, torch.dtype], ...]] = {
    "mxfp4": (("weight_packed", "data", 2, U8), ("weight_scale", "scale", MXFP4_GROUP, U8)),
    "bf16": (("weight", "data", 1, BF16),),
}
