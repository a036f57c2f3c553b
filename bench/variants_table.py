"""A table of kernel variants from the JSON of tuning runs: one row a variant, one column a shape.

python -m bench.variants_table TITLE=rows.json ... > bench/results/<date>-<gpu>-<topic>-variants.md

A file holds {"ceiling": GB/s, "empty": us, "rows": [{"H", "B", "variant", "pdl", "us"}]}. Variants are sorted by their
time at the largest shape; of a variant run with and without programmatic dependent launch, the run with it counts. The
fastest of each column is bold; a variant named "peer" is not ours and takes no part in that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(title: str, data: dict) -> str:
    """One run as markdown."""
    times: dict[str, dict[tuple[int, int], float]] = {}
    for row in sorted(data["rows"], key=lambda row: row["pdl"]):
        times.setdefault(row["variant"], {})[row["H"], row["B"]] = row["us"]
    shapes = sorted({shape for columns in times.values() for shape in columns})
    best = {shape: min(columns[shape] for name, columns in times.items() if name != "peer") for shape in shapes}

    def cell(name: str, shape: tuple[int, int]) -> str:
        us = times[name].get(shape)
        if us is None:
            return "–"
        return f"**{us:.2f}**" if name != "peer" and us == best[shape] else f"{us:.2f}"

    names = sorted(times, key=lambda name: (name != "peer", times[name].get(shapes[-1], float("inf"))))
    lines = [
        f"## {title}",
        "",
        f"In-place ceiling of this run {data['ceiling']:.0f} GB/s, an empty graph node {data['empty']:.2f} us.",
        "",
        "| variant | " + " | ".join(f"H={heads} B={batch}" for heads, batch in shapes) + " |",
        "| --- |" + " --- |" * len(shapes),
        *(f"| {name} | " + " | ".join(cell(name, shape) for shape in shapes) + " |" for name in names),
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    for argument in arguments:
        title, _, path = argument.rpartition("=")
        print(table(title, json.loads(Path(path).read_text())), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
