"""`stagec measure`: traces of the PyTorch profiler as a table of measured kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagec.driver.shell.session import log, progress
from stagec.driver.shell.show import write_output
from stagec.support.diagnostics import error
from stagec.support.files import check_new_file

if TYPE_CHECKING:
    from stagec.time.measured.kineto import Reading, Row
    from stagec.traces.writer import Progress

#: The number of reported kernels that are not in the table.
_MISSED = 12
#: The share of GPU time beyond which ops without shapes are reported.
_TOO_MUCH = 0.1


@click.command("measure")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "output", metavar="FILE", help="The table (CSV, or JSON by its name); stdout.")
@click.option("--json", "as_json", is_flag=True, help="Write the table as JSON.")
@click.option("--quiet", is_flag=True, help="Print no summary and no progress.")
def command(traces: tuple[Path, ...], output: str | None, as_json: bool, quiet: bool) -> None:
    """Read traces of torch.profiler, plain or gzip, one per rank, and write the median time of each
    kernel that can be identified: a table for --measured. docs/measured.md says how they match.

    A summary of what was read, and of GPU time that is not in the table, goes to stderr.
    """
    from stagec.time.measured.kernel_tables import table_text
    from stagec.time.measured.kineto import rows

    named = (output or "").lower().endswith(".json")
    if as_json and output not in (None, "-") and not named:
        raise error(
            f"{output} does not end in .json, but the output is JSON", remedy="give -o NAME.json"
        )
    if output not in (None, "-"):
        check_new_file(Path(output))
    readings = _readings(traces, quiet)
    measured = rows(readings)
    if not quiet or not measured:
        _summary(readings, measured)
    if not measured:
        raise error(
            "the profile has no kernels that can be identified",
            remedy="record it with record_shapes=True and ProfilerActivity.CPU beside CUDA",
        )
    write_output(table_text(measured, as_json=as_json or named), output)


def _readings(traces: Sequence[Path], quiet: bool) -> list[Reading]:
    from stagec.time.measured.kineto import read_trace

    before, whole = 0, sum(path.stat().st_size for path in traces)
    readings: list[Reading] = []
    with progress("reading traces", "MiB", quiet=quiet) as counted:
        for path in traces:
            readings.append(read_trace(path, partial(_print_bytes, counted, before, whole)))
            before += path.stat().st_size
    return readings


def _print_bytes(progress: Progress, before: int, whole: int, at: int) -> None:
    progress((before + at) >> 20, whole >> 20)


def _summary(readings: Sequence[Reading], rows: Sequence[Row]) -> None:
    from stagec.time.measured.torch_ops import NO_SHAPES

    kinds: dict[str, list[float]] = {}
    missed: dict[tuple[str, str], list[float]] = {}
    for reading in readings:
        _print_trace(reading)
        for key, times in reading.kernels.items():
            kinds.setdefault(key.kind, []).extend(times)
        for calls in reading.collectives.values():
            for key, seconds in calls:
                kinds.setdefault(key.kind, []).append(seconds)
        for what, times in reading.missed.items():
            missed.setdefault(what, []).extend(times)
    whole = sum(r.gpu_seconds for r in readings) or 1.0
    share = sum(map(sum, kinds.values())) / whole
    log(f"{len(rows)} rows from {share:.1%} of the GPU's time: {_kinds(kinds, whole) or 'none'}")
    unshaped = sum(sum(times) for (_, why), times in missed.items() if why == NO_SHAPES)
    if unshaped > _TOO_MUCH * whole:
        log(f"{unshaped / whole:.1%} are of ops without shapes: profile with record_shapes=True")
    if missed:
        log("not in the table:")
    ordered = sorted(missed.items(), key=lambda item: -sum(item[1]))
    for (name, why), times in ordered[:_MISSED]:
        log(f"  {_line(times, whole)}  {name:.90} ({why})")
    if rest := [s for _, times in ordered[_MISSED:] for s in times]:
        log(f"  {_line(rest, whole)}  {len(ordered) - _MISSED} others")


def _print_trace(reading: Reading) -> None:
    rank = "" if reading.rank is None else f", rank {reading.rank}"
    device = f", {reading.device}" if reading.device else ""
    step = ", without the first step" if reading.first_left_out else ""
    log(
        f"{reading.path}{rank}{device}: {reading.events:,} events; {reading.gpu_events:,} on the "
        f"GPU, {reading.gpu_seconds * 1e3:,.3f} ms{step}"
    )


def _kinds(kinds: dict[str, list[float]], whole: float) -> str:
    ordered = sorted(kinds.items(), key=lambda item: -sum(item[1]))
    return ", ".join(f"{kind} {sum(seconds) / whole:.1%}" for kind, seconds in ordered)


def _line(durations: Sequence[float], whole: float) -> str:
    seconds = sum(durations)
    return f"{seconds * 1e3:10,.3f} ms {seconds / whole:6.1%} {len(durations):7,} x"
