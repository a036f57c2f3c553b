"""Repetition, presence and frequency penalties. Only requests that ask for one keep counts over the vocabulary."""

from __future__ import annotations

import torch

from engine.types import Request, SamplingParams


class PenaltyCounts:
    """How often each id stands in a request's output, and whether it stands in its prompt."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(request.prompt_token_ids, device=device)] = True
        self.output = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.num_counted = 0

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)

    def update(self, request: Request) -> None:
        """Count the output tokens that came since the last call."""
        new = request.output_token_ids[self.num_counted :]
        if new:
            ids = torch.tensor(new, device=self.output.device)
            self.output.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            self.num_counted += len(new)


def apply_penalties(logits: torch.Tensor, requests: list[Request], counts: list[PenaltyCounts]) -> torch.Tensor:
    """logits [n, vocab] f32 -> a new tensor.

    Repetition divides positive and multiplies negative logits of ids in prompt or output; frequency subtracts once per
    occurrence in the output, presence once per id in it. Finite logits stay finite, however small the divisor.
    """
    for request, count in zip(requests, counts, strict=True):
        count.update(request)
    output = torch.stack([c.output for c in counts])
    seen = (output > 0) | torch.stack([c.in_prompt for c in counts])

    def column(name: str) -> torch.Tensor:
        return torch.tensor([[getattr(r.sampling, name)] for r in requests], dtype=torch.float32, device=logits.device)

    fp32 = torch.finfo(torch.float32)
    repetition = column("repetition_penalty").clamp(min=fp32.tiny)  # a smaller one would be 0 in fp32
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition).clamp(-fp32.max, fp32.max)
    logits = torch.where(seen, repeated, logits)
    return logits - column("frequency_penalty") * output - column("presence_penalty") * (output > 0)
