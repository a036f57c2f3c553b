"""When a request is done: end tokens, stop ids, length. Stop strings are text and belong to the front end."""

from __future__ import annotations

from engine.types import FinishReason, Request


def finish_reason(request: Request, token: int) -> tuple[FinishReason | None, int | None]:
    """Whether ``token``, already appended, ends the request: (reason, the stop id if one of stop_token_ids did it)."""
    sampling = request.sampling
    num_output = len(request.output_token_ids)
    if num_output > sampling.min_tokens:  # end tokens count only after min_tokens others
        if token in request.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if token in sampling.stop_token_ids:
            return FinishReason.STOP, token
    if len(request.prompt_token_ids) + num_output >= request.max_num_tokens:
        return FinishReason.LENGTH, None
    return None, None
