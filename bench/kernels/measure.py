"""One case -> one row: every side checked, captured, and timed in interleaved runs."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from bench.kernels import report
from bench.kernels.case import Case, Prepared, Session, Side
from kimi_kernels.testing.ceilings import Ceilings
from kimi_kernels.testing.timing import GraphTimer, Timing, is_cold, summarise


@dataclass
class Outcome:
    """What became of a side: a timer that is ready, or the reason why there is none."""

    side: Side
    timer: GraphTimer | None = None
    num_sets: int = 0
    error: float | None = None
    missing: str = ""
    failure: str = ""
    timing: Timing | None = None


def make_ready(side: Side, session: Session, sustained: bool) -> Outcome:
    """Makes the calls of a side, checks one of them and captures the graph."""
    outcome = Outcome(side)
    try:
        calls = side.calls()
        if side.check is not None:
            outcome.error = side.check()
        outcome.num_sets = len(calls)
        outcome.timer = GraphTimer(calls)
        outcome.timer.warm_up(0.5 if sustained else 0.02)
    except Exception as error:
        if session.kit.is_missing(error):
            outcome.missing = str(error)
        else:
            outcome.failure = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            print(f"FAILED {side.name}", *traceback.format_exception(error)[-4:], sep="\n", flush=True)
        torch.cuda.synchronize()  # raises when the context is lost: then nothing measured after it means anything
    return outcome


def time_all(outcomes: list[Outcome], runs: int) -> None:
    """Times all sides in turn, `runs` times over, so that a drifting clock meets all of them alike."""
    times: list[list[float]] = [[] for _ in outcomes]
    for _ in range(runs):
        for outcome, mine in zip(outcomes, times, strict=True):
            if outcome.timer is not None:
                mine.append(outcome.timer.run())
    for outcome, mine in zip(outcomes, times, strict=True):
        if outcome.timer is not None:
            outcome.timing = summarise(mine, outcome.timer.captured)
            outcome.timer = None  # releases the graph and its memory pool


def peer_row(outcome: Outcome) -> report.PeerRow:
    side = outcome.side
    row = report.PeerRow(
        side.name,
        report.MISSING,
        tolerance=side.tolerance,
        comparable=side.comparable,
        note=side.note,
        limit=side.limit,
    )
    if outcome.timing is not None:
        row.status, row.us, row.captured = report.MEASURED, outcome.timing.us, outcome.timing.captured
        row.error = outcome.error
    elif outcome.failure:
        row.status, row.why = report.FAILED, outcome.failure
    elif side.quoted_us is not None:
        row.status, row.us = report.QUOTED, side.quoted_us
    else:
        row.why = outcome.missing
    return row


def measure(
    case: Case,
    session: Session,
    ceilings: Ceilings,
    *,
    runs: int = 3,
    peers_only: bool = False,
    reference: bool = False,
) -> report.Row:
    """Runs one case on the current CUDA device. What breaks on one side is in the row; the other sides still run.

    `peers_only` leaves our side out. `reference`: plain torch stands in for our kernel, and the row is marked.
    """
    try:
        prepared: Prepared = case.prepare(session)
    except Exception as error:
        print(f"FAILED {case.name}", *traceback.format_exception(error)[-4:], sep="\n", flush=True)
        return report.Row(case.operation, case.shape, None, failure=f"prepare: {type(error).__name__}: {error}")
    sides = [*([] if peers_only else [prepared.ours]), *prepared.peers]
    outcomes = [make_ready(side, session, prepared.sustained) for side in sides]
    time_all(outcomes, runs)
    moved = prepared.read_bytes + prepared.write_bytes
    sets = max((o.num_sets for o in outcomes), default=0)
    set_bytes = moved if prepared.set_bytes is None else prepared.set_bytes
    row = report.Row(
        case.operation,
        dict(case.shape),
        us=None,
        moved_bytes=moved,
        flops=prepared.flops,
        floor_us=ceilings.floor_us(
            prepared.read_bytes,
            prepared.write_bytes,
            in_place=prepared.in_place,
            flops=prepared.flops,
            matmul=prepared.matmul,
        ),
        cold=is_cold(sets * set_bytes, session.device),
        reference=reference,
    )
    if not peers_only:
        ours = outcomes.pop(0)
        row.failure, row.error, row.tolerance = ours.failure or ours.missing, ours.error, ours.side.tolerance
        if ours.timing is not None:
            row.us, row.spread, row.captured = ours.timing.us, ours.timing.spread, ours.timing.captured
    row.peers = [peer_row(outcome) for outcome in outcomes]
    return row
