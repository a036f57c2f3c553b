"""Number formats: MXFP4 and FP8 weights, FP8 and MXFP8 activations (K3 spec section 9; OCP microscaling 1.0)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
# A group whose largest magnitude is below this is scaled as if it were this: 1 / scale is finite, zeros stay zero.
MIN_AMAX = 1e-10


@functools.cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """[256] f64 whose bits are two f32: the E2M1 values of a byte, low nibble first. One look-up moves both."""
    magnitude = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nibble = torch.cat([magnitude, -magnitude])  # bit 3 is the sign; -0 is kept
    byte = torch.arange(256)
    return torch.stack([nibble[byte & 15], nibble[byte >> 4]], dim=1).view(torch.float64).flatten().to(device)


@functools.cache
def _e8m0_values(device: torch.device) -> torch.Tensor:
    """[256] f32: 2^(byte - 127); 255 is not a number."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    values[255] = float("nan")
    return values.to(device)


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [...] -> f32 [...]."""
    return _e8m0_values(scale.device).index_select(0, scale.flatten().int()).view(scale.shape)


def mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """packed uint8 [N, K/2], scale uint8 [N, K/32] -> f32 [N, K], exact (also in bf16)."""
    rows, half = packed.shape
    pairs = _e2m1_pairs(packed.device).index_select(0, packed.flatten().int())  # [N*K/2]
    values = pairs.view(torch.float32).view(rows, half // 16, 32)
    return values.mul_(e8m0(scale).unsqueeze(-1)).view(rows, 2 * half)


def fp8_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """values e4m3 [N, K], scale f32 [ceil(N/128), ceil(K/128)] -> f32 [N, K]."""
    rows, cols = values.shape
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return values.float() * spread


def fp8_per_token_group(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (e4m3 [T, K], f32 scales [T, ceil(K/group)]): scale = amax / 448, value = e4m3(x * (1 / scale))."""
    tokens, cols = x.shape
    groups = -(-cols // group)
    padded = F.pad(x.float(), (0, groups * group - cols)).view(tokens, groups, group)
    amax = padded.abs().amax(-1).clamp(min=MIN_AMAX)  # [T, groups]
    scale = amax / torch.full_like(amax, E4M3_MAX)  # by a number torch multiplies with its inverse on CUDA: one ulp off
    scaled = (padded * scale.reciprocal().unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.flatten(1)[:, :cols].to(torch.float8_e4m3fn), scale


def fp8_groups_dequant(values: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Inverse of fp8_per_token_group: e4m3 [T, K], f32 [T, ceil(K/group)] -> f32 [T, K]."""
    return values.float() * scale.repeat_interleave(group, 1)[:, : values.shape[1]]


def e4m3_exponent(amax: torch.Tensor) -> torch.Tensor:
    """f32 -> int32: the smallest e >= -127 with amax <= 448 * 2^e; 128 where amax is not finite."""
    # amax = m * 2^e with 0.5 <= m < 1, and 448 = 0.875 * 2^9: one more power when m is over 0.875.
    mantissa, exponent = torch.frexp(amax)
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(-127, 127)
    return torch.where(amax.isfinite(), torch.where(amax == 0, -127, exponent), 128)


def times_power(x: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    """x * 2^power in two factors, each a normal number: 2^127 over a denormal would not fit one."""
    half = power.div(2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(x, half), power - half)


def mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (e4m3 [T, K], E8M0 uint8 [T, K/32]): the smallest power of two that keeps amax within 448."""
    grouped = x.float().unflatten(-1, (-1, 32))
    exponent = e4m3_exponent(grouped.abs().amax(-1))  # [T, K/32]
    scaled = times_power(grouped, -exponent.unsqueeze(-1))
    return scaled.flatten(-2).to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)
