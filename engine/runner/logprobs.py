"""Log-probabilities as they are reported: of the model's own logits, before penalties and temperature."""

from __future__ import annotations

import torch

from engine.types import TokenLogprobs


def describe(logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of logits [n, vocab] f32: the log-probability and rank of its token, and the ``num_top[i]`` best."""
    rows = len(tokens)
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    k = min(max(num_top[:rows], default=0), logits.shape[-1])
    values, ids = logprobs.topk(k, dim=-1)
    columns = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), values.tolist(), ids.tolist(), num_top, strict=False)
    return [
        TokenLogprobs(token, logprob, rank, list(zip(i[:n], v[:n], strict=True)))
        for token, logprob, rank, v, i, n in columns
    ]
