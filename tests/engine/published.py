"""The published config.json, written out from the architecture page's table (no weights are needed to test shapes)."""

from __future__ import annotations

import copy
import json
from typing import Any

from tests.engine.drive import TINY


def published_config() -> dict[str, Any]:
    """The tiny config with every dimension replaced by the published one."""
    data = json.loads((TINY / "config.json").read_text())
    mla = [*range(4, 93, 4), 93]
    data["text_config"] |= {
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "vocab_size": 163840,
        "intermediate_size": 33792,
        "attn_res_block_size": 12,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 3584,
        "moe_intermediate_size": 3072,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
    }
    data["text_config"]["linear_attn_config"] |= {
        "num_heads": 96,
        "full_attn_layers": mla,
        "kda_layers": [i for i in range(1, 94) if i not in mla],
    }
    return data | {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}


def tiny_config() -> dict[str, Any]:
    return copy.deepcopy(json.loads((TINY / "config.json").read_text()))
