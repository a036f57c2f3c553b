"""Progress of loading: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tqdm import tqdm

LINE_EVERY_S = 10.0


class Progress:
    """Counts bytes and shards; shows both with the rate on stderr."""

    def __init__(self, total_bytes: int, num_shards: int, *, enabled: bool) -> None:
        self.total, self.num_shards, self.enabled = total_bytes, num_shards, enabled
        self.done = 0
        self.shards: set[Path] = set()
        self.start = self.last_line = time.monotonic()
        self.bar = None
        if enabled and sys.stderr.isatty():
            self.bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="loading weights")

    def add(self, nbytes: int, shard: Path) -> None:
        self.done += nbytes
        new_shard = shard not in self.shards
        self.shards.add(shard)
        if self.bar is not None:
            if new_shard:
                self.bar.set_postfix_str(f"shard {len(self.shards)}/{self.num_shards}", refresh=False)
            self.bar.update(nbytes)
        elif self.enabled and time.monotonic() - self.last_line >= LINE_EVERY_S:
            self._line()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.enabled:
            self._line()

    def _line(self) -> None:
        self.last_line = time.monotonic()
        rate = self.done / max(self.last_line - self.start, 1e-9)
        print(
            f"loading weights: shard {len(self.shards)}/{self.num_shards}, "
            f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s",
            file=sys.stderr,
            flush=True,
        )
