"""Token counts of one HTTP request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.types import RequestUpdate


@dataclass(slots=True)
class Usage:
    """``prompt_tokens`` counts each prompt once, whatever n is; completion tokens are summed over all choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, update: RequestUpdate, num_tokens: int) -> None:
        self.completion_tokens += num_tokens
        self.cached_tokens = max(self.cached_tokens, update.num_cached_tokens)

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
