"""``kimi-engine make-tiny DIR``: a small random checkpoint in the published format, with a byte-level tokenizer."""

from __future__ import annotations

import argparse
import base64
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import ModelConfig
from engine.weights.mapping import MXFP4_GROUP, TensorSpec, checkpoint_tensors

NUM_BYTES = 256  # ranks of the byte-level tokenizer
NUM_RESERVED = 256  # ids above the ranks, as in the published vocabulary

# K3's named ids as offsets from the first reserved one; True: dropped by skip_special_tokens
CONTROL_TOKENS: dict[int, tuple[str, bool]] = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    65: ("<osagent_mode>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}

E2M1_RMS = math.sqrt(68.5 / 8)  # of the eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, equally likely


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="where to write; made when absent")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    try:
        size = make(args.directory, seed=args.seed)
    except OSError as error:
        print(f"make-tiny: cannot write {args.directory}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"wrote a random checkpoint of {size / 1e6:.1f} MB to {args.directory}")
    return 0


def make(directory: Path, *, seed: int = 0, **text_overrides: Any) -> int:
    """Write config, two shards with index, tokenizer and generation config -> bytes of weights.

    ``text_overrides`` replace fields of text_config (a larger model for a load test, say).
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = config_dict(**text_overrides)
    _write_json(directory / "config.json", data)
    _write_json(directory / "generation_config.json", {"eos_token_id": data["eos_token_id"], "max_length": 2048})
    _write_tokenizer(directory)
    return _write_weights(directory, ModelConfig.from_dict(data), seed)


def config_dict(**text_overrides: Any) -> dict[str, Any]:
    """A nested config.json of the published form: five layers, the last two both MLA as in the published model."""
    first = NUM_BYTES
    ids = {"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": first + 255}
    layers = text_overrides.get("num_hidden_layers", 5)
    mla = sorted({*range(4, layers + 1, 4), layers})
    weights = {"num_bits": 4, "type": "float", "group_size": MXFP4_GROUP, "strategy": "group", "symmetric": True}
    weights |= {"dynamic": False, "scale_dtype": "torch.uint8"}
    group = {"format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None}
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "first_k_dense_replace": 1,
        "hidden_size": 256,
        "intermediate_size": 512,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "kda_layers": [i for i in range(1, layers + 1) if i not in mla],
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 2,
        "num_expert_group": 1,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_expert_hidden_size": 128,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": NUM_BYTES + NUM_RESERVED,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {**group, "targets": ["Linear"], "weights": weights}},
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        },
        **ids,
        **text_overrides,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "media_placeholder_token_id": first + 21,
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
        "vision_config": {"vt_num_hidden_layers": 0, "vt_hidden_size": 16},
    }


def _write_tokenizer(directory: Path) -> None:
    ranks = (f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(NUM_BYTES))
    (directory / "tiktoken.model").write_text("".join(ranks))
    table = {
        str(NUM_BYTES + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for offset, (name, special) in CONTROL_TOKENS.items()
    }
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    config = {"added_tokens_decoder": table, **names, "tokenizer_class": "TikTokenTokenizer"}
    _write_json(directory / "tokenizer_config.json", config)


def _write_weights(directory: Path, config: ModelConfig, seed: int) -> int:
    specs = list(checkpoint_tensors(config))
    sizes = [math.prod(s.shape) * s.dtype.itemsize for s in specs]
    half, done, first = sum(sizes) / 2, 0, 0
    while done < half:
        done += sizes[first]
        first += 1
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((specs[:first], specs[first:]), start=1):
        file = f"model-{number:05d}-of-000002.safetensors"
        tensors = {spec.name: _random(spec, config, generator) for spec in part}
        if number == 2:  # the image half, which a text engine has to skip
            tensors["vision_tower.encoder.final_layernorm.weight"] = torch.ones(16, dtype=torch.bfloat16)
            tensors["mm_projector.post_norm.weight"] = torch.ones(config.hidden_size, dtype=torch.bfloat16)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    return sum(sizes)


def _random(spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    """Scaled so that every product keeps the size of its input and logits have a standard deviation near 2."""
    name, shape = spec.name, spec.shape

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    if name.endswith(".weight_packed"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if name.endswith(".weight_scale"):
        exponent = round(math.log2(1 / (E2M1_RMS * math.sqrt(shape[-1] * MXFP4_GROUP))))
        return torch.randint(126 + exponent, 129 + exponent, shape, dtype=torch.uint8, generator=generator)
    if name.endswith("A_log"):  # one value a head, then zeros
        value = uniform(0.7, 3.0).log()
        value[config.kda_num_heads :] = 0
    elif name.endswith("dt_bias"):
        value = uniform(-3.0, 1.0)
    elif name.endswith("e_score_correction_bias"):
        value = uniform(-0.1, 0.1)
    elif len(shape) == 1:
        value = 1 + 0.1 * torch.randn(shape, generator=generator)
    elif name.endswith("conv1d.weight"):
        value = 0.5 * torch.randn(shape, generator=generator)
    else:
        gain = 2.0 if name.endswith("lm_head.weight") else 1.0
        columns = 1 if name.endswith("embed_tokens.weight") else shape[-1]
        value = torch.randn(shape, generator=generator) * (gain / math.sqrt(columns))
    return value.to(spec.dtype)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
