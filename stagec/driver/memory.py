"""`stagec memory`: what every GPU holds, when and why; whether it fits, and what would make it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from stagec.driver.common import kept_reports, tell, write_output
from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions, job_options, take_options
from stagec.driver.planned import PLAN
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


class Bytes(click.ParamType[int]):
    """`80GiB`, `80GB` or a number of bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([KMGT]i?B|B?)", str(value))
        if found is None or not Fraction(found[1]):
            self.fail(f"expects a size such as 80GiB, found '{value}'", param, ctx)
        return int(Fraction(found[1]) * _UNITS[found[2]])


@click.command("memory")
@job_options
@click.option(
    "--limit", type=Bytes(), help="Exit with 1 if a rank holds more, and say what would fit."
)
@click.option(
    "--fit",
    type=click.Choice(["best-fit", "caching"]),
    help="Place all buffers: in one arena, or as PyTorch's caching allocator does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=Path, metavar="FILE", help="Write a timeline to look at.")
@click.option(
    "--snapshot", type=Path, metavar="FILE", help="Write a snapshot for PyTorch's memory_viz."
)
@click.option(
    "--stage", type=click.IntRange(min=0), metavar="N", help="Whose timeline (default: the worst)."
)
@click.option("-o", "--output", metavar="FILE", help="Write the result here instead of stdout.")
def command(**given: Any) -> int:
    """Plan the memory of one training step: what every rank holds at its worst moment.

    MODEL is a .stg file or the name of a library model; STRATEGY a .stg file with a stg.strategy.
    """
    options = take_options(given)
    builder = JobBuilder(options)
    if options.print_strategy:
        write_output(builder.strategy(), given["output"])
        return 0
    from stagec.analysis.footprint import footprint

    module = builder.lower(PLAN)
    result = footprint(module, builder.model_name, given["fit"])
    _print(result, given)
    _draw(builder, result, given)
    worst = max(result["classes"], key=lambda c: c["peak"])
    if given["limit"] is None or worst["peak"] <= given["limit"]:
        return 0
    _advise(options, worst, given["limit"])
    return 1


def _print(result: dict[str, Any], given: dict[str, Any]) -> None:
    if given["as_json"]:
        write_output(json.dumps(result, indent=1) + "\n", given["output"])
        return
    from stagec.driver.tables import print_footprint

    text = io.StringIO()
    print_footprint(result, text if given["output"] else sys.stdout)
    if given["output"]:
        write_output(text.getvalue(), given["output"])


def _draw(builder: JobBuilder, result: dict[str, Any], given: dict[str, Any]) -> None:
    if given["html"] is None and given["snapshot"] is None:
        return
    from stagec.analysis.footprint import timelines
    from stagec.driver.memory_files import html, snapshot

    peaks = {int(c["name"].removeprefix("stage")): c["peak"] for c in result["classes"]}
    stage = given["stage"] if given["stage"] is not None else max(peaks, key=lambda s: peaks[s])
    if stage not in peaks:
        raise click.UsageError(f"--stage {stage}: the stages are 0 to {max(peaks)}")
    timeline = next(t for s, _, t in timelines(builder.module) if s == stage)
    if given["html"] is not None:
        given["html"].write_text(html(timeline, f"{builder.model_name}, stage {stage}"), "utf-8")
    if given["snapshot"] is not None:
        given["snapshot"].write_bytes(snapshot(timeline))


# -- what would fit --------------------------------------------------------------------------------


def _changes(options: JobOptions, sequences: int) -> Iterator[tuple[str, JobOptions]]:
    """Single changes of a job that may save memory; a data-parallel rank has so many sequences."""
    for policy in ("selective", "full"):
        if options.recompute not in (policy, "full"):
            yield f"--recompute {policy}", replace(options, recompute=policy)
    for stage in range(options.zero + 1, 4):
        yield f"--zero {stage}", replace(options, zero=stage)
    stages = (options.mesh or {}).get("pp") or options.pp
    count = options.microbatches or (2 * stages if stages > 1 else 1)
    for factor in (2, 4):
        if sequences % (factor * count):
            break
        yield (
            f"--microbatches {factor * count}",
            replace(options, microbatches=factor * count),
        )
    for factor in (2, 4):
        more = replace(options, ranks=None, microbatches=count)
        if options.mesh:
            mesh = {"pp": None} | dict(options.mesh) | {"pp": factor * stages}
            more = replace(more, mesh=mesh)
        else:
            more = replace(more, pp=factor * stages)
        yield f"--pp {factor * stages}", more


def _with_batch(options: JobOptions) -> tuple[JobOptions, int]:
    """The same job with its batch written down, so that a change does not change the work, and the
    sequences of one data-parallel rank."""
    module = JobBuilder(options).module
    strategy = read_strategy(module)
    batch = sequences = module.symbols.get(strategy.batch) or 1
    over = {a for rule in strategy.splits if strategy.batch in rule.dims for a in rule.over}
    sizes: Mapping[str, int | None] = module.mesh.sizes if module.mesh else {}
    for axis, size in sizes.items():
        sequences //= (size or 1) if axis in over else 1
    return replace(options, sizes={**options.sizes, strategy.batch: batch}), sequences


def _advise(options: JobOptions, worst: dict[str, Any], limit: int) -> None:
    """Say what dominates, and which change fits, by trying them."""
    from stagec.driver.tables import bytes_text

    over = bytes_text(worst["peak"] - limit)
    category = max(worst["categories"], key=lambda c: worst["categories"][c])
    size = bytes_text(worst["categories"][category])
    tell(f"{worst['name']} needs {bytes_text(worst['peak'])}, {over} more than the limit")
    tell(f"most of it is {category}: {size}; the peak is at {worst['at']}")
    with kept_reports():
        options, sequences = _with_batch(options)
    fits = False
    for text, changed in _changes(options, sequences):
        peak = _peak(changed)
        if peak is not None and peak < worst["peak"]:
            fits |= peak <= limit
            verdict = "fits" if peak <= limit else "does not fit"
            tell(f"  {text:<22} {bytes_text(peak):>12}  {verdict}")
    if not fits:
        tell("no single change fits; combine them, or use more ranks")


def _peak(options: JobOptions) -> int | None:
    """The peak of the worst class; None for a job that cannot be."""
    from stagec.analysis.footprint import timelines

    try:
        with kept_reports():
            module = JobBuilder(options).lower(PLAN)
            return max(t.peak().total for _, _, t in timelines(module))
    except DiagnosticError:
        return None
