"""Every layer's inner values for the seven-token prompt, against states_prompt_7.safetensors.

Sublayers are nn.Modules, so torch's forward hooks see what passes between them; the model carries no code for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.model.layers.linear import Linear
from engine.model.layers.moe import MoE
from engine.runner.runner import Runner
from tests.engine.drive import TINY, expected, logits, request, tiny_runner

# Of a tensor's largest value: an error of a sum goes with its terms, not with what is left of them. After up to eight
# sublayers in fp32, orders of summation that are equally right (the matrix libraries' paths for different processors)
# lie up to 5e-6 apart; a wrong operation shows from 1e-3 on.
TOLERANCE = 2e-5


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE * float(want.abs().max()), rtol=0)


@pytest.fixture(scope="module", params=[7, 1, 3], ids=["whole", "ones", "threes"])
def run(request: pytest.FixtureRequest) -> tuple[Runner, dict[str, Any], Any]:
    return recorded(request.param)


def recorded(chunk: int) -> tuple[Runner, dict[str, Any], Any]:
    """(runner, outputs by module name, concatenated over the chunks, the request)."""
    runner = tiny_runner()
    seen: dict[str, list[Any]] = {}

    def hook(name: str) -> Any:
        return lambda module, args, output: seen.setdefault(name, []).append(
            tuple(t.clone() for t in output) if isinstance(output, tuple) else output.clone()
        )

    for name, module in runner.model.named_modules():
        module.register_forward_hook(hook(name))
    r = request("a", expected()["prompt_7.ids"].tolist(), 3, runner)
    for start in range(0, 7, chunk):
        logits(runner, [(r, min(chunk, 7 - start))])
    outputs: dict[str, Any] = {}
    for name, parts in seen.items():
        if isinstance(parts[0], tuple):
            outputs[name] = tuple(torch.cat(p) for p in zip(*parts, strict=True))
        else:
            outputs[name] = torch.cat(parts)
    return runner, outputs, r


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()


def test_hidden_states_layer_by_layer(run: tuple[Runner, dict[str, Any], Any]) -> None:
    runner, seen, _ = run
    want = load_file(TINY / "states_prompt_7.safetensors")
    for i, layer in enumerate(runner.model.layers):
        name = f"layers.{i}"
        # the recorded mix stands before the sublayer's norm, ours behind it
        close(seen[f"{name}.attn_res"][1], rms(want[f"layer{i}.attn_mix"], layer.attn_res.out_norm))
        close(seen[f"{name}.attn"], want[f"layer{i}.attn_out"])
        close(seen[f"{name}.mlp_res"][0], want[f"layer{i}.partial_after_attn"])
        close(seen[f"{name}.mlp_res"][1], rms(want[f"layer{i}.mlp_mix"], layer.mlp_res.out_norm))
        close(seen[f"{name}.mlp"], want[f"layer{i}.mlp_out"])
        close(seen[f"{name}.mlp_res"][0] + seen[f"{name}.mlp"], want[f"layer{i}.out_partial"])
    close(seen["layers.0.attn_res"][0], want["embed"])
    close(seen["output_res"][1], want["final_norm"])


def test_routing_and_shared_experts(run: tuple[Runner, dict[str, Any], Any]) -> None:
    runner, seen, _ = run
    want = load_file(TINY / "states_prompt_7.safetensors")
    layers = [i for i, layer in enumerate(runner.model.layers) if isinstance(layer.mlp, MoE)]
    assert layers == [1, 2, 3]
    for i in layers:
        close(seen[f"layers.{i}.mlp.router.gate"], want[f"layer{i}.router_logits"])
        close(seen[f"layers.{i}.mlp.shared"], want[f"layer{i}.shared_out"])
        ids, weights = seen[f"layers.{i}.mlp.router"]
        dense = torch.zeros(7, 16).scatter(1, ids.long(), weights)
        order = want[f"layer{i}.topk_ids"].long()
        close(dense, torch.zeros(7, 16).scatter(1, order, want[f"layer{i}.topk_weights"]))


def test_kda_state_conv_state_and_mla_cache(run: tuple[Runner, dict[str, Any], Any]) -> None:
    runner, seen, r = run
    want = load_file(TINY / "states_prompt_7.safetensors")
    index = runner.model_config.kda_layers.index(1)
    close(runner.state.kda_state[r.slot, index], want["layer1.kda.state_vk"])
    close(runner.state.conv_state[r.slot, index], want["layer1.kda.conv_state"])
    close(seen["layers.1.attn.f_b_proj"], want["layer1.kda.f"].flatten(1))
    close(seen["layers.1.attn.in_proj"][:, 4 * 256 + 128 :][:, :2], want["layer1.kda.b"])
    block_size = runner.engine_config.block_size
    rows = torch.stack([runner.state.mla_cache[0, r.block_table[p // block_size], p % block_size] for p in range(7)])
    close(rows[:, :512], want["layer2.mla.cache_latent"])
    close(rows[:, 512:], want["layer2.mla.cache_k_pe"])


def test_hooks_see_every_matrix(run: tuple[Runner, dict[str, Any], Any]) -> None:
    """Otherwise a silently bypassed layer would leave the comparisons above looking complete."""
    runner, seen, _ = run
    assert {n for n, m in runner.model.named_modules() if isinstance(m, Linear)} <= set(seen)
