"""Rows of a run as markdown and JSON. Pure Python: what a number means is decided here and tested without a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MEASURED, QUOTED, MISSING, FAILED = "measured", "quoted", "missing", "failed"


@dataclass
class PeerRow:
    """One peer in one row. `us` is None unless measured or quoted; `why` says why something is missing or failed."""

    name: str
    status: str
    us: float | None = None
    error: float | None = None
    tolerance: float | None = None
    comparable: bool = True
    note: str = ""
    why: str = ""
    captured: bool = True
    limit: float | None = None  # ours is to take at most this many times as long

    @property
    def wrong(self) -> bool:
        """Its check ran and failed. A NaN compares false with everything, so the test is 'not within'."""
        return self.error is not None and self.tolerance is not None and not self.error <= self.tolerance

    @property
    def counts(self) -> bool:
        """Whether `ratio` may use it: a time, the whole job, and a right result."""
        return self.us is not None and self.comparable and not self.wrong


@dataclass
class Row:
    """One case. `us` is None when our side did not run; `failure` says why (empty: it was not asked for)."""

    operation: str
    shape: Mapping[str, int | str]
    us: float | None
    spread: float = 0.0
    captured: bool = True
    error: float | None = None
    tolerance: float | None = None
    moved_bytes: float = 0.0
    flops: float = 0.0
    floor_us: float = 0.0
    cold: bool = True
    reference: bool = False  # KIMI_KERNELS_REFERENCE names the operation: plain torch was timed, not a kernel
    failure: str = ""
    peers: list[PeerRow] = field(default_factory=list)

    @property
    def best_peer(self) -> PeerRow | None:
        """The fastest peer that does the same job with a right result. A quoted time takes part, so that `ratio` never
        flatters for want of a packed peer; the report shows its date."""
        return min((p for p in self.peers if p.counts), key=lambda p: p.us or math.inf, default=None)

    @property
    def ratio(self) -> float | None:
        """Best peer's time / ours: above 1 we are faster."""
        best = self.best_peer
        return best.us / self.us if best and best.us and self.us else None

    @property
    def wrong(self) -> bool:
        return self.error is not None and self.tolerance is not None and not self.error <= self.tolerance

    @property
    def failed(self) -> bool:
        return bool(self.failure) or self.wrong or any(p.wrong or p.status == FAILED for p in self.peers)


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands separated; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def checked(error: float | None, wrong: bool) -> str:
    return "not checked" if error is None else f"{error:.1e}{' WRONG' if wrong else ''}"


def peer_time(peer: PeerRow | None, date: str) -> str:
    if peer is None:
        return "–"
    return number(peer.us) + (f" (quoted {date})" if peer.status == QUOTED else "")


def row_cells(row: Row, quoted_date: str) -> list[str]:
    best = row.best_peer
    rate = f"{row.moved_bytes / row.us / 1e3:,.0f}" if row.us and row.moved_bytes else "–"
    flops = number(row.flops / row.us / 1e6) if row.us and row.flops else "–"
    floor = f"{100 * row.floor_us / row.us:.0f}" if row.us and row.floor_us else "–"
    marks = [] if row.captured else ["not captured"]
    marks += ["torch reference"] if row.reference else []
    marks += [row.failure] if row.failure else []
    return [
        ", ".join(f"{k}={v}" for k, v in row.shape.items()),
        number(row.us),
        best.name if best else "–",
        peer_time(best, quoted_date),
        "–" if row.ratio is None else f"{row.ratio:.2f}",
        rate,
        flops,
        number(row.floor_us or None),
        floor,
        "cold" if row.cold else "warm",
        checked(row.error, row.wrong) if row.us is not None else "–",
        f"{100 * row.spread:.1f}%" if row.us is not None else "–",
        "; ".join(marks),
    ]


COLUMNS = (
    "shape", "ours us", "best peer", "peer us", "ratio", "GB/s", "TFLOP/s", "floor us", "% of floor", "L2", "error",
    "spread", "remarks",
)  # fmt: skip


def peer_cells(row: Row, peer: PeerRow, quoted_date: str) -> list[str]:
    remarks = [peer.note] if peer.note else []
    remarks += [] if peer.comparable else ["not comparable"]
    if peer.limit is not None and peer.us and row.us:
        remarks.append(f"ours takes {row.us / peer.us:.2f} times as long, at most {peer.limit} wanted")
    remarks += [] if peer.captured else ["not captured"]
    remarks += [f"{peer.status}: {peer.why}"] if peer.why else []
    floor = f"{100 * row.floor_us / peer.us:.0f}" if peer.us and row.floor_us else "–"
    error = "–" if peer.us is None or peer.status == QUOTED else checked(peer.error, peer.wrong)
    shape = ", ".join(f"{k}={v}" for k, v in row.shape.items())
    return [shape, peer.name, peer_time(peer, quoted_date), floor, error, "; ".join(remarks)]


def markdown(rows: Sequence[Row], run: Mapping[str, str], ceilings: Mapping[str, float], quoted_date: str) -> str:
    """The whole report. `run` is what a reader needs to repeat it: commit, device, versions, settings."""
    operations = list(dict.fromkeys(row.operation for row in rows))
    lines = [f"# {run.get('device', 'unknown device')}: {', '.join(operations)}", ""]
    lines += [f"- {key}: {value}" for key, value in run.items()]
    if ceilings:
        rates = ", ".join(f"{k} {v:,.0f}" for k, v in ceilings.items() if k != "node_us")
        lines += [
            f"- ceilings of this run (GB/s; bf16 and fp8 in TFLOP/s): {rates}; "
            f"an empty graph node {number(ceilings.get('node_us'))} us"
        ]
    lines += [
        "",
        "`ratio` = best peer's time / ours, of the peers that do the same job and pass their check: above 1 we are "
        "faster. `error` is relative to fp32 torch, in the 2-norm. `spread` is that of three runs.",
    ]
    for operation in operations:
        mine = [row for row in rows if row.operation == operation]
        lines += ["", f"## {operation}", "", table(COLUMNS, [row_cells(row, quoted_date) for row in mine])]
        others = [peer_cells(row, peer, quoted_date) for row in mine for peer in row.peers]
        if others:
            columns = ("shape", "peer", "us", "% of floor", "error", "remarks")
            lines += ["", "All peers:", "", table(columns, others)]
    failed = [row for row in rows if row.failed]
    lines += ["", f"{len(rows)} rows, {len(failed)} with a failure."]
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Row], run: Mapping[str, str], ceilings: Mapping[str, float]) -> str:
    """The same, for programs: every field of `Row`, with `ratio` and `best_peer` worked out."""
    entries = []
    for row in rows:
        best = row.best_peer
        derived = {"ratio": row.ratio, "best_peer": best.name if best else None, "failed": row.failed}
        entries.append({**dataclasses.asdict(row), "shape": dict(row.shape), **derived})
    return json.dumps({"run": dict(run), "ceilings": dict(ceilings), "rows": entries}, indent=1)


def exit_status(rows: Sequence[Row]) -> int:
    """1 when any side was wrong or broke, else 0."""
    return int(any(row.failed for row in rows))
