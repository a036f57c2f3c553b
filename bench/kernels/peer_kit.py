"""Finds and loads the packed peers: other people's kernels, put into an ignored folder by `pack.py`.

The folder (default `.peers`) holds the kit's Python files and `kit/` with what `pack.py` made. Neither is part of this
repository: everything works without it, with fewer peers in the tables.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from pathlib import Path

# What a peer needs from the packed folder.
FILES = {
    "vLLM kernels": "_C_stable_libtorch.abi3.so.xz",
    "vLLM MoE and routing": "_moe_C_stable_libtorch.abi3.so.xz",
    "vLLM attn_res (Triton)": "vllm_attn_res.py",
    "vLLM fused_moe (Triton)": "vllm_fused_moe.py",
    "FlashKDA": "_flashkda_C.abi3.so.xz",
    "FlashMLA": "_flashmla_C.abi3.so.xz",
    "DeepGEMM": "deep_gemm.tar.xz",
    "fla": "fla_core-*.whl",
    "Humming": "humming_kernels-*.whl",
}


class MissingPeerError(RuntimeError):
    """A peer is not at hand: no kit, or a kit without its files."""


class PeerKit:
    """The kit in `folder`, or an empty one when the folder is None or holds nothing.

    `work` is where binaries are unpacked and where the peers' JIT caches go (default: `kit/unpacked` in the folder).
    """

    def __init__(self, folder: Path | None, work: Path | None = None) -> None:
        self.folder, self.work = folder, work

    @functools.cached_property
    def packed(self) -> dict[str, bool]:
        """Which peers are there, by name."""
        names: list[str] = []
        if self.folder is not None:
            manifest = self.folder / "kit" / "manifest.json"
            if manifest.is_file() and (self.folder / "peers.py").is_file():
                names = list(json.loads(manifest.read_text())["files"])
        return {peer: any(Path(n).match(pattern) for n in names) for peer, pattern in FILES.items()}

    def describe(self) -> str:
        """One line for lists and reports."""
        there = [name for name, found in self.packed.items() if found]
        missing = [name for name, found in self.packed.items() if not found]
        if not there:
            return f"none packed in {self.folder}" if self.folder else "none"
        return ", ".join(there) + (f" (not packed: {', '.join(missing)})" if missing else "")

    @functools.cached_property
    def _main(self) -> types.ModuleType:
        if not any(self.packed.values()):
            raise MissingPeerError(f"no packed peers in {self.folder}")
        assert self.folder is not None
        sys.path.insert(0, str(self.folder.resolve()))
        module = importlib.import_module("peers")
        module.load(self.folder / "kit", self.work)
        return module

    @property
    def peers(self) -> types.ModuleType:
        """The kit's main module, loaded; unpacking takes some seconds the first time."""
        return self._main

    def module(self, name: str) -> types.ModuleType:
        """Another module of the kit, such as `peers_moe`, `peers_moe_fp8`, `references`."""
        _ = self._main
        return importlib.import_module(name)

    @property
    def peers_moe(self) -> types.ModuleType:
        return self.module("peers_moe")

    @property
    def peers_moe_fp8(self) -> types.ModuleType:
        return self.module("peers_moe_fp8")

    def is_missing(self, error: Exception) -> bool:
        """Whether `error` says that a peer is not packed (the kit has an exception class of its own for that)."""
        kit_error = getattr(sys.modules.get("peers"), "PeerNotPackedError", MissingPeerError)
        return isinstance(error, (MissingPeerError, kit_error))
