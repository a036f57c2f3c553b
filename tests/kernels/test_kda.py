"""KDA: the chunk form, the one-token form and fp64 agree; slots, padding and layouts are kept."""

from __future__ import annotations

import pytest
import torch

from kimi_kernels import kda
from kimi_kernels.reference import kda as reference
from kimi_kernels.reference import kda_prefill
from kimi_kernels.testing.compare import assert_close, assert_equal, relative_error
from kimi_kernels.testing.shapes import BORDER_LENGTHS, MIXED_LENGTHS
from tests.kernels.golden import tiny_states, tiny_weights
from tests.kernels.kda_case import ATOL, DIM, RTOL, Case, cumulative, flags, int32, recurrence64

CLOSE = {"atol": ATOL, "rtol": RTOL}


def test_every_length_against_fp64_from_one_pass() -> None:
    """Prefill of 1..130 tokens ends in the state that fp64 has after as many."""
    case = Case(130, heads=1)
    want, _, _ = recurrence64(case, 0, 130, case.state[2], case.conv_state[2])
    for length in range(1, 131):
        pools = case.pools()
        out = case.prefill(pools, [2], [length])
        assert_close(f"out of {length}", out, want[:length], **CLOSE)
        if length in BORDER_LENGTHS:
            _, state, conv = recurrence64(case, 0, length, case.state[2], case.conv_state[2])
            assert_close(f"state after {length}", pools["state"][2], state, **CLOSE)
            assert_close(f"conv state after {length}", pools["conv_state"][2], conv, atol=0)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 200])
def test_chunk_form_and_one_token_form_share_the_axis_order(tokens: int) -> None:
    case = Case(tokens)
    chunked, stepped = case.pools(), case.pools()
    out = case.prefill(chunked, [3], [tokens])
    one_by_one = torch.cat([case.decode(stepped, [3], t) for t in range(tokens)])
    assert_close("out", out, one_by_one, **CLOSE)
    assert_close("state", chunked["state"], stepped["state"], **CLOSE)
    assert_equal("conv state", chunked["conv_state"], stepped["conv_state"])
    # the data has power: a transposed state is far off
    state = chunked["state"][3]
    assert relative_error(state.transpose(-1, -2), state) > 0.5


def test_mixed_lengths_equal_single_calls() -> None:
    lengths = list(MIXED_LENGTHS)
    case = Case(sum(lengths), slots=12)
    slots = [5, 1, 9, 2, 8, 3, 11, 7]
    fresh = [False, True, False, False, True, False, True, False]
    together = case.pools()
    out = case.prefill(together, slots, lengths, fresh=flags(fresh))
    start = 0
    for slot, length, is_fresh in zip(slots, lengths, fresh, strict=True):
        alone = case.pools()
        one = case.prefill(alone, [slot], [length], start=start, fresh=flags([is_fresh]))
        assert_close(f"out of slot {slot}", out[start : start + length], one, atol=1e-6, rtol=1e-6)
        assert_close(f"state {slot}", together["state"][slot], alone["state"][slot], atol=1e-6, rtol=1e-6)
        assert_equal(f"conv state {slot}", together["conv_state"][slot], alone["conv_state"][slot])
        start += length
    for slot in (0, 4, 6, 10):
        assert_equal("slot of nobody", together["state"][slot], case.state[slot])


def test_decode_batch_equals_single_rows() -> None:
    case = Case(6, slots=8)
    together, alone = case.pools(), case.pools()
    slots = [4, 7, 1, 3, 2, 6]
    out = case.decode(together, slots, 0)
    for row, slot in enumerate(slots):
        one = case.decode(alone, [slot], row)
        assert_close("out", out[row : row + 1], one, atol=1e-6, rtol=1e-6)
    assert_close("state", together["state"], alone["state"], atol=1e-6, rtol=1e-6)
    assert_equal("conv state", together["conv_state"], alone["conv_state"])


@pytest.mark.parametrize("cuts", [[1] * 40, [2, 38], [3, 33, 4], [16, 24], [33, 7], [39, 1], [1, 2, 3, 34]])
def test_pieces_equal_the_whole(cuts: list[int]) -> None:
    case = Case(40)
    whole, pieces = case.pools(), case.pools()
    want = case.prefill(whole, [1], [40], fresh=flags([True]))
    parts, start = [], 0
    for length in cuts:
        parts.append(case.prefill(pieces, [1], [length], start=start, fresh=flags([start == 0])))
        start += length
    assert_close("out", torch.cat(parts), want, **CLOSE)
    assert_close("state", pieces["state"], whole["state"], **CLOSE)
    assert_equal("conv state", pieces["conv_state"], whole["conv_state"])


def test_chunk_form_against_the_token_loop_of_the_reference() -> None:
    case = Case(77)
    x = reference.Inputs(**case.rows, **case.consts, lower_bound=-5.0, eps=1e-5)
    pools = [case.pools(), case.pools()]
    out = [
        kda_prefill.prefill(x, **p, slots=int32([2, 1]), cu_seqlens=cumulative([50, 27]), fresh=None, num_tokens=None,
                            exports=int32([0, 20, 3]).view(1, 3), by_token=by_token)
        for p, by_token in zip(pools, (False, True), strict=True)
    ]  # fmt: skip
    assert_close("out", out[0], out[1], **CLOSE)
    assert_close("state", pools[0]["state"], pools[1]["state"], **CLOSE)
    assert_equal("conv state", pools[0]["conv_state"], pools[1]["conv_state"])


@pytest.mark.parametrize("f", [-60.0, 60.0, "alternate"])
def test_gates_at_their_bounds(f: float | str) -> None:
    case = Case(130, heads=1)
    for value in (case.consts["dt_bias"], case.rows["f"]):
        value.zero_()
    sign = torch.where(torch.arange(130) % 2 == 0, 60.0, -60.0).unsqueeze(1) if f == "alternate" else f
    case.rows["f"] += sign
    pools = case.pools()
    out = case.prefill(pools, [1], [130])
    want, state, _ = recurrence64(case, 0, 130, case.state[1], case.conv_state[1])
    assert_close("out", out, want, **CLOSE)
    assert_close("state", pools["state"][1], state, **CLOSE)


@pytest.mark.parametrize("noise", [1e-3, 0.0])
@pytest.mark.parametrize("tokens", [16, 64, 200])
def test_near_collinear_keys(tokens: int, noise: float) -> None:
    """The triangular system is worst when keys repeat, writes are full and nothing decays."""
    case, random = Case(tokens, heads=1), Case(tokens, heads=1)
    key = case.rows["k"][:1].clone()
    case.rows["k"] = key + noise * case.rows["k"]
    case.conv_state[1, :, DIM : 2 * DIM] = key
    for c in (case, random):
        c.rows["beta"].fill_(8.0)
        c.rows["f"].fill_(-8.0)
        c.consts["dt_bias"].zero_()
        c.consts["a_log"].zero_()
    errors = []
    for c in (case, random):
        pools = c.pools()
        out = c.prefill(pools, [1], [tokens])
        want, state, _ = recurrence64(c, 0, tokens, c.state[1], c.conv_state[1])
        assert out.isfinite().all()
        errors.append(max(relative_error(out, want), relative_error(pools["state"][1], state)))
    # at most twice the error of random keys; 2e-6 is the floor of fp32 over so many tokens
    assert errors[0] <= max(2 * errors[1], 2e-6)


def test_write_strength_stays_fp32_over_2048_tokens() -> None:
    case = Case(2048, heads=1)
    pools = case.pools()
    case.prefill(pools, [1], [2048])
    _, want, _ = recurrence64(case, 0, 2048, case.state[1], case.conv_state[1])
    _, coarse, _ = recurrence64(
        case, 0, 2048, case.state[1], case.conv_state[1], beta_of=lambda raw: torch.sigmoid(raw.bfloat16())
    )
    ours, bf16 = relative_error(pools["state"][1], want), relative_error(coarse, want)
    assert bf16 > 1e-4  # the data has power: a bf16 sigmoid shows
    assert ours < 5e-6


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_gate_constants_are_indexed_by_head_and_channel(heads: int) -> None:
    case = Case(5, heads=heads)
    case.consts["a_log"][:heads] = torch.linspace(-1, 1, heads)
    case.consts["a_log"][heads:] = float("nan")  # only the first `heads` values count
    case.consts["dt_bias"] = torch.linspace(-3, 3, heads * DIM)
    pools = case.pools()
    out = case.prefill(pools, [1], [5])
    case.consts["a_log"][heads:] = 0
    want, state, _ = recurrence64(case, 0, 5, case.state[1], case.conv_state[1])
    assert_close("out", out, want, **CLOSE)
    assert_close("state", pools["state"][1], state, **CLOSE)

    # permuting heads permutes outputs
    order = torch.randperm(heads, generator=torch.Generator().manual_seed(1))
    other = Case(5, heads=heads)

    def by_head(value: torch.Tensor, dim: int, groups: int = 1) -> torch.Tensor:
        return value.unflatten(dim, (groups, heads, -1)).index_select(dim % value.ndim + 1, order).flatten(dim, dim + 2)

    other.rows = {n: v[:, order] if n == "beta" else by_head(v, 1) for n, v in case.rows.items()}
    other.consts = dict(case.consts)
    other.consts["a_log"] = torch.cat([case.consts["a_log"][:heads][order], case.consts["a_log"][heads:]])
    other.consts["dt_bias"] = by_head(case.consts["dt_bias"], 0)
    other.consts["conv_weight"] = by_head(case.consts["conv_weight"], 0, groups=3)
    other.state = case.state[:, order].clone()
    other.conv_state = by_head(case.conv_state, 2, groups=3)
    permuted = other.prefill(other.pools(), [1], [5])
    assert_close("permuted heads", permuted, by_head(out, 1), atol=1e-6, rtol=1e-6)


def test_published_head_count() -> None:
    case = Case(2, heads=96, slots=2)
    pools = case.pools()
    out = torch.cat([case.decode(pools, [1], 0), case.decode(pools, [1], 1)])
    want, _, _ = recurrence64(case, 0, 2, case.state[1], case.conv_state[1])
    assert_close("out", out, want, **CLOSE)


def test_bf16_rounds_only_the_output() -> None:
    """Everything between the bf16 inputs and the bf16 output is fp32, the convolution's result included."""
    case = Case(33, dtype=torch.bfloat16)
    pools = case.pools()
    out = case.prefill(pools, [1], [33])
    assert out.dtype == torch.bfloat16
    exact = case.pools()
    stepped = torch.cat([case.decode(exact, [1], t) for t in range(33)])
    assert_close("out", out, stepped, atol=1e-5, rtol=2**-7)  # a unit: fp32 noise may turn one rounding
    assert_close("state", pools["state"], exact["state"], **CLOSE)
    assert_equal("conv state", pools["conv_state"], exact["conv_state"])
    _, state, _ = recurrence64(case, 0, 33, case.state[1], case.conv_state[1])
    # rounding q, k, v to 2^-9 anywhere would move the state by about as much; fp32 alone moves it by 1e-6
    assert relative_error(pools["state"][1], state) < 1e-5


def test_golden_layer() -> None:
    states, weights = tiny_states(), tiny_weights()
    name = "model.layers.1.self_attn."
    x = states["layer1.attn_mix"]
    x = (
        x
        * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        * weights["model.layers.1.input_layernorm.weight"].float()
    )
    proj = {part: x @ weights[f"{name}{part}_proj.weight"].float().T for part in ("q", "k", "v", "g", "b", "f_a")}
    conv = torch.cat([weights[f"{name}{part}_conv1d.weight"][:, 0] for part in "qkv"])
    state, conv_state = torch.full((2, 2, DIM, DIM), float("nan")), torch.full((2, 3, 768), float("nan"))
    out = kda.prefill_(
        proj["q"], proj["k"], proj["v"], states["layer1.kda.f"].flatten(1), proj["b"], proj["g"], conv,
        weights[name + "A_log"], weights[name + "dt_bias"], weights[name + "o_norm.weight"], state, conv_state,
        int32([1]), int32([0, 7]), fresh=flags([True]),
    )  # fmt: skip
    assert_close("state", state[1], states["layer1.kda.state_vk"], atol=2e-5)
    assert_close("conv state", conv_state[1], states["layer1.kda.conv_state"], atol=2e-5)
    assert_close("out", out @ weights[name + "o_proj.weight"].float().T, states["layer1.attn_out"], atol=5e-5)
