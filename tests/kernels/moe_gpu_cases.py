"""Random experts on the GPU, one call taken apart into its stages, and what each stage should have given.

The stages lie in the workspace as csrc/moe/params.h says: x and h as "blobs", for each tile and block of 128 columns
the rows one after the other, columns in the order in which wgmma takes them, 16-byte pieces swizzled; FP8 scales, one
a row, apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kimi_kernels import _moe_cuda, moe, routing
from kimi_kernels.reference import moe as reference
from kimi_kernels.reference.expert_weights import ExpertWeights, plain

DEVICE = "cuda"
PAIRS = [("mxfp4", "fp8"), ("mxfp4", "bf16"), ("fp8", "fp8"), ("fp8", "bf16")]


@dataclass
class Experts:
    """Weights of one format in the checkpoint's form and packed."""

    fmt: str
    num_experts: int
    inner: int
    width: int
    seed: int = 0
    scales: tuple[int, int] = (118, 121)  # E8M0 bytes from .. below
    raw: tuple[torch.Tensor, ...] = field(init=False)
    plain: tuple[ExpertWeights, ExpertWeights] = field(init=False)
    packed: tuple[ExpertWeights, ExpertWeights] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator(DEVICE).manual_seed(self.seed)
        shapes = [(self.inner, self.width), (self.inner, self.width), (self.width, self.inner)]
        self.raw = tuple(t for shape in shapes for t in self._matrix(g, *shape))
        self.pack()

    def pack(self) -> None:
        self.plain = plain(self.fmt, *self.raw)
        self.packed = (moe.pack_mxfp4 if self.fmt == "mxfp4" else moe.pack_fp8)(*self.raw)

    def _matrix(self, g: torch.Generator, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        e = self.num_experts
        if self.fmt == "mxfp4":
            data = torch.empty(e, rows, cols // 2, dtype=torch.uint8, device=DEVICE).random_(0, 256, generator=g)
            scale = torch.empty(e, rows, cols // 32, dtype=torch.uint8, device=DEVICE)
            return data, scale.random_(*self.scales, generator=g)
        values = (torch.randn(e, rows, cols, device=DEVICE, generator=g) * 60).clamp(-440, 440)
        scale = torch.rand(e, -(-rows // 128), -(-cols // 128), device=DEVICE, generator=g) + 0.5
        return values.to(torch.float8_e4m3fn), scale / 60 / cols**0.5

    def dense(self, which: int, expert: int) -> torch.Tensor:
        """w13 (0) or w2 (1) of an expert, fp64."""
        return reference.weight(self.plain[which], expert).double()


@dataclass
class Call:
    """One call on poisoned memory, and its stages."""

    experts: Experts
    x: torch.Tensor
    ids: torch.Tensor
    activation: str
    dispatch: routing.Dispatch = field(init=False)
    plan: dict = field(init=False)
    workspace: torch.Tensor = field(init=False)
    first_product: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        e, pairs = self.experts, self.ids.numel()
        self.plan = _moe_cuda.plan(
            *self.ids.shape, e.num_experts, e.num_experts, e.width, e.inner, e.fmt, self.activation
        )
        tiles = self.plan["piece_rows"]
        self.dispatch = routing.dispatch(self.ids, e.num_experts, tile_tokens=tiles)
        nan = float("nan")
        self.first_product = torch.full((pairs, 2 * e.inner), nan, dtype=torch.bfloat16, device=DEVICE)
        # the largest exponent of E4M3, bf16 and f32 alike: whatever is read without having been written is NaN
        self.workspace = torch.full((self.plan["workspace_bytes"],), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.rows = moe.expert_rows(
            self.x, self.dispatch, *e.packed, activation=self.activation,
            first_product=self.first_product, workspace=self.workspace,
        )  # fmt: skip

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """(expert, first row of the sorted pairs, rows, first row of the padded numbering)."""
        most, found = self.plan["piece_rows"], []
        for expert, row, count in self.dispatch.tiles[: int(self.dispatch.num_tiles)].tolist():
            padded = -(-row // 8) * 8 + 8 * expert
            found += [(expert, row + i, min(most, count - i), padded + i) for i in range(0, count, most)]
        return found

    def hidden(self, piece: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """h of a piece as it enters the second product: values f64 [rows, I], and the FP8 codes (or bf16 values)."""
        return self._blob(self.plan["hidden"], self.experts.inner, piece)

    def _blob(self, start: int, cols: int, piece: tuple[int, int, int, int]):
        _, _, count, padded_row = piece
        n, blocks = -(-count // 8) * 8, -(-cols // 128)
        size = blocks * (256 if self.activation == "bf16" else 128)
        blob = self.workspace[start + padded_row * size :][: n * size].view(blocks, -1)
        halves = 2 if self.activation == "bf16" else 1
        data = blob.reshape(blocks, halves, n, 8, 16)
        chunk = torch.arange(8, device=DEVICE)[None] ^ (torch.arange(n, device=DEVICE) % 8)[:, None]
        data = data.gather(3, chunk[None, None, :, :, None].expand(blocks, halves, n, 8, 16))
        position = stored_positions(self.activation)
        if self.activation == "bf16":
            values = data.reshape(blocks, 2, n, 128).contiguous().view(torch.bfloat16)
            values = values.permute(2, 0, 1, 3).reshape(n, blocks, 128)[:, :, position].reshape(n, -1)[:count, :cols]
            return values.double(), values
        codes = data.reshape(blocks, n, 128)[:, :, position].permute(1, 0, 2).reshape(n, -1)[:count, :cols]
        codes = codes.contiguous()
        scale = self.workspace[self.plan["scales"] + 4 * padded_row :][: 4 * count].view(torch.float32)  # of h by now
        return codes.view(torch.float8_e4m3fn).double() * scale.double()[:, None], codes


def stored_positions(activation: str) -> torch.Tensor:
    """[128]: where a column of a block lies."""
    where = []
    for column in range(128):
        half, c = divmod(column, 64)
        t, step, four, n = c >> 4, (c >> 3) & 1, (c >> 2) & 1, c & 3
        if activation == "fp8":
            where.append(64 * half + 32 * step + 16 * four + 4 * t + n)
        else:
            where.append(64 * half + 16 * (2 * step + four) + 8 * (n & 1) + 2 * t + (n >> 1))
    return torch.tensor(where, device=DEVICE)


def as_fed(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x as it enters the first product, fp64. On the CPU: on the GPU torch divides by 448 inexactly."""
    if activation == "bf16":
        return x.double()
    return reference.x_as_fed(x.cpu()).double().to(x.device)


def situ64(gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> torch.Tensor:
    gate, up = gate.double(), up.double()
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def tokens(count: int, width: int, seed: int = 1, scale: float = 1.0) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(count, width, device=DEVICE, generator=g) * scale).bfloat16()


def uniform(count: int, num_experts: int, k: int, seed: int = 2) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.rand(count, num_experts, device=DEVICE, generator=g).topk(k).indices.int()


def skewed(count: int, num_experts: int, k: int, seed: int = 3) -> torch.Tensor:
    """Expert 0 is every token's first choice; some other choices are -1."""
    ids = uniform(count, num_experts, k, seed)
    ids[:, 0] = 0
    ids[:, 1:][ids[:, 1:] == 0] = -1
    return ids


def single(count: int, num_experts: int, k: int) -> torch.Tensor:
    """Every token's first choice is the last expert, the others are -1."""
    ids = torch.full((count, k), -1, dtype=torch.int32, device=DEVICE)
    ids[:, 0] = num_experts - 1
    return ids


def weights_of(ids: torch.Tensor, seed: int = 4) -> torch.Tensor:
    """Random routing weights; NaN where nothing is chosen."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.rand(ids.shape, device=DEVICE, generator=g).masked_fill_(ids < 0, float("nan"))
