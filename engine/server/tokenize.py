"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.server.chat_protocol import parse_conversation
from engine.server.fields import Fields
from engine.server.job import encode
from engine.server.protocol import check_prompt_ids
from engine.server.state import ServerState
from engine.text.chat import encode_segments, render


async def tokenize(state: ServerState, body: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of a ``prompt``, or of ``messages`` with every member that changes a chat's prompt."""
    fields = Fields(body)
    fields.flag("add_special_tokens")  # there is no token that could be added
    state.check_model(fields.text("model"))
    if fields.get("messages") is not None:
        tokenizer = state.need_tokenizer("messages")
        segments = render(*parse_conversation(fields, state.chat_defaults))
        size = sum(len(segment.text) for segment in segments)
        ids = await encode(lambda: encode_segments(tokenizer, segments), size, "messages")
    else:
        tokenizer = state.need_tokenizer("prompt")
        text = fields.text("prompt")
        if text is None:
            raise fields.error("prompt", "or messages must be given")
        ids = await encode(lambda: tokenizer.encode(text, special=True), len(text), "prompt")
    return {
        "count": len(ids),
        "max_model_len": state.limits.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_str(i) for i in ids],
    }


def detokenize(state: ServerState, body: Mapping[str, Any]) -> dict[str, Any]:
    """Text of ``tokens``; bytes that are no text become U+FFFD."""
    tokenizer = state.need_tokenizer("tokens")
    fields = Fields(body)
    state.check_model(fields.text("model"))
    ids = list(fields.token_ids("tokens"))
    if fields.get("tokens") is None:
        raise fields.error("tokens", "is missing")
    if ids:
        check_prompt_ids(ids, state.limits, "tokens")
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}


def tokenizer_info(state: ServerState) -> dict[str, Any]:
    """What lm-eval asks of a remote tokenizer. K3 has no template file: /tokenize renders conversations."""
    names = state.need_tokenizer("tokenizer_info").special_tokens
    tokens = {f"{name.lower()}_token": f"[{name}]" if f"[{name}]" in names else None for name in ("EOS", "BOS", "PAD")}
    return {**tokens, "chat_template": None}
