"""config.json is read strictly: every field is used, known to be without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ConfigError, ModelConfig
from tests.engine.published import published_config, tiny_config


def test_published_values() -> None:
    config = ModelConfig.from_dict(published_config())
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert len(config.kda_layers) == 69
    assert config.num_attn_res_blocks == 8
    assert config.kda_dim == 12288
    assert [config.is_moe(i) for i in (0, 1, 92)] == [False, True, True]
    assert config.expert_format == "mxfp4"
    assert config.eos_token_ids == (163586,)
    assert (config.rms_norm_eps, config.mla_norm_eps) == (1e-5, 1e-6)


def change(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, name = path.split(".")
    at = data
    for parent in parents:
        at = at[parent]
    if value is None:
        del at[name]
    else:
        at[name] = value
    return data


T, L = "text_config.", "text_config.linear_attn_config."
Q = T + "quantization_config."
W = Q + "config_groups.group_0.weights."


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_type", "kimi_k2"),
        ("tie_word_embeddings", True),
        ("sliding_window", 4096),
        (T + "hidden_act", "silu"),
        (T + "mla_use_nope", False),
        (T + "mla_use_output_gate", False),
        (T + "latent_moe_use_norm", False),
        (T + "moe_renormalize", False),
        (T + "moe_router_activation_func", "softmax"),
        (T + "moe_layer_freq", 2),
        (T + "topk_method", "greedy"),
        (T + "num_nextn_predict_layers", 1),
        (T + "tie_word_embeddings", True),
        (T + "dtype", "float16"),
        (T + "model_type", "deepseek_v3"),
        (T + "kv_lora_rank", 256),
        (T + "v_head_dim", 64),
        (T + "num_key_value_heads", 1),
        (T + "hidden_size", 200),
        (T + "moe_intermediate_size", 0),
        (T + "num_experts", "16"),
        (T + "num_experts_per_token", 17),
        (T + "num_expert_group", 3),
        (T + "topk_group", 2),
        (T + "rms_norm_eps", 0),
        (T + "first_k_dense_replace", 5),
        (T + "attention_bias", True),
        (T + "eos_token_id", 256),
        (L + "use_full_rank_gate", False),
        (L + "head_dim", 64),
        (L + "short_conv_kernel_size", 3),
        (L + "gate_lower_bound", 5.0),
        (L + "gate_lower_bound", 0),
        (L + "gate_lower_bound", -5.5),
        (L + "full_attn_layers", [2]),
        (L + "full_attn_layers", [3, 4]),
        (L + "kda_layers", [1, 2]),
        (L + "num_heads", 129),
        (L + "num_k_heads", 2),
        (Q + "quant_method", "fp8"),
        (Q + "format", "nvfp4-pack-quantized"),
        (Q + "kv_cache_scheme", {"num_bits": 8}),
        (Q + "weight_block_size", [128, 128]),
        (Q + "config_groups", {}),
        (Q + "config_groups.group_0.input_activations", {"num_bits": 8}),
        (W + "group_size", 16),
        (W + "num_bits", 8),
        (W + "symmetric", False),
        (W + "type", "int"),
    ],
)
def test_values_that_are_not_implemented_are_refused_by_name(path: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(change(tiny_config(), path, value))
    name = path.split(".")[-1]
    assert name in str(error.value) or name in ("group_0",)


@pytest.mark.parametrize("name", sorted(tiny_config()["text_config"]))
def test_a_missing_field_is_an_error_or_has_the_default_the_spec_names(name: str) -> None:
    data = change(tiny_config(), T + name, None)
    optional = {
        "activation_situ_beta": ("situ_beta", 1.0),
        "activation_situ_linear_beta": ("situ_linear_beta", None),
        "quantization_config": ("expert_format", "bf16"),
        "eos_token_id": ("eos_token_ids", (254,)),  # the top level has it too
    }
    no_effect = {"architectures", "bos_token_id", "pad_token_id", "initializer_range", "use_cache"}
    no_effect |= {"num_key_value_heads", "use_grouped_topk"}  # checked when there
    if name in optional:
        field, value = optional[name]
        assert getattr(ModelConfig.from_dict(data), field) == value
    elif name in no_effect:
        assert ModelConfig.from_dict(data) == ModelConfig.from_dict(tiny_config())
    else:
        with pytest.raises(ConfigError, match=name):
            ModelConfig.from_dict(data)


def test_more_blocks_than_the_mix_takes_are_refused() -> None:
    data = change(published_config(), T + "attn_res_block_size", 6)
    with pytest.raises(ConfigError, match="attn_res_block_size"):
        ModelConfig.from_dict(data)


def test_defaults_of_dumps_change_nothing() -> None:
    data = tiny_config()
    data["text_config"] |= {"rope_theta": 10000.0, "head_dim": 96, "rope_scaling": None, "transformers_version": "5"}
    assert ModelConfig.from_dict(data) == ModelConfig.from_dict(tiny_config())


def test_a_flat_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="no text_config"):
        ModelConfig.from_dict(tiny_config()["text_config"])


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ModelConfig.from_dir(tmp_path)
