"""Ids of the MLA cache blocks: which are free, and who owns the others. No tensors."""

from __future__ import annotations

from collections.abc import Sequence


class CacheAccountingError(RuntimeError):
    """An id was freed twice, freed by a stranger, lost, or owned twice: a bug in the engine, never a user's fault."""


class BlockPool:
    """Blocks 1..num_blocks. Block 0 is where padding points and is never handed out.

    Ids are handed out last-freed first, so a small working set stays in few blocks. Every call costs O(ids named).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._owner: list[str | None] = [None] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int, owner: str) -> list[int]:
        """Hand ``count`` blocks to ``owner``. The caller has asked ``num_free`` first: too few is an error."""
        if count > len(self._free):
            raise CacheAccountingError(f"{owner} asked for {count} blocks, {len(self._free)} are free")
        if count == 0:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        for block in blocks:
            self._owner[block] = owner
        return blocks

    def free(self, blocks: Sequence[int], owner: str) -> None:
        """Take blocks back. CacheAccountingError if ``owner`` does not own one of them; then nothing is freed."""
        for block in blocks:
            if not 1 <= block <= self.num_blocks or self._owner[block] != owner:
                holder = self._owner[block] if 1 <= block <= self.num_blocks else None
                raise CacheAccountingError(f"{owner} frees block {block}, which is owned by {holder}")
        if len(set(blocks)) != len(blocks):
            raise CacheAccountingError(f"{owner} frees a block twice: {list(blocks)}")
        for block in reversed(blocks):
            self._owner[block] = None
            self._free.append(block)

    def owner(self, block: int) -> str | None:
        return self._owner[block]

    def check(self) -> None:
        """Raise CacheAccountingError unless each block is either free or owned, exactly once. O(num_blocks)."""
        free = set(self._free)
        if len(free) != len(self._free) or 0 in free or self._owner[0] is not None:
            raise CacheAccountingError("a block is free twice, or block 0 was handed out")
        for block in range(1, self.num_blocks + 1):
            if (block in free) == (self._owner[block] is not None):
                raise CacheAccountingError(f"block {block}: free {block in free}, owner {self._owner[block]}")
