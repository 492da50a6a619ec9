"""Record the steps of a validation source with PyTorch, and compare with what its rows have.

    python -m tools.torch_memory SOURCE            what differs from rows.csv; exit code 1
    python -m tools.torch_memory SOURCE --write    write what is recorded into rows.csv
    python -m tools.torch_memory SOURCE --json     print it, with the largest storages at the peak

`--row TEXT` takes the rows whose titles contain the text only.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from stagec.validation.bytes import MOMENTS
from tools.torch_memory.record import CATEGORIES, Recorded, record
from tools.torch_memory.run import TorchRun, runs_of

ROWS = Path(__file__).parents[2] / "validation"
COLUMNS = [f"{moment}.{name}" for moment in MOMENTS for name in CATEGORIES]


def main() -> int:
    """The exit code: 1 where rows differ."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_memory", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--row", default="", metavar="TEXT")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: dict[str, Recorded] = {}
    for run in runs_of(args.source):
        if args.row in run.title:
            rows[run.title] = _recorded(run)
    if args.json:
        print(json.dumps([{"row": n, **asdict(each)} for n, each in rows.items()], indent=1))
        return 0
    return _compare(ROWS / args.source / "rows.csv", rows, write=args.write)


def _recorded(run: TorchRun) -> Recorded:
    print(f"recording {run.title}", file=sys.stderr)
    return record(run)


def _compare(path: Path, recorded: Mapping[str, Recorded], *, write: bool) -> int:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows, fields = list(reader), list(reader.fieldnames or ())
    fields += [name for name in COLUMNS if name not in fields]
    differ = 0
    for row in rows:
        made = recorded.get(row["row"])
        for moment in MOMENTS if made is not None else ():
            for name, size in getattr(made, moment).items():
                column = f"{moment}.{name}"
                if row.get(column) != str(size) and not write:
                    differ += 1
                    print(f"{row['row']}: {column} is {size:,}, the row has {row.get(column)}")
                row[column] = str(size)
    if write:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return 0
    print(f"{len(recorded)} steps recorded, {differ} figures differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
