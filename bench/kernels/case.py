"""What a bench module hands to the framework: cases, and for each one the sides to time.

A module `bench_<family>.py` has one function `cases() -> Iterator[Case]`. It is called on machines without a GPU too
(`--list`), so a case only names itself; buffers are made by `Case.prepare`, which runs when the case is measured.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from bench.kernels.peer_kit import PeerKit
from kimi_kernels.testing.timing import Call, num_sets

T = TypeVar("T")


@dataclass
class Side:
    """One implementation of the operation: ours or a peer.

    calls       -> one closure per rotated buffer set. Called once, when the side is measured; a peer whose files are
                not packed raises `MissingPeerError` here (the kit's accessors do that), and is then quoted or left out.
    check       -> the relative error of one run against fp32 torch, outputs poisoned with NaN before the run. It runs
                after `calls` and before the timing. None: not checked, and the report says so.
    tolerance   what `check` may return at most.
    comparable  False when this side does less (or more) work than ours: listed, never the best peer of `ratio`.
    note        what it leaves out, in a few words ("recurrence only").
    quoted_us   its time from `quoted.py`, shown with its date when the side cannot run here.
    limit       ours must take at most this many times as long as this side, which does less; the report says both.
    """

    name: str
    calls: Callable[[], Sequence[Call]]
    check: Callable[[], float] | None = None
    tolerance: float = 5e-3
    comparable: bool = True
    note: str = ""
    quoted_us: float | None = None
    limit: float | None = None


@dataclass
class Prepared:
    """A case with its buffers made.

    read_bytes, write_bytes  the fewest bytes one call must read from and write to device memory.
    in_place                 True when what is written is what was read (a state): the balanced part of the traffic is
                             then held against the in-place ceiling instead of the copy ceiling.
    flops, matmul            useful operations, and the matrix rate they are held against ("bf16" or "fp8").
    set_bytes                what one buffer set holds, for the cold or warm mark; default read + write bytes.
    sustained                True for cases bound by arithmetic: warmed up for half a second, because the clock falls
                             under a lasting matrix load and a burst would flatter.
    """

    ours: Side
    peers: Sequence[Side]
    read_bytes: float
    write_bytes: float
    in_place: bool = False
    flops: float = 0.0
    matmul: str = "fp8"
    set_bytes: float | None = None
    sustained: bool = False


@dataclass(frozen=True)
class Case:
    """One row of a report.

    operation  the public name, as in `KIMI_KERNELS_REFERENCE`: "routing.topk", "kda.decode_".
    shape      what tells this row from the others, in the order to print: {"T": 8192, "E": 896}.
    group      neighbours with one group share what `Session.shared` made (weights repacked for a peer, say); it is
               released when the group changes.
    """

    operation: str
    shape: Mapping[str, int | str]
    prepare: Callable[[Session], Prepared] = field(compare=False)
    group: str = ""

    @property
    def family(self) -> str:
        return self.operation.partition(".")[0]

    @property
    def name(self) -> str:
        return f"{self.operation}[{','.join(f'{k}={v}' for k, v in self.shape.items())}]"


class Session:
    """What `prepare` gets: the device, the peers kit, seeded random numbers, and things shared within a group."""

    def __init__(self, device: torch.device, kit: PeerKit, seed: int = 20261129) -> None:
        self.device, self.kit, self.seed = device, kit, seed
        self._shared: dict[Any, Any] = {}

    def generator(self, *key: int | str) -> torch.Generator:
        """A generator that gives every run, process and peer the same numbers for the same key."""
        digest = zlib.crc32(repr((self.seed, *key)).encode())  # hash() of a string differs from process to process
        return torch.Generator(self.device).manual_seed(digest)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, key: object = "") -> Any:
        """Normal numbers of any shape on the device; the same for the same shape and key."""
        values = torch.randn(*shape, generator=self.generator("randn", repr((shape, key))), device=self.device)
        return values.mul_(scale).to(dtype)

    def num_sets(self, bytes_per_set: float, highest: int = 64) -> int:
        """How many buffer sets to rotate so that each has left L2 before it is used again."""
        return num_sets(bytes_per_set, highest=highest)

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """`make()`, once per key and group."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def release(self) -> None:
        """Drops everything `shared` holds and returns its memory to the device."""
        self._shared.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in the 2-norm, in fp64; inf when `got` holds a NaN or an infinity."""
    got, want = got.double(), want.double()
    error = ((got - want).norm() / want.norm().clamp_min(1e-300)).item()
    return error if torch.isfinite(got).all() else float("inf")
