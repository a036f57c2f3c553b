"""What all routes of one server share."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.server.engine_client import EngineClient
from engine.server.errors import ApiError, draining, engine_dead
from engine.server.metrics import Metrics
from engine.server.protocol import ServingLimits
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerState:
    """``tokenizer`` None: the model has none, so only token ids are taken and given."""

    engine: EngineClient
    tokenizer: Tokenizer | None
    limits: ServingLimits
    metrics: Metrics
    model_names: list[str]
    model_root: str
    chat_defaults: Mapping[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    reasoning_field: str = "both"
    stream_interval: int = 1
    log_requests: bool = False
    max_log_len: int | None = None
    draining: bool = False
    hints: set[str] = field(default_factory=set)  # of prompts, named in the log once
    created: int = field(default_factory=lambda: int(time.time()))

    def check_serving(self) -> None:
        """Raises ApiError 503 when no request can be taken."""
        if self.draining:
            raise draining()
        if not self.engine.is_alive:
            raise engine_dead()

    def check_model(self, name: str | None) -> str:
        """The served name a request means. Raises ApiError 404."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(404, f"the model {name[:100]!r} is not served here", param="model")
        return name

    def note_hint(self, name: str) -> None:
        """Say once that ``name`` only changes the prompt: nothing forces the model to obey yet."""
        if name not in self.hints:
            self.hints.add(name)
            logger.warning("%s is a hint in the prompt only; the output is not constrained by a grammar", name)

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(
                400, f"{param}: this model has no tokenizer, so only prompts of token ids are taken", param=param
            )
        return self.tokenizer
