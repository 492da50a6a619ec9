"""`stagec fit`: constants of a machine from measured tables."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from stagec.driver.shell import completion
from stagec.driver.shell.session import progress, the_session
from stagec.driver.shell.show import write_output
from stagec.jobs.request.machine import machine_of
from stagec.support.diagnostics import error
from stagec.support.files import check_new_file

if TYPE_CHECKING:
    from stagec.machines import Machine
    from stagec.time.fit.constants import Errors, Fit, FitPart

_MANY = 2
_STDOUT = "-"


@click.command("fit")
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="TABLE",
    help="Measured times (CSV or JSON, see docs/measured.md). May be given several times.",
)
@click.option(
    "--machine",
    "base",
    metavar="NAME|FILE",
    shell_complete=completion.COMPLETERS["machines"],
    required=True,
    help="The machine whose constants are the base: one that 'stagec machines' lists, or a file.",
)
@click.option("-o", "--output", metavar="FILE", help="The text of the machine, NAME.toml.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="Print no progress.")
def command(
    measured: tuple[Path, ...], base: str, output: str | None, as_json: bool, quiet: bool
) -> None:
    """Fit the efficiency constants of a machine to measured kernels and collectives.

    The fit leaves out every second row of each kind, in order of size. The table has the error of
    the model on fitted rows and on the others, before and after. With -o the fitted machine is
    written, a text for --machine FILE.
    """
    from stagec.machines import is_file, read_machine
    from stagec.time.fit.constants import fit_tables
    from stagec.time.measured.kernel_tables import read_measured

    machine = machine_of(base, the_session())
    name = machine.name
    if output is not None and output != _STDOUT:
        if not output.endswith(".toml"):
            raise error(
                f"{output} does not end in .toml, as files of machines do",
                remedy="give -o NAME.toml",
            )
        if is_file(base) and os.path.realpath(output) == os.path.realpath(base):
            raise error(
                f"-o {output} is the file of the base machine itself", remedy="choose another -o"
            )
        check_new_file(Path(output))
    if is_file(base):
        folder = Path(output).parent if output is not None else Path()
        name = _as_file(os.path.relpath(base, folder))
    tables = [table for path in measured for table in read_measured(path)]
    origin = " and ".join(dict.fromkeys(path.name for path in measured))
    with progress("fitting", "kinds", quiet=quiet) as counted:
        fit = fit_tables(tables, machine, origin, counted)
    to_stdout = output == _STDOUT
    if as_json:
        _print_json(fit, machine, sys.stderr if to_stdout else sys.stdout)
    else:
        _print_table(fit, machine, sys.stderr if to_stdout else sys.stdout)
    if not fit.sections:
        raise error(
            "too few measurements: no kind of kernel has enough rows to fit a constant",
            remedy="measure more kernels; the lines above say how many rows each kind needs",
        )
    if output is not None:
        from stagec.machines.writing import quoted, with_sections

        text = with_sections(f"base = {quoted(name)}\n", fit.sections)
        # parse the text as a check: only valid machines are written
        read_machine(Path(output).stem, text, "fitted.toml" if to_stdout else output)
        write_output(text, output)


def _as_file(path: str) -> str:
    """A path in a form that is recognized as a file and not as a name."""
    from stagec.machines import is_file

    return path if is_file(path) else f"./{path}"


def _print_json(fit: Fit, machine: Machine, stream: TextIO) -> None:
    result: dict[str, Any] = {"base": machine.name, "parts": [_object(part) for part in fit.parts]}
    stream.write(json.dumps(result, indent=1) + "\n")
    stream.flush()


def _object(part: FitPart) -> dict[str, Any]:
    def both(place: int) -> dict[str, Any]:
        before, after = part.before[place], part.after[place]
        return {
            "rows": part.rows[place],
            "before": None if before is None else dataclasses.asdict(before),
            "after": None if after is None else dataclasses.asdict(after),
        }

    return {
        "kind": part.kind,
        "dtype": part.dtype,
        "level": part.level,
        "constants": list(part.constants),
        "fitted": both(0),
        "left_out": both(1),
        "note": part.note,
    }


def _print_table(fit: Fit, machine: Machine, stream: TextIO) -> None:
    from stagec.output.tables import console, table

    rows = table(
        f"Errors of {machine.name} before and after the fit: median (p90)",
        *("kind", "", "constants", "fitted", "before", "after", "left out", "before", "after"),
        text_columns=3,
    )
    for part in fit.parts:
        names = part.constants
        cells = [", ".join(names) if len(names) <= _MANY else f"all {len(names)}"]
        for place in (0, 1):
            both = part.before[place], part.after[place]
            cells += [f"{part.rows[place]:,}", *map(_errors_text, both)]
        rows.add_row(part.kind, part.dtype or part.level, *cells)
    out = console(stream, 140)
    out.print(rows)
    for part in fit.parts:
        if part.note:
            named = " ".join(n for n in (part.kind, part.dtype or part.level) if n)
            out.print(f"{named}: {part.note}")


def _errors_text(errors: Errors | None) -> str:
    return "" if errors is None else f"{errors.median:.1%} ({errors.p90:.1%})"
