"""`stagec diff`: what differs between two traces, folders or archives."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagec.driver.shell.show import write_json
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.check.compare import Comparison, Difference, Key, Sums

#: Ops that are named for each difference.
_OPS = 3


@click.command("diff")
@click.argument("a", metavar="A", type=Path)
@click.argument("b", metavar="B", type=Path)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=3,
    help="Examples of each difference (default 3).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(a: Path, b: Path, limit: int, as_json: bool) -> int:
    """Compare two traces, two folders of traces, or archives: nodes, FLOPs, bytes, collectives by
    kind and group, dependencies, order.

    Nodes are matched by name, groups by their members. Reads traces of other tools too. Exit code 1
    if anything differs. The trace of one rank is compared with that rank of a job.
    """
    from stagec.check.compare import compare

    found = compare(a, b, limit)
    if as_json:
        write_json(_as_json(found))
    else:
        _print(found, a, b)
    return int(not found.same)


def _print(found: Comparison, a: Path, b: Path) -> None:
    from stagec.output.tables import console, table

    out = console(sys.stdout, 160)
    for name, path, ranks, nodes in zip("AB", (a, b), found.ranks, found.nodes, strict=True):
        out.print(f"{name}: {path}: {counted(ranks, 'rank')}, {nodes:,} nodes", markup=False)
    rows = _differing(found)
    if rows:
        numbers = [f"{what} {side}" for what in ("nodes", "FLOPs", "bytes") for side in "AB"]
        shown = table("Sums that differ", "phase", "kind", "over", *numbers, text_columns=3)
        for key, one, two in rows:
            pairs = zip(one, two, strict=True)
            shown.add_row(*key, *(f"{value:,}" for pair in pairs for value in pair))
        out.print(shown)
    elif not found.same:
        out.print("nodes, FLOPs and bytes of each kind are the same")
    for each in found.differences:
        _print_difference(each)
    for note in found.notes:
        out.print(note, markup=False)
    verdict = "the same" if found.same else "they differ"
    out.print(f"{verdict}: nodes, bytes, groups, dependencies and order are compared")


def _print_difference(each: Difference) -> None:
    more = f" (likewise {len(each.ranks) - 1} more)" if len(each.ranks) > 1 else ""
    ops = ", ".join(f"{op or 'no name'} x {n}" for op, n in list(each.ops.items())[:_OPS])
    others = len(each.ops) - _OPS
    tail = f", and {others} more ops" if others > 0 else ""
    nodes = counted(f"{each.count:,}", "node")
    heading = f"rank {each.ranks[0]}{more}: {nodes} {_TITLES[each.kind]}: {ops}{tail}"
    sys.stdout.write(f"{heading}\n" + "".join(f"    {text}\n" for text in each.examples))


_TITLES: Mapping[str, str] = {
    "only in A": "only in A",
    "only in B": "only in B",
    "different": "that differ",
    "moved": "in another order",
    "other dependencies": "with other dependencies",
    "other ranks": "with other ranks",
}


def _differing(found: Comparison) -> list[tuple[Key, Sums, Sums]]:
    return [row for row in _rows(found) if row[1] != row[2]]


def _rows(found: Comparison) -> list[tuple[Key, Sums, Sums]]:
    from stagec.check.compare import Sums

    one, two = found.sums
    keys = sorted({*one, *two})
    return [(key, one.get(key, Sums()), two.get(key, Sums())) for key in keys]


def _as_json(found: Comparison) -> dict[str, object]:
    return {
        "schema": 1,
        "same": found.same,
        "notes": list(found.notes),
        "ranks": found.ranks,
        "nodes": found.nodes,
        "sums": [
            {
                "phase": key[0],
                "kind": key[1],
                "over": key[2],
                "a": one._asdict(),
                "b": two._asdict(),
            }
            for key, one, two in _rows(found)
        ],
        "differences": [asdict(each) for each in found.differences],
    }
