"""`stagec convert`: Chakra traces from one format to another."""

import gzip
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from stagec.driver.shell.session import log
from stagec.output.trace_files import check_is_trace
from stagec.support.diagnostics import error
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.formats.timeline.ranks import Timeline

_FORMATS = ("chakra", "json", "kineto", "chrome", "perfetto")
_ENDS = {"chakra": ".et", "json": ".json"}


@click.command("convert")
@click.argument("source", metavar="TRACE_OR_DIR", type=Path)
@click.option(
    "-o",
    "--output",
    type=Path,
    required=True,
    metavar="FILE|DIR",
    help="The file or folder to write; it must not exist.",
)
@click.option(
    "--to",
    type=click.Choice(_FORMATS),
    required=True,
    help="chakra and json hold the same; kineto, chrome and perfetto need durations.",
)
@click.option("--gzip", "packs", is_flag=True, help="Pack the files.")
@click.option("--quiet", is_flag=True, help="Print no summary.")
def command(source: Path, output: Path, to: str, packs: bool, quiet: bool) -> int:
    """Convert a Chakra trace, or a folder of the traces of a job.

    Reads protobuf, JSON and gzip, of any tool. A trace becomes a file; a folder becomes a folder
    with the groups file. chrome and perfetto write one file for all ranks.
    """
    traces = _traces(source)
    if traces.folder is None or to in ("chrome", "perfetto"):
        if output.exists():
            raise error(f"'{output}' already exists", remedy="choose another -o")
        ((_, parts),) = _files(traces, to, packs=packs)
        sizes = [_write(output, parts, packs=packs)]
    else:
        from stagec.traces.folder import working_folder

        with working_folder(output, force=False, resume=False) as folder:
            files = _files(traces, to, packs=packs)
            sizes = [_write(folder / name, parts, packs=packs) for name, parts in files]
            if to in ("chakra", "json") and traces.groups is not None:
                shutil.copyfile(traces.groups, folder / f"{traces.name}.json")
    if not quiet:
        from stagec.output.tables import bytes_text

        count = counted(len(sizes), "file")
        log(f"wrote {count}, {bytes_text(sum(sizes))}, to {output}")
    return 0


@dataclass(frozen=True)
class _Traces:
    """The traces of a job by rank, and its groups: the file, and the members by group number."""

    name: str
    folder: Path | None
    paths: Mapping[int, Path]
    groups: Path | None
    members: Mapping[int, tuple[int, ...]]


def _traces(source: Path) -> _Traces:
    """The traces of a file or folder. Raises `DiagnosticError`."""
    from stagec.check.findings import CheckReport
    from stagec.check.trace_files import discover, job_of, read_groups

    report = CheckReport()
    if source.is_dir():
        name, paths = discover(source, report)
        groups = read_groups(source, name, report)
    else:
        check_is_trace(source)
        name, rank = job_of(source)
        paths = {rank or 0: source}
        groups = read_groups(source.parent, name, CheckReport())
    if report.errors:
        raise report.as_error()
    where = groups.path if groups is not None else None
    members = dict(groups.members) if groups is not None else dict[int, tuple[int, ...]]()
    return _Traces(name, source if source.is_dir() else None, paths, where, members)


def _files(traces: _Traces, to: str, *, packs: bool) -> Iterator[tuple[str, Iterable[bytes]]]:
    """The files by name, and their parts, which are generated lazily."""
    end = ".gz" if packs else ""
    if to in ("chakra", "json"):
        for rank, path in traces.paths.items():
            yield f"{traces.name}.{rank}{_ENDS[to]}{end}", _records(path, to)
        return
    from stagec.formats.perfetto.encode import perfetto_trace
    from stagec.formats.timeline.chrome import chrome_trace
    from stagec.formats.timeline.kineto import KinetoWriter
    from stagec.formats.timeline.recorded import recorded_timeline

    timeline: Timeline = recorded_timeline(traces.paths, traces.members)
    if to == "kineto":
        groups = {str(number): [*ranks] for number, ranks in traces.members.items()}
        writer = KinetoWriter(timeline, groups)
        for rank in traces.paths:
            yield f"{traces.name}.{rank}.json{end}", writer.rank(rank)
    else:
        yield "", (perfetto_trace if to == "perfetto" else chrome_trace)(timeline)


def _records(path: Path, to: str) -> Iterator[bytes]:
    """The records of a trace as protobuf or as JSON. Raises `DiagnosticError`."""
    from stagec.formats.chakra.nodes import TraceError, json_of_record, prefixed
    from stagec.formats.chakra.record_files import read_all_records

    first = True
    try:
        for offset, record in read_all_records(path):
            try:
                yield (
                    json_of_record(record, metadata=first).encode()
                    if to == "json"
                    else prefixed(record)
                )
            except ValueError as problem:
                raise TraceError(path, offset, f"expected a Chakra node: {problem}") from None
            first = False
    except TraceError as problem:
        raise error(str(problem), remedy="give a complete trace, protobuf or JSON") from None


def _write(path: Path, parts: Iterable[bytes], *, packs: bool) -> int:
    """Write a file atomically and return its size in bytes."""
    from stagec.support.files import new_file

    with new_file(path) as file:
        if packs:
            with gzip.GzipFile("", "wb", 6, cast("io.BytesIO", file), mtime=0) as packed:
                for part in parts:
                    packed.write(part)
        else:
            for part in parts:
                file.write(part)
    return path.stat().st_size
