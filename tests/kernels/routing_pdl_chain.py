"""Run as a module: routing and residual mixes back to back, each on the last one's result; prints a hash."""

from __future__ import annotations

import hashlib

import torch

from kimi_kernels import attn_res, routing

EXPERTS, TOP_K, HIDDEN = 896, 16, 1024


def main() -> None:
    torch.manual_seed(3)
    digest = hashlib.sha256()
    bias = 0.1 * torch.randn(EXPERTS, device="cuda")
    weights = [torch.randn(HIDDEN, device="cuda").bfloat16() for _ in range(3)]
    counts = torch.zeros(EXPERTS + 1, dtype=torch.int32, device="cuda")
    for tokens in (1, 17, 66, 200, 700):  # both layouts of the mix, one chunk of pairs and two
        logits = torch.randn(tokens, EXPERTS, device="cuda")
        blocks = torch.randn(8, tokens, HIDDEN, device="cuda").bfloat16()
        partial, delta = blocks[0].clone(), blocks[1].clone()
        results: list[torch.Tensor] = []
        for _ in range(6):
            ids, chosen = routing.topk(logits, bias, TOP_K, counts=counts)
            work = routing.dispatch(ids, EXPERTS, counts=counts)  # also clears the counts for the next
            partial, delta = attn_res.mix(blocks, partial, delta, *weights)
            partial, delta = attn_res.mix(blocks, partial, delta, *weights)
            results += [ids, chosen, work.counts, work.offsets, work.pairs, work.tiles, work.num_tiles, partial, delta]
            logits = logits.roll(1, 0)
        assert counts.eq(0).all()
        assert torch.isfinite(delta).all()
        for result in results:
            digest.update(result.view(torch.uint8).cpu().numpy().tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
