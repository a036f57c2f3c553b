"""Which config.json fields the engine knows, and how one is taken: used, demanded, without effect, or an error."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """The config is not one this engine can run. The message names the field, what is needed and what was found."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that do not change the text forward pass. ``rope_theta`` and ``head_dim`` are class defaults that show up in
# dumps (nothing rotates, heads are sized by the linear_attn_config and the q/k/v dims); the image half is not loaded.
NO_EFFECT_TOP = _words("""
    architectures auto_map bos_token_id pad_token_id ignore_index image_placeholder media_placeholder_token_id
    video_placeholder vision_config encoder_only use_unified_vision_chunk use_cache initializer_range id2label label2id
    transformers_version _name_or_path
""")
NO_EFFECT_TEXT = _words("""
    architectures auto_map bos_token_id pad_token_id initializer_range use_cache transformers_version _name_or_path
    rope_theta rope_scaling rope_parameters head_dim attention_dropout output_attentions output_hidden_states
    return_dict torchscript problem_type id2label label2id chunk_size_feed_forward is_encoder_decoder is_decoder
    cross_attention_hidden_size _attn_implementation aux_loss_alpha router_aux_loss_coef seq_aux pretraining_tp
    ep_size model_max_length
""")

# The value each of these must have: the code implements no other.
REQUIRED_TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
REQUIRED_LINEAR: dict[str, Any] = {"head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True}

# What must stand in quantization_config; its remaining fields describe how the weights were made, not how to read them.
REQUIRED_QUANT: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
REQUIRED_QUANT_WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
NO_EFFECT_QUANT = frozenset({"ignore", "global_compression_ratio", "quantization_status", "version", "sparsity_config"})
NO_EFFECT_QUANT_WEIGHTS = frozenset(
    {"actorder", "block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
)


class Fields:
    """A JSON object whose fields are taken one by one; ``finish`` refuses what nobody took."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise ConfigError(f"{where.rstrip('.')} must be a JSON object, got {data!r}")
        self.where, self.data, self.left = where, data, set(data)

    def take(self, name: str) -> Any:
        if name not in self.data:
            raise ConfigError(f"{self.where}{name} is missing")
        self.left.discard(name)
        return self.data[name]

    def demand(self, name: str, value: Any, *, optional: bool = False) -> None:
        if optional and name not in self.data:
            return
        got = self.take(name)
        if got != value or isinstance(got, bool) != isinstance(value, bool):
            raise ConfigError(f"{self.where}{name} must be {value!r} (nothing else is implemented), got {got!r}")

    def integer(self, name: str, low: int = 1, high: int = 2**31 - 1, *, multiple: int = 1) -> int:
        got = self.take(name)
        if isinstance(got, bool) or not isinstance(got, int) or not low <= got <= high or got % multiple:
            step = f" and a multiple of {multiple}" if multiple > 1 else ""
            raise ConfigError(f"{self.where}{name} must be an integer in [{low}, {high}]{step}, got {got!r}")
        return got

    def number(self, name: str, *, positive: bool = True) -> float:
        got = self.take(name)
        if isinstance(got, bool) or not isinstance(got, (int, float)) or not abs(got) < 1e9 or (positive and got <= 0):
            raise ConfigError(f"{self.where}{name} must be a {'positive ' if positive else ''}number, got {got!r}")
        return float(got)

    def optional_number(self, name: str) -> float | None:
        if self.data.get(name) is None:
            self.left.discard(name)
            return None
        return self.number(name)

    def token_ids(self, name: str, *, optional: bool = False) -> tuple[int, ...]:
        if optional and self.data.get(name) is None:
            self.left.discard(name)
            return ()
        got = self.take(name)
        ids = got if isinstance(got, list) else [got]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ConfigError(f"{self.where}{name} must be a token id or a list of them, got {got!r}")
        return tuple(ids)

    def finish(self, no_effect: frozenset[str]) -> None:
        unknown = sorted(self.left - no_effect)
        if unknown:
            raise ConfigError(
                f"unknown field {', '.join(self.where + name for name in unknown)}: neither used by this engine "
                "nor known to be without effect"
            )


def demand_dtype(fields: Fields, *, optional: bool) -> None:
    # transformers renamed torch_dtype to dtype; published dumps carry either
    name = "torch_dtype" if "torch_dtype" in fields.data and "dtype" not in fields.data else "dtype"
    fields.demand("torch_dtype", "bfloat16", optional=True)
    fields.demand(name, "bfloat16", optional=optional)
