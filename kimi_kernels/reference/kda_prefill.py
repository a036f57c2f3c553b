"""KDA over packed pieces of prompts: the chunk form of K3 spec section 5 with chunks of 16 tokens, and its yardstick.

Within a chunk G is the running sum of g, at least 16 * -5 = -80 below 0, so exp(-G) still fits fp32. Everything that
does not need the state is computed for all chunks of all sequences at once; the state then walks the chunks, sequences
and heads side by side.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from kimi_kernels.reference import kda
from kimi_kernels.reference.kda import DIM, TAPS, Inputs, Tokens

CHUNK = 16
LOWEST_BOUND = -5.0  # of g: see above


@dataclass(frozen=True, slots=True)
class Pieces:
    """The live sequences of a pack, longest first; ``start`` and ``length`` are host lists in that order."""

    sequence: list[int]
    start: list[int]
    length: list[int]


def live_pieces(slots: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: torch.Tensor | None) -> Pieces:
    """Sequences that have tokens and a slot. Tokens beyond num_tokens are padding."""
    borders = cu_seqlens.tolist()
    end = borders[-1] if num_tokens is None else int(num_tokens)
    owners = slots.tolist()
    lengths = [min(stop, end) - start for start, stop in itertools.pairwise(borders)]
    order = sorted((i for i, n in enumerate(lengths) if n > 0 and owners[i] > 0), key=lambda i: -lengths[i])
    return Pieces(order, [borders[i] for i in order], [lengths[i] for i in order])


def prefill(
    x: Inputs,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    fresh: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    exports: torch.Tensor | None,
    *,
    by_token: bool = False,
) -> torch.Tensor:
    """-> [T, heads*128]; both states go on in place, the exported ones are written to their slots."""
    out = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
    pieces = live_pieces(slots, cu_seqlens, num_tokens)
    if not pieces.sequence:
        return out
    device = x.q.device
    sequence = torch.tensor(pieces.sequence, device=device)
    where = slots[sequence].long()
    current, conv = kda.load(state, conv_state, where, None if fresh is None else fresh[sequence])
    rows, extended, position = _extend(x, conv, pieces)
    # All windows over the extended rows; those that end in a state row belong to no token and are dropped.
    count = extended.shape[0] - (TAPS - 1)
    mixed = kda.convolve([extended[tap : tap + count] for tap in range(TAPS)], x)
    t = kda.tokens(mixed.index_select(0, position - (TAPS - 1)), x, rows)
    lookup = {i: n for n, i in enumerate(pieces.sequence)}
    wanted = [] if exports is None else [(lookup[s], done, slot) for s, done, slot in exports.tolist() if slot > 0]
    for n, done, slot in wanted:
        if done == 0:  # the state as it was found
            state[slot], conv_state[slot] = current[n], conv[n]
    run = recur_by_token if by_token else recur_by_chunk
    o = run(t, current, pieces, wanted, state)
    out.index_copy_(0, rows, kda.finish(o, x, rows))
    state.index_copy_(0, where, current)
    # Piece n's rows stand at offset start + 3 in `extended`, behind the three rows of its state.
    offset = torch.tensor(_offsets(pieces), device=device)
    length = torch.tensor(pieces.length, device=device)
    newest = torch.arange(TAPS - 1, device=device)
    conv_state[where] = extended[(offset + length)[:, None] + newest].to(conv_state.dtype)
    for n, done, slot in wanted:
        if done > 0:
            conv_state[slot] = extended[_offsets(pieces)[n] + done : _offsets(pieces)[n] + done + TAPS - 1].to(
                conv_state.dtype
            )
    return out


def _offsets(pieces: Pieces) -> list[int]:
    """Where piece n's three state rows begin in the extended rows."""
    offsets, total = [], 0
    for length in pieces.length:
        offsets.append(total)
        total += length + TAPS - 1
    return offsets


def _extend(x: Inputs, conv: torch.Tensor, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows of x in piece order [R], raw rows with each piece's state rows before it, position in those)."""
    device = x.q.device
    rows = torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(pieces.start, pieces.length, strict=True)])
    raw = x.raw(rows)
    parts, position, at = [], [], 0
    for n, (length, offset) in enumerate(zip(pieces.length, _offsets(pieces), strict=True)):
        parts += [conv[n].to(raw.dtype), raw[at : at + length]]
        position.append(torch.arange(length, device=device) + offset + TAPS - 1)
        at += length
    return rows, torch.cat(parts), torch.cat(position)


def recur_by_token(
    t: Tokens, current: torch.Tensor, pieces: Pieces, wanted: list[tuple[int, int, int]], state: torch.Tensor
) -> torch.Tensor:
    """The yardstick: the recurrence as the spec writes it. -> o [R, heads, 128]; ``current`` goes on in place."""
    o, at = torch.empty_like(t.v), 0
    for n, length in enumerate(pieces.length):
        one = current[n : n + 1]  # a view
        for token in range(length):
            row = slice(at + token, at + token + 1)
            o[row], _, _ = kda.step_(one, Tokens(t.q[row], t.k[row], t.v[row], t.g[row], t.beta[row]))
            for piece, done, slot in wanted:
                if (piece, done) == (n, token + 1):
                    state[slot] = one[0]
        at += length
    return o


def recur_by_chunk(
    t: Tokens, current: torch.Tensor, pieces: Pieces, wanted: list[tuple[int, int, int]], state: torch.Tensor
) -> torch.Tensor:
    """Chunks of 16, cut from the start of each piece. -> o [R, heads, 128]; ``current`` goes on in place."""
    device, heads = t.q.device, t.q.shape[1]
    chunks = [-(-length // CHUNK) for length in pieces.length]
    # Row r of the pack goes to place[r] of the padded chunks; padding has k = v = 0, g = 0, beta = 0 and adds nothing.
    parts, first, total = [], [], 0
    for length, count in zip(pieces.length, chunks, strict=True):
        parts.append(torch.arange(total * CHUNK, total * CHUNK + length, device=device))
        first.append(total)
        total += count
    place = torch.cat(parts)

    def spread(values: torch.Tensor) -> torch.Tensor:
        padded = values.new_zeros((total * CHUNK, *values.shape[1:])).index_copy_(0, place, values)
        return padded.unflatten(0, (total, CHUNK)).transpose(1, 2).contiguous()  # [chunks, heads, 16, ...]

    q, k, v, g = (spread(values) for values in (t.q, t.k, t.v, t.g))
    beta = spread(t.beta).unsqueeze(-1)  # [chunks, heads, 16, 1]
    decay = g.cumsum(-2)  # G
    # Cross terms are exp(G_t - G_s); split at the middle of the chunk's range, both factors stay within exp(+-40).
    middle = decay[..., -1:, :] * 0.5
    late = (decay - middle).exp()
    early = late.reciprocal()
    k_early = (k * early).transpose(-1, -2)
    strictly = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril(-1)
    a = torch.where(strictly, beta * torch.matmul(k * late, k_early), 0.0)
    b = torch.where(strictly.T.logical_not(), torch.matmul(q * late, k_early), 0.0)
    grown = decay.exp()
    right = beta * torch.cat([v, k * grown], dim=-1)
    unit = torch.eye(CHUNK, device=device)
    u, w = torch.linalg.solve_triangular(a + unit, right, upper=False, unitriangular=True).split(DIM, dim=-1)
    read = torch.cat([w, q * grown], dim=-2)  # what meets the incoming state: [chunks, heads, 32, 128]
    k_rest = k * (decay[..., -1:, :] - decay).exp()
    left = grown[..., -1:, :]  # [chunks, heads, 1, 128]

    o = torch.empty((total, heads, CHUNK, DIM), device=device)
    exports: dict[int, list[tuple[int, int, int]]] = {}
    for n, done, slot in wanted:
        if done > 0:
            exports.setdefault((done - 1) // CHUNK, []).append((n, (done - 1) % CHUNK + 1, slot))
    live = current.shape[0]
    base = torch.tensor(first, device=device)
    for index in range(chunks[0]):
        while chunks[live - 1] <= index:
            live -= 1
        c = base[:live] + index
        s = current[:live]
        from_state = torch.matmul(read[c], s.transpose(-1, -2))  # [n, heads, 32, v]
        new = u[c] - from_state[:, :, :CHUNK]  # V' [n, heads, 16, v]
        o[c] = from_state[:, :, CHUNK:] + torch.matmul(b[c], new)
        for n, rows, slot in exports.get(index, ()):
            at = decay[c[n], :, rows - 1 : rows]  # [heads, 1, 128]
            k_part = k[c[n], :, :rows] * (at - decay[c[n], :, :rows]).exp()
            state[slot] = s[n] * at.exp() + torch.matmul(new[n, :, :rows].transpose(-1, -2), k_part)
        s.mul_(left[c])
        s.flatten(0, 1).baddbmm_(new.transpose(-1, -2).flatten(0, 1), k_rest[c].flatten(0, 1))
    return o.transpose(1, 2).flatten(0, 1).index_select(0, place)
