"""The two memories of a sequence behind one admission rule: MLA blocks that grow, one KDA slot of fixed size.

A request holds both or neither. The manager alone writes ``Request.block_table`` and ``Request.slot``. A prefix cache
belongs here: ``admit`` is where cached blocks and a state checkpoint would be found, ``release`` where they are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.block_pool import BlockPool, CacheAccountingError
from engine.cache.state_pool import StatePool
from engine.types import Request


class CacheManager:
    """Hands out blocks and slots to requests. Pure accounting over ids."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.block_size = block_size
        self.blocks = BlockPool(num_blocks)
        self.slots = StatePool(num_slots)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return self.blocks.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_admit(self, num_tokens: int, reserve: int = 0) -> bool:
        """Whether a sequence of ``num_tokens`` fits into both memories and leaves ``reserve`` blocks free."""
        return self.slots.num_free > 0 and self.blocks.num_free - reserve >= self.blocks_for(num_tokens)

    def admit(self, request: Request) -> None:
        """Give a request its slot and the blocks of all tokens it has so far. The caller has asked ``can_admit``."""
        if request.slot or request.block_table:
            raise CacheAccountingError(f"{request.request_id} already holds memory")
        blocks = self.blocks.allocate(self.blocks_for(request.num_tokens), request.request_id)
        request.slot = self.slots.allocate(request.request_id)
        request.block_table.extend(blocks)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the block table cover ``num_tokens``. False, and nothing changed, when too few blocks are free."""
        missing = self.blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.blocks.num_free:
            return False
        request.block_table.extend(self.blocks.allocate(missing, request.request_id))
        return True

    def release(self, request: Request) -> None:
        """Take back both memories; ``num_computed_tokens`` becomes 0, since nothing of the sequence is left."""
        self.blocks.free(request.block_table, request.request_id)
        self.slots.free(request.slot, request.request_id)
        request.block_table.clear()
        request.slot = 0
        request.num_computed_tokens = 0

    def check(self, holders: Iterable[Request]) -> None:
        """Raise CacheAccountingError unless the pools are whole and owned by exactly ``holders``, as they believe.

        For tests, idle moments and ``check_invariants``; costs O(num_blocks + num_slots).
        """
        self.blocks.check()
        self.slots.check()
        num_blocks = num_slots = 0
        for request in holders:
            owner = request.request_id
            num_blocks += len(request.block_table)
            num_slots += 1
            if self.slots.owner(request.slot) != owner:
                raise CacheAccountingError(f"{owner} uses slot {request.slot} of {self.slots.owner(request.slot)}")
            if len(set(request.block_table)) != len(request.block_table):
                raise CacheAccountingError(f"{owner} lists a block twice")
            for block in request.block_table:
                if self.blocks.owner(block) != owner:
                    raise CacheAccountingError(f"{owner} uses block {block} of {self.blocks.owner(block)}")
            if request.num_computed_tokens > len(request.block_table) * self.block_size:
                raise CacheAccountingError(f"{owner} has {request.num_computed_tokens} tokens in too few blocks")
        if num_blocks != self.blocks.num_used or num_slots != self.slots.num_used:
            raise CacheAccountingError(
                f"{self.blocks.num_used} blocks and {self.slots.num_used} slots are in use, "
                f"requests hold {num_blocks} and {num_slots}"
            )
