"""`stagec validate`: published figures beside those computed here."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from stagec.driver.shell.show import write_output
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.count import Counts


@click.command("validate")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list; of --time one object.")
@click.option("--time", "steps", is_flag=True, help="Compare measured seconds of steps.")
@click.option("--source", metavar="NAME", help="Of --time: the steps of one source.")
@click.option("--all", "all_rows", is_flag=True, help="Of --time: all steps of the long sources.")
def command(**given: Any) -> int:
    """Compile the models of the library and compare with what has been published; exit code 1 if a
    row is off.

    With --time steps that were measured are predicted, whatever the errors.
    """
    if given["steps"]:
        from stagec.driver.commands.validate_time import validate_time

        return validate_time(given)
    wrong = next((n for n in ("source", "all_rows") if given[n]), None)
    if wrong is not None:
        raise error(f"--{wrong.removesuffix('_rows')} is about steps", remedy="add --time")
    as_json: bool = given["as_json"]
    from stagec.analysis.published import rows
    from stagec.analysis.published_counters import counter_rows
    from stagec.analysis.published_counts import counted_rows, decoded_rows
    from stagec.analysis.published_traffic import traffic_rows

    compiled = LibraryCounts()
    found = [
        *rows(compiled),
        *counted_rows(compiled),
        *decoded_rows(compiled),
        *traffic_rows(compiled),
        *counter_rows(compiled),
    ]
    failed = not all(row.ok for row in found)
    if as_json:
        write_output(json.dumps([dataclasses.asdict(row) for row in found], indent=1) + "\n", None)
        return int(failed)
    from stagec.output.tables import console, table

    shown = table(
        "Published and computed", "source", "row", "published", "ours", "", text_columns=2
    )
    for row in found:
        shown.add_row(
            row.source, row.row, row.published, row.ours, "ok" if row.ok else "[red]OFF[/red]"
        )
    console(sys.stdout, 160).print(shown)
    return int(failed)


class LibraryCounts:
    """Counts of library models; a text is compiled once for each strategy, with all sizes open."""

    def __init__(self) -> None:
        self._counts: dict[tuple[object, ...], Counts] = {}

    def __call__(
        self, name: str, *axes: str, **options: str | int | bool
    ) -> tuple[Counts, Mapping[str, int]]:

        from stagec.analysis.count import count_graph, lowered_graphs
        from stagec.analysis.memory import staged_memory
        from stagec.importers.library import model_sizes
        from stagec.jobs.builder import JobBuilder
        from stagec.jobs.request.options import JobOptions
        from stagec.models import library

        model = library()[name]
        key = (model.text_name, axes, *sorted(options.items()))
        if key not in self._counts:
            pairs = [axis.partition("=") for axis in axes]
            mesh = {axis: int(size) if size else None for axis, _, size in pairs} or None
            job: Any = {"mesh": mesh, **options}
            builder = JobBuilder(JobOptions(name, **job), symbolic=True)
            module = builder.lower(verify=False)  # models of the library, which tests verify
            graph = lowered_graphs(module)[0]
            counts = count_graph(module, graph)
            counts.memory = dict(staged_memory(module, graph, counts.memory, 0))
            self._counts[key] = counts
        return self._counts[key], model_sizes(model)
