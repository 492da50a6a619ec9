"""`stagec analyze --sweep`: one job in many configurations, a row for each.

Rows are computed by worker processes or by a cluster. A configuration that is none is a row too,
with the reason.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import click

from stagec.driver.common import kept_reports, write_output
from stagec.driver.emission import progress_bar, worker_options, workers
from stagec.driver.job import AXES, JobBuilder, is_file_name
from stagec.driver.options import SHORTHANDS, JobOptions, Sizes
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError, did_you_mean, error

F = TypeVar("F", bound=Callable[..., Any])
Numbered = tuple[int, dict[str, Any]]

#: What can be swept, beside the sizes of symbols.
_NAMES = (*AXES, *SHORTHANDS, "preset", "ranks")
#: What is about one job.
_ALONE = ("symbolic", "print_strategy", "print_after", "dump_dir", "time_passes", "reproducer")
_MOST_ROWS = 100_000
#: The compiler takes a worker of a cluster for one thread.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Axis:
    """What is swept: an option or a symbol, and its values with how they are written."""

    name: str
    option: str | None
    values: tuple[tuple[str, Any], ...]

    def chosen(self, options: JobOptions, value: Any) -> JobOptions:
        """The options with one of the values."""
        if self.option is None:
            return replace(options, sizes={**options.sizes, self.name: value})
        given: dict[str, Any] = {self.option: value}
        return replace(options, **given, explicit=options.explicit | {self.option})


class _Sweep(click.ParamType[Axis]):
    name = "NAME=VALUE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Axis:
        name, _, rest = (part.strip() for part in str(value).partition("="))
        texts = [text.strip() for text in rest.split(",")]
        if not name or not all(texts):
            self.fail(f"'{value}' is not NAME=VALUE,...", param, ctx)
        attribute = name.replace("-", "_")
        if attribute in _NAMES and ctx is not None:
            found = next(p for p in ctx.command.params if p.name == attribute)
            return Axis(
                name, attribute, tuple((text, found.type(text, found, ctx)) for text in texts)
            )
        if not name[0].isupper():
            hint = did_you_mean(name, (n.replace("_", "-") for n in _NAMES))
            self.fail(f"no flag '{name}' to sweep, nor a symbol; {hint or 'tp=1,2'}", param, ctx)
        sizes = (Sizes()(f"{name}={text}", param, ctx)[name] for text in texts)
        return Axis(name, None, tuple(zip(texts, sizes, strict=True)))


def sweep_options(function: F) -> F:
    """Give a command the options of a sweep."""
    option = click.option(
        "--sweep",
        type=_Sweep(),
        multiple=True,
        help="One row for each of these values of a flag (sp=on,off) or symbol (S=4096,8192); "
        "several: for each combination.",
    )
    return option(worker_options(function))


def sweep(options: JobOptions, axes: Sequence[Axis], given: Mapping[str, Any]) -> int:
    """Print a row for each combination; 1 if none of them is a job. Raises `DiagnosticError`."""
    _check(options, axes, given)
    choices = list(product(*(axis.values for axis in axes)))
    units = [_configured(options, axes, choice) for choice in choices]
    with workers(given) as run:
        results = dict(_with_progress(run(row, units), len(units)))
    rows: list[dict[str, Any]] = []
    for number, choice in enumerate(choices):
        chosen = {a.name: _plain(*v) for a, v in zip(axes, choice, strict=True)}
        rows.append({"configuration": chosen, **results[number]})
    if given["as_json"]:
        text = json.dumps(rows, indent=1) + "\n"
    else:
        from stagec.driver.tables import print_sweep

        table = StringIO()
        print_sweep(rows, table if given["output"] or not sys.stdout.isatty() else sys.stdout)
        text = table.getvalue()
    write_output(text, given["output"])
    return 0 if any("error" not in found for found in rows) else 1


def row(options: JobOptions) -> dict[str, Any]:
    """What is known of a job in a line: the most that any of its ranks has, or why it is none."""
    with _one_at_a_time, kept_reports() as told:
        try:
            found = _summary(options)
        except DiagnosticError as problem:
            first = problem.diagnostics[0]
            return {"error": first.message, "remedy": first.remedy}
        except NotAnIntegerError as problem:
            return {"error": str(problem), "remedy": "choose sizes that divide"}
    return {**found, "warnings": [d.message for d in told]}


def _summary(options: JobOptions) -> dict[str, Any]:
    from stagec.analysis.report import analysis

    builder = JobBuilder(options)
    result = analysis(builder.lower(), builder.model_name)
    classes: list[dict[str, Any]] = result["classes"]
    return {
        "model": result["model"],
        "ranks": result["ranks"],
        "mesh": result["mesh"],
        "parameters": result["parameters"],
        "flops": max(sum(c["flops"].values()) for c in classes),
        "sent_bytes": max(_sent(c) for c in classes),
        "peak_bytes": max(c["memory"]["peak"] for c in classes),
    }


def _sent(entry: Mapping[str, Any]) -> int:
    sent: list[int] = [c["wire_bytes"] for c in entry["collectives"]]
    return sum(sent + [m["bytes"] for m in entry["p2p"] if m["dir"] == "send"])


def _check(options: JobOptions, axes: Sequence[Axis], given: Mapping[str, Any]) -> None:
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise error(f"--sweep {name} is given twice", remedy=f"one --sweep {name}=VALUE,...")
    alone = [n for n in _ALONE if given.get(n) or getattr(options, n, None)]
    if alone:
        flag = alone[0].replace("_", "-")
        raise error(f"--{flag} is about one job, --sweep about many", remedy=f"leave out --{flag}")
    if "-" in (options.model, options.strategy):
        raise error("--sweep reads a text many times", remedy="give a file instead of '-'")
    count = prod(len(axis.values) for axis in axes)
    if count > _MOST_ROWS:
        raise error(
            f"--sweep asks for {count:,} configurations, expected at most {_MOST_ROWS:,}",
            remedy="sweep over less at a time",
        )


def _configured(
    options: JobOptions, axes: Sequence[Axis], choice: Sequence[tuple[str, Any]]
) -> JobOptions:
    """The options of a combination, for a process with another working directory."""
    for axis, (_, value) in zip(axes, choice, strict=True):
        options = axis.chosen(options, value)
    return replace(
        options,
        model=_absolute(options.model) or "",
        strategy=_absolute(options.strategy),
        plugin=tuple(path.resolve() for path in options.plugin),
    )


def _absolute(name: str | None) -> str | None:
    return str(Path(name).resolve()) if name and is_file_name(name) else name


def _plain(text: str, value: Any) -> int | str:
    return value if isinstance(value, int) else text


def _with_progress(results: Iterator[Numbered], total: int) -> Iterator[Numbered]:
    if not sys.stderr.isatty():
        yield from results
        return
    with progress_bar("analyzing", "configurations") as progress:
        for done, result in enumerate(results, 1):
            progress(done, total)
            yield result
