"""Kernel micro-benchmarks, peers in the same run.

python -m bench.kernels --list
python -m bench.kernels --only routing,attn_res.mix --json rows.json
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from bench.kernels import environment, quoted, report
from bench.kernels.case import Case, Session
from bench.kernels.measure import measure
from bench.kernels.peer_kit import PeerKit
from kimi_kernels import reference_operations
from kimi_kernels.testing.ceilings import measure_ceilings

# Family -> its modules, in the order of a full run: cheap ones first.
FAMILIES = {
    "routing": ("bench_routing",),
    "attn_res": ("bench_attn_res",),
    "norm": ("bench_norm",),
    "quant": ("bench_quant",),
    "kda": ("bench_kda",),
    "moe": ("bench_finalize", "bench_moe"),
}


def families_of(patterns: Sequence[str]) -> list[str]:
    """The families that patterns can name; all of them when a pattern does not start with one ('T=8192')."""
    named = {p: [f for f in FAMILIES if p == f or p.startswith(f"{f}.")] for p in patterns}
    if not named or not all(named.values()):
        return list(FAMILIES)
    return [f for f in FAMILIES if any(f in hits for hits in named.values())]


def load_cases(families: Iterable[str] = tuple(FAMILIES)) -> list[Case]:
    """The cases of these families, in their order; a module that is not written yet has none."""
    cases: list[Case] = []
    for module in (module for family in families for module in FAMILIES[family]):
        name = f"bench.kernels.{module}"
        if importlib.util.find_spec(name) is not None:
            cases.extend(importlib.import_module(name).cases())
    return cases


def choose(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Cases that a pattern names: a family, an operation, a whole name, a glob over names, or a part of a name.

    Raises ValueError for a pattern that names none, so that a typing mistake cannot look like an empty success.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        globbed = pattern.replace("[", "[[]")  # the brackets in our names are no character classes
        hits = {
            c.name
            for c in cases
            if pattern in (c.family, c.operation) or fnmatch.fnmatchcase(c.name, globbed) or pattern in c.name
        }
        if not hits:
            raise ValueError(f"--only: nothing is named {pattern!r}; see --list")
        chosen |= hits
    return [c for c in cases if c.name in chosen]


def split_patterns(text: str) -> list[str]:
    """Splits at commas outside of brackets: 'routing,kda.decode_[H=12,B=1]' names two."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in (p.strip() for p in parts) if part]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.kernels", description=(__doc__ or "").splitlines()[0])
    made.add_argument(
        "--list", action="store_true", help="print the cases and the packed peers, and stop; needs no GPU"
    )
    made.add_argument("--only", metavar="NAMES", help="families, operations, names or globs, separated by commas")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write all rows as JSON")
    made.add_argument("--out", type=Path, metavar="DIR", default=Path("bench/results"), help="where the report goes")
    made.add_argument("--topic", help="the last part of the report's name (default: the families measured)")
    made.add_argument("--peers", type=Path, metavar="DIR", default=Path(".peers"), help="the packed peers")
    made.add_argument("--work", type=Path, metavar="DIR", help="where peers are unpacked and cache what they compile")
    made.add_argument("--peers-only", action="store_true", help="leave our kernels out")
    made.add_argument("--runs", type=int, default=3, help="runs per side; the row has their median (default 3)")
    return made


def report_path(folder: Path, device_name: str, topic: str) -> Path:
    """`<date>-<gpu>-<topic>.md`; 'NVIDIA H200' gives 'h200'."""
    gpu = device_name.lower().removeprefix("nvidia ").replace(" ", "-")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return folder / f"{today}-{gpu}-{topic}.md"


def summary(row: report.Row) -> str:
    """One line for the terminal while a run goes on."""
    best = row.best_peer
    name = f"{row.operation}[{','.join(f'{k}={v}' for k, v in row.shape.items())}]"
    ratio = "" if row.ratio is None else f"  ratio {row.ratio:.2f}"
    theirs = f"{best.name} {report.number(best.us)} us" if best else "no peer"
    floor = f"  {100 * row.floor_us / row.us:.0f}% of floor" if row.us else ""
    failed = "  FAILED" if row.failed else ""
    return f"{name:36} {report.number(row.us):>8} us  {theirs}{ratio}{floor}{failed}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    kit = PeerKit(options.peers, options.work)
    try:
        patterns = split_patterns(options.only or "")
        cases = load_cases(families_of(patterns))
        cases = choose(cases, patterns) if patterns else cases
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        print(f"{len(cases)} cases; peers: torch eager, {kit.describe()}")
        return 0
    if not torch.cuda.is_available():
        print("bench.kernels measures on a CUDA GPU and found none; --list works without one", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    session = Session(device, kit)
    topic = options.topic or "-".join(dict.fromkeys(case.family for case in cases))
    # folders of one machine (--out, --peers, --work, --json) mean nothing to a reader
    settings = f"cases: {options.only or 'all'}; {options.runs} runs of graph replays; peers: {kit.describe()}"
    head = environment.describe(device, settings)
    print(*(f"{key}: {value}" for key, value in head.items()), "measuring ceilings", sep="\n", flush=True)
    ceilings = measure_ceilings()
    rates = dataclasses.asdict(ceilings)
    print(*(f"  {name} {report.number(value)}" for name, value in rates.items()), flush=True)
    path = report_path(options.out, head["device"], topic)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[report.Row] = []
    group = ""
    for case in cases:
        if case.group != group:
            session.release()
            group = case.group
        rows.append(
            measure(
                case,
                session,
                ceilings,
                runs=options.runs,
                peers_only=options.peers_only,
                reference=case.operation in reference_operations(),
            )
        )
        print(summary(rows[-1]), flush=True)
        # Written after every row: a run that is cut short leaves what it measured.
        path.write_text(report.markdown(rows, head, rates, quoted.DATE))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(report.as_json(rows, head, rates))
    print(f"report: {path}")
    return report.exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
