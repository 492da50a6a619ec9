"""`stagec diff`: the differences between two traces, folders or archives."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from stagec.driver.shell.click_options import takes
from stagec.driver.shell.show import show
from stagec.jobs.request.option import CommandOption
from stagec.jobs.request.result import FORM, JSON, OUTPUT, PAGE, form_of
from stagec.output.report import Report
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.check.compare import Comparison, Difference, Key, Sums

#: The number of ops that are named for each difference.
_OPS = 3
_HTML = CommandOption("html", PAGE, "Write a page of what differs.")


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
@takes(JSON, FORM, _HTML, OUTPUT)
def command(a: Path, b: Path, limit: int, **given: Any) -> int:
    """Compare two traces, two folders of traces, or archives: nodes, FLOPs, bytes, collectives by
    kind and group, dependencies, order.

    Nodes are matched by name, groups by their members. Reads traces of other tools too. Exit code 1
    if anything differs. The trace of one rank is compared with that rank of a job.
    """
    from stagec.check.compare import compare

    form_of(given)
    answer = DiffAnswer(a, b, compare(a, b, limit))
    show(answer, given)
    return int(not answer.comparison.same)


@dataclass(frozen=True)
class DiffAnswer(Report):
    """The differences between the traces of `a` and of `b`."""

    a: Path
    b: Path
    comparison: Comparison

    @property
    def title(self) -> str:
        return f"{self.a} and {self.b}"

    def as_json(self) -> dict[str, Any]:
        return _as_json(self.comparison)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each phase, kind of node and group: the sums of both."""
        return list(self.as_json()["sums"])

    def print(self, stream: TextIO) -> None:
        from stagec.output.tables import console, table

        comparison, out = self.comparison, console(stream, 160)
        for text in self._sides():
            out.print(text)
        rows = [row for row in _rows(comparison) if row[1] != row[2]]
        if rows:
            texts = ((*key, *(f"{value:,}" for value in _paired(a, b))) for key, a, b in rows)
            out.print(table("Sums that differ", *_SUMS, rows=texts, text_columns=3))
        elif not comparison.same:
            out.print("nodes, FLOPs and bytes of each kind are the same")
        for each in comparison.differences:
            stream.write(_difference_text(each))
        for note in comparison.notes:
            out.print(note)
        out.print(self._verdict())

    def page(self) -> str:
        """Tables of the sums and of the differing nodes."""
        from stagec.output.page import TableRow, command, page, paragraphs, table

        sums = [TableRow([*key, *_paired(one, two)]) for key, one, two in _rows(self.comparison)]
        nodes = [
            TableRow([counted(len(each.ranks), "rank"), _TITLES[each.kind], each.count, text])
            for each in self.comparison.differences
            for text in each.examples
        ]
        body = [command(shlex.join(["stagec", "diff", str(self.a), str(self.b)]))]
        body += paragraphs([self._verdict(), *self._sides(), *self.comparison.notes])
        if nodes:
            heads = ("ranks", "difference", "nodes", "example")
            body += ["<h2>What differs</h2>", table(heads, nodes, "nodes")]
        return page(self.title, [*body, "<h2>Sums</h2>", table(_SUMS, sums, "sums")])

    def _sides(self) -> list[str]:
        """A sentence about each side."""
        both = self.comparison
        each = zip("AB", (self.a, self.b), both.ranks, both.nodes, strict=True)
        return [f"{name}: {path}: {counted(r, 'rank')}, {n:,} nodes" for name, path, r, n in each]

    def _verdict(self) -> str:
        verdict = "the same" if self.comparison.same else "they differ"
        return f"{verdict}: nodes, bytes, groups, dependencies and order are compared"


_SUMS = (
    *("phase", "kind", "over"),
    *(f"{what} {side}" for what in ("nodes", "FLOPs", "bytes") for side in "AB"),
)


def _paired(one: Sums, two: Sums) -> list[int]:
    """Each figure of A, followed by that of B."""
    return [value for pair in zip(one, two, strict=True) for value in pair]


def _difference_text(each: Difference) -> str:
    more = f" (likewise {len(each.ranks) - 1} more)" if len(each.ranks) > 1 else ""
    ops = ", ".join(f"{op or 'no name'} x {n}" for op, n in list(each.ops.items())[:_OPS])
    others = len(each.ops) - _OPS
    tail = f", and {others} more ops" if others > 0 else ""
    nodes = counted(f"{each.count:,}", "node")
    heading = f"rank {each.ranks[0]}{more}: {nodes} {_TITLES[each.kind]}: {ops}{tail}"
    return f"{heading}\n" + "".join(f"    {text}\n" for text in each.examples)


_TITLES: Mapping[str, str] = {
    "only in A": "only in A",
    "only in B": "only in B",
    "different": "that differ",
    "moved": "in another order",
    "other dependencies": "with other dependencies",
    "other ranks": "with other ranks",
}


def _rows(comparison: Comparison) -> list[tuple[Key, Sums, Sums]]:
    from stagec.check.compare import Sums

    one, two = comparison.sums
    keys = sorted({*one, *two})
    return [(key, one.get(key, Sums()), two.get(key, Sums())) for key in keys]


def _as_json(comparison: Comparison) -> dict[str, object]:
    return {
        "schema": 1,
        "same": comparison.same,
        "notes": list(comparison.notes),
        "ranks": comparison.ranks,
        "nodes": comparison.nodes,
        "sums": [
            {
                "phase": key[0],
                "kind": key[1],
                "over": key[2],
                "a": one._asdict(),
                "b": two._asdict(),
            }
            for key, one, two in _rows(comparison)
        ],
        "differences": [asdict(each) for each in comparison.differences],
    }
