"""The routed experts of K3 in one call: from ids and bf16 x to the weighted sum, dispatch and quantising included.

All experts on one GPU and an expert-parallel rank of eight. Every side gets the same seeded weights, inputs and
routings, uniform without repeats. A peer that does less than the whole is counted all the same, with a note: that
favours the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.kernels import quoted
from bench.kernels.case import Case, Prepared, Session, Side, relative_error
from kimi_kernels import moe
from kimi_kernels.reference.moe import h_as_fed

EXPERTS, TOP_K, LATENT, INTER = 896, 16, 3584, 3072
LOCAL = (EXPERTS, EXPERTS // 8)
PAIRS = (("mxfp4", "fp8"), ("fp8", "fp8"), ("mxfp4", "bf16"))
TOKENS = (1, 16, 64, 256, 1024, 8192)
CHECKED = 4  # tokens: up to 64 experts are written out in fp32
FP8 = torch.float8_e4m3fn
OUR_H = "our h"  # E4M3 with a power of two a row, as the kernels make it
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Inputs = tuple[Tensor, Tensor, Tensor]  # x, ids, weights
# Of the whole operation. FP8: a difference of 0.2% in h decides which way values round, and such a code is off by 6%.
TOLERANCE = {"fp8": 4e-2, "bf16": 6e-3}


def cases() -> Iterator[Case]:
    for fmt, activation in PAIRS:
        for local in LOCAL:
            for tokens in quoted.TOKENS if (fmt, activation) == PAIRS[0] else TOKENS:
                shape = {"w": fmt, "act": activation, "E": local, "T": tokens}
                prepared = partial(prepare, fmt, activation, local, tokens)
                yield Case("moe.experts", shape, prepared, group=f"moe-{fmt}-{activation}-{local}")


@dataclass
class Stacks:
    """Checkpoint weights, gate rows before up rows; the field names are those of the packed peers."""

    kind: str
    w1: Tensor  # mxfp4 [E, 2I, D/2] u8, fp8 [E, 2I, D] e4m3
    w2: Tensor
    s1: Tensor  # mxfp4 [E, 2I, D/32] u8, fp8 f32 a block of 128 x 128
    s2: Tensor

    @property
    def experts(self) -> int:
        return self.w1.shape[0]

    def packed(self) -> tuple[moe.ExpertWeights, moe.ExpertWeights]:
        (w1, w3), (s1, s3) = self.w1.chunk(2, 1), self.s1.chunk(2, 1)
        pack = moe.pack_mxfp4 if self.kind == "mxfp4" else moe.pack_fp8
        return pack(w1, s1, w3, s3, self.w2, self.s2)

    def exact(self, expert: int) -> tuple[Tensor, Tensor]:
        """Both matrices of an expert in fp32."""
        pair = ((self.w1[expert], self.s1[expert]), (self.w2[expert], self.s2[expert]))
        if self.kind == "fp8":
            return tuple(w.float() * s.repeat_interleave(128, 0).repeat_interleave(128, 1) for w, s in pair)
        table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=self.w1.device)

        def values(codes: Tensor, scale: Tensor) -> Tensor:
            pairs = torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], -1)
            return pairs.flatten(-2) * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)

        return values(*pair[0]), values(*pair[1])


def make_stacks(fmt: str, experts: int, session: Session) -> Stacks:
    """Random weights whose products stay near 1: every E2M1 code with scales 2^-9 .. 2^-7, or normal FP8 values."""
    g, device = session.generator("experts", fmt, experts), session.device

    def codes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.empty(experts, *shape, dtype=torch.uint8, device=device).random_(low, high, generator=g)

    def values(*shape: int) -> Tensor:
        made = torch.empty(experts, *shape, dtype=FP8, device=device)
        for expert in made:  # one at a time: the fp32 numbers of all would take 120 GB
            expert.copy_(torch.randn(*shape, device=device, generator=g).mul_(60).clamp_(-440, 440))
        return made

    def scales(rows: int, cols: int) -> Tensor:
        made = torch.rand(experts, rows // 128, cols // 128, device=device, generator=g)
        return made.add_(0.5).div_(60 * cols**0.5)

    wide, narrow = (2 * INTER, LATENT), (LATENT, INTER)
    if fmt == "fp8":
        return Stacks(fmt, values(*wide), values(*narrow), scales(*wide), scales(*narrow))
    made = [codes(rows, cols // 2) for rows, cols in (wide, narrow)]
    return Stacks(fmt, *made, *(codes(rows, cols // 32, low=118, high=121) for rows, cols in (wide, narrow)))


def routings(tokens: int, session: Session) -> list[Inputs]:
    """(x, ids, weights) of each rotated set; every set has an expert of the first rank."""
    g, device, sets = session.generator("routing", tokens), session.device, []
    while len(sets) < (16 if tokens <= 64 else 4 if tokens <= 1024 else 2):
        ids = torch.rand(tokens, EXPERTS, device=device, generator=g).topk(TOP_K).indices.int().contiguous()
        weights = torch.rand(tokens, TOP_K, device=device, generator=g) + 0.1
        x = torch.randn(tokens, LATENT, device=device, generator=g).bfloat16()
        if (ids < LOCAL[1]).any():
            sets.append((x, ids, weights / weights.sum(-1, keepdim=True)))
    return sets


def as_fed(x: Tensor, group: int | str | None) -> Tensor:
    """x as it enters a product: in bf16 (None), or in E4M3 with a scale per `group` columns or as "our h"."""
    if group is None:
        return x.bfloat16().float()
    if group == OUR_H:
        return h_as_fed(x.float())
    groups = x.float().view(x.shape[0], -1, group)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return ((groups / scales).clamp(-448, 448).to(FP8).float() * scales).view(x.shape)


def reference(stacks: Stacks, inputs: Inputs, x_group: int | None, h_group: int | str | None) -> Tensor:
    """The sum of the first CHECKED tokens in fp32, activations quantised as the side does it."""
    x, ids, weights = (part[:CHECKED] for part in inputs)
    fed, want = as_fed(x, x_group), torch.zeros(len(x), LATENT, device=x.device)
    for expert in ids[ids < stacks.experts].unique().tolist():
        w1, w2 = stacks.exact(expert)
        tokens, slots = torch.where(ids == expert)
        gate, up = (fed[tokens] @ w1.t()).chunk(2, 1)
        h = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        want.index_add_(0, tokens, (as_fed(h, h_group) @ w2.t()) * weights[tokens, slots, None])
    return want


@dataclass(frozen=True)
class Peer:
    """One of the packed peers: how it is made, the columns that share a scale, and for which batches it is meant."""

    name: str
    module: str
    make: Callable[[object, Stacks], object]
    x_group: int | None
    h_group: int | None
    least: int = 1
    most: int = 8192
    note: str = ""


def humming(activation: str, layout: str) -> Peer:
    group = (LATENT, INTER) if activation == "fp8" else (None, None)
    name = f"Humming {'W4A8' if activation == 'fp8' else 'W4A16'} {layout}"
    return Peer(name, "peers_moe", lambda kit, w: kit.Humming(w, act=activation, layout=layout), *group)


def peers_of(fmt: str, activation: str, local: int) -> list[Peer]:
    if fmt == "fp8":
        kit = "peers_moe_fp8"
        return [
            Peer("Triton fused_moe", kit, lambda kit, w: kit.TritonFp8(w), 128, 128),
            Peer("DeepGEMM masked", kit, lambda kit, w: kit.DeepGemmMasked(w), 128, 128, 1, 1024, "two products only"),
            Peer(
                "DeepGEMM contiguous", kit, lambda kit, w: kit.DeepGemmContiguous(w), 128, 128, 8192, 8192,
                "rows gathered and quantised before, no sum",
            ),
        ]  # fmt: skip
    found = [humming(activation, layout) for layout in (("indexed",) if local == EXPERTS else ("indexed", "grouped"))]
    if activation == "bf16":
        found.append(Peer("Marlin W4A16", "peers_moe", lambda kit, w: kit.Marlin(w), None, None))
    return found


def prepare(fmt: str, activation: str, local: int, tokens: int, session: Session) -> Prepared:
    stacks = session.shared("stacks", lambda: make_stacks(fmt, local, session))
    packed = session.shared("packed", stacks.packed)
    sets = session.shared(("sets", tokens), lambda: routings(tokens, session))
    out = torch.empty(tokens, LATENT, dtype=torch.bfloat16, device=session.device)
    size = moe.workspace_size(tokens, TOP_K, *packed, activation=activation)
    space = torch.empty(size, dtype=torch.uint8, device=session.device)

    def ours(inputs: Inputs) -> Tensor:
        options = {"activation": activation, "num_experts": EXPERTS, "out": out, "workspace": space}
        return moe.experts(*inputs, *packed, **options)

    def error(run: Callable[[], object], x_group: int | None, h_group: int | str | None) -> float:
        want = session.shared(("want", tokens, x_group, h_group), lambda: reference(stacks, sets[0], x_group, h_group))
        out.fill_(torch.nan)
        run()
        return relative_error(out[:CHECKED], want)

    def peer_side(peer: Peer) -> Side:
        bound = []

        def calls() -> list:
            kit = session.kit.module(peer.module)
            one = session.shared(peer.name, lambda: peer.make(kit, stacks))
            bound.extend(one.bind(*inputs, out) for inputs in sets)
            return [call.run for call in bound]

        def complete() -> None:
            bound[0].run()
            bound[0].finish()

        return Side(
            peer.name,
            calls,
            partial(error, complete, peer.x_group, peer.h_group),
            TOLERANCE[activation],
            note=peer.note,
            quoted_us=quoted.MOE.get((peer.name, local), {}).get(tokens),
        )

    groups = (LATENT, OUR_H) if activation == "fp8" else (None, None)
    local_ids = [ids[ids < local] for _, ids, _ in sets]
    hit = sum(ids.unique().numel() for ids in local_ids) / len(sets)
    pairs = sum(ids.numel() for ids in local_ids) / len(sets)
    expert_values = 3 * LATENT * INTER
    read = hit * expert_values * (17 / 32 if fmt == "mxfp4" else 1 + 4 / 128**2) + tokens * (2 * LATENT + 8 * TOP_K)
    return Prepared(
        Side(
            "ours",
            lambda: [partial(ours, inputs) for inputs in sets],
            partial(error, lambda: ours(sets[0]), *groups),
            TOLERANCE[activation],
        ),
        [peer_side(peer) for peer in peers_of(fmt, activation, local) if peer.least <= tokens <= peer.most],
        read_bytes=read,
        write_bytes=2 * tokens * LATENT,
        flops=pairs * 2 * expert_values,
        matmul=activation,
        sustained=tokens >= 8192,
    )
