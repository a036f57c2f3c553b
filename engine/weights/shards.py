"""Reading safetensors shards straight into their final memory.

The file layout is 8 bytes of header length, a JSON header, then the tensors' bytes. The safetensors library maps the
whole file, and mapped pages count as this process' memory until it is closed: a shard read that way costs its size
twice. Here each tensor is read once, into the place where it stays.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
STAGING_BYTES = 64 << 20

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}


class CheckpointError(ValueError):
    """The checkpoint cannot be loaded. The message lists every problem found."""

    def __init__(self, where: Path, problems: list[str]) -> None:
        shown = [f"  - {p}" for p in problems[:200]]
        if len(problems) > len(shown):
            shown.append(f"  - and {len(problems) - len(shown)} more")
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"cannot load the checkpoint {where}: {count}", *shown]))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are: ``nbytes`` from ``offset`` of ``file``. ``dtype`` is the file's own name for it."""

    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the shards hold, from their headers alone."""

    tensors: dict[str, StoredTensor]
    shards: list[Path]  # in natural order
    unread: frozenset[str]  # names the index places in shards that could not be read


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts shard 2 before shard 10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name) if p]


def read_inventory(model_dir: Path, problems: list[str]) -> Inventory:
    """Read the headers of all shards; what is wrong with files is appended to ``problems``."""
    weight_map = _read_index(model_dir, problems)
    shards = [model_dir / name for name in sorted(set(weight_map.values()), key=natural_key)]
    if not weight_map and not problems:
        shards = [model_dir / SINGLE_FILE]
        if not shards[0].is_file():
            problems.append(f"neither {INDEX_FILE} nor {SINGLE_FILE} is there")
            shards = []
    tensors: dict[str, StoredTensor] = {}
    bad: set[str] = set()
    for shard in shards:
        try:
            found = read_header(shard)
        except (ValueError, OSError) as error:
            problems.append(f"{shard.name}: {error}")
            bad.add(shard.name)
            continue
        for name in sorted(found.keys() & tensors.keys()):
            problems.append(f"{name} is in two shards, {tensors[name].file.name} and {shard.name}")
        tensors.update(found)
    unread = frozenset(name for name, shard in weight_map.items() if shard in bad)
    return Inventory(tensors, [s for s in shards if s.name not in bad], unread)


def _read_index(model_dir: Path, problems: list[str]) -> dict[str, str]:
    path = model_dir / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        good = isinstance(weight_map, dict) and all(isinstance(v, str) and "/" not in v for v in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError):
        good = False
    if not good or not weight_map:
        problems.append(f"{INDEX_FILE} holds no weight_map of tensor names to shard file names")
        return {}
    return weight_map


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors of one shard by name. Raises ValueError saying what is wrong with the file."""
    if not file.is_file():
        raise ValueError("the shard file is missing")
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or 8 + length > size:
            raise ValueError(f"the file is truncated or no safetensors file ({size} bytes)")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: StoredTensor(
                    file, 8 + length + t["data_offsets"][0], t["data_offsets"][1] - t["data_offsets"][0],
                    tuple(t["shape"]), str(t["dtype"]),
                )
                for name, t in header.items()
            }  # fmt: skip
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the safetensors header cannot be read: {error}") from error
    end = max((t.offset + t.nbytes for t in tensors.values()), default=8 + length)
    if end != size:
        raise ValueError(f"the file is truncated or damaged: its header describes {end} bytes, it has {size}")
    for name, t in tensors.items():
        if t.dtype in DTYPES and t.nbytes != math.prod(t.shape) * DTYPES[t.dtype].itemsize:
            raise ValueError(f"{name} {list(t.shape)} {t.dtype} does not fit its {t.nbytes} bytes")
    return tensors


class ShardReader:
    """Copies stored tensors into memory on any device, one file open at a time."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._path: Path | None = None
        self._staging: torch.Tensor | None = None

    def read_into(self, stored: StoredTensor, out: torch.Tensor) -> None:
        """``out``: contiguous, of the stored dtype and size. On a GPU the bytes pass through a small pinned buffer."""
        if self._path != stored.file:
            self.close()
            self._file, self._path = FileIO(stored.file), stored.file
        assert self._file is not None
        self._file.seek(stored.offset)
        target = out.reshape(-1).view(torch.uint8)
        if target.device.type == "cpu":
            self._fill(target, stored.file)
            return
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        for piece in target.split(STAGING_BYTES):
            host = self._staging[: piece.numel()]
            self._fill(host, stored.file)
            piece.copy_(host)  # not asynchronous: the buffer is used again at once

    def _fill(self, host: torch.Tensor, path: Path) -> None:
        """Read as many bytes as ``host`` has, from where the file stands."""
        assert self._file is not None
        view = memoryview(host.numpy().data)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise CheckpointError(path, ["the file ended early while it was read"])
            done += count

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._path = None, None
