"""Ids of the KDA state slots (recurrent and conv state of one sequence): free or owned. No tensors."""

from __future__ import annotations

from engine.cache.block_pool import CacheAccountingError


class StatePool:
    """Slots 1..num_slots. Slot 0 is where padding points and is never handed out."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._owner: list[str | None] = [None] * (num_slots + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def allocate(self, owner: str) -> int:
        """Hand one slot to ``owner``. Its content is the previous tenant's: the first chunk must run as fresh."""
        if not self._free:
            raise CacheAccountingError(f"{owner} asked for a slot, none is free")
        slot = self._free.pop()
        self._owner[slot] = owner
        return slot

    def free(self, slot: int, owner: str) -> None:
        """Take a slot back. CacheAccountingError if ``owner`` does not own it."""
        holder = self._owner[slot] if 1 <= slot <= self.num_slots else None
        if holder != owner:
            raise CacheAccountingError(f"{owner} frees slot {slot}, which is owned by {holder}")
        self._owner[slot] = None
        self._free.append(slot)

    def owner(self, slot: int) -> str | None:
        return self._owner[slot]

    def check(self) -> None:
        """Raise CacheAccountingError unless each slot is either free or owned, exactly once. O(num_slots)."""
        free = set(self._free)
        if len(free) != len(self._free) or 0 in free or self._owner[0] is not None:
            raise CacheAccountingError("a slot is free twice, or slot 0 was handed out")
        for slot in range(1, self.num_slots + 1):
            if (slot in free) == (self._owner[slot] is not None):
                raise CacheAccountingError(f"slot {slot}: free {slot in free}, owner {self._owner[slot]}")
