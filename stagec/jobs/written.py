"""Writes a job in the formats of `--format`, each into its folder, with its origin in the manifest,
and reports to the user."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stagec import __version__
from stagec.formats.registry import formats_of, parse_formats
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.emission import emit
from stagec.jobs.request.flags import words
from stagec.jobs.request.machine import used_text
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.support.diagnostics import Diagnostic, error

if TYPE_CHECKING:
    from stagec.formats.base import Format
    from stagec.ir.opdef import Registry
    from stagec.jobs.request.emission import Source
    from stagec.traces.emit import EmittedJob
    from stagec.traces.pod_programs import PodsJob
    from stagec.traces.writer import Written


def formats_asked(text: str, registry: Registry, given: Mapping[str, Any]) -> list[Format]:
    """The formats that `--format` names. Raises `DiagnosticError` for an unknown one, and for one
    that cannot be written to an archive or by a cluster."""
    from stagec.formats.base import not_patched

    formats = parse_formats(text, formats_of(registry))
    elsewhere = given.get("archive") is not None or given["scheduler"] is not None
    for each in formats:
        if elsewhere and not each.patched:
            raise not_patched(each)
    if given.get("archive") is not None and len(formats) > 1:
        raise error(
            "--archive writes one format", remedy="name one format, or write folders with -o DIR"
        )
    return formats


def folder_of(format_: Format, formats: Sequence[Format], output: Path) -> Path:
    """The folder of a format: the output itself, or with several formats a subfolder."""
    return output if len(formats) == 1 else output / format_.name


def check_targets(formats: Sequence[Format], output: Path, given: Mapping[str, Any]) -> None:
    """Raise `DiagnosticError` for a folder whose files would be lost."""
    from stagec.traces.folder import MANIFEST, check_target

    if len(formats) > 1 and (output / MANIFEST).exists():
        raise error(
            f"'{output}' has the files of a job, but several formats need a folder each in it",
            remedy="choose another -o",
        )
    for each in formats:
        check_target(folder_of(each, formats, output), force=given["force"], resume=given["resume"])


def write_formats(
    source: Callable[[Format], Source],
    formats: Sequence[Format],
    output: Path,
    about: Mapping[str, object],
    given: Mapping[str, Any],
    session: Session,
) -> list[Written]:
    """Write a job in each format. Warnings are reported, and remarks on what a format does not
    represent. Raises `DiagnosticError`, before anything is written if a format refuses the job."""
    from stagec.traces.writer import check_job

    check_targets(formats, output, given)
    sources = [source(each) for each in formats]
    for job in sources:
        check_job(job)
    _announce(sources, given, session)
    files: list[Written] = []
    for each, job in zip(formats, sources, strict=True):
        written = emit(job, folder_of(each, formats, output), about, given, session)
        files.append(written)
        for warning in written.warnings:
            session.report(Diagnostic(warning, severity="warning"))
        for loss in () if given["quiet"] else written.dropped:
            session.remark(f"{each.name}: {loss}")
    return files


def _announce(sources: Sequence[Source], given: Mapping[str, Any], session: Session) -> None:
    """Report the contents and sizes of large files before they are written."""
    from stagec.formats.base import JobFormat
    from stagec.output.tables import bytes_text
    from stagec.traces.writer import parse_ranges

    only = given["only_ranks"]
    for job in sources:
        if given["quiet"] or not isinstance(job.format, JobFormat):
            continue
        estimate = job.format.estimate(job, None if only is None else parse_ranges(only))
        if estimate is not None:
            session.log(f"{job.format.name}: {estimate.text}, about {bytes_text(estimate.bytes)}")


def log_written(written: Sequence[Written], output: Path, times: str, session: Session) -> None:
    """Report the number and size of the files that were written."""
    from stagec.output.tables import bytes_text

    files, size = sum(len(w.files) for w in written), sum(w.bytes for w in written)
    session.log(f"wrote {files} files, {bytes_text(size)}, to {output} {times}")


def write_one_archive(
    job: EmittedJob | PodsJob,
    path: Path,
    about: Mapping[str, object],
    session: Session,
    *,
    quiet: bool,
) -> None:
    """Write a job to an archive. Raises `DiagnosticError`."""
    from stagec.traces.archive import write_archive

    began = time.perf_counter()
    size = write_archive(job, path, about)
    if not quiet:
        session.log(f"wrote {path}, {size:,} bytes, in {time.perf_counter() - began:.2f} s")


def check_name(name: str) -> None:
    """Raise `DiagnosticError` for an invalid name of files."""
    plain = name.isascii() and all(c.isalnum() or c in "-_." for c in name)
    if not plain or name.startswith(".") or name == "manifest":
        raise error(
            f"'{name}' is not a valid name for the files of a job",
            remedy="use letters, digits, '-', '_' and '.', and not 'manifest', as in --name llama",
        )


#: The options of `compile` besides those of the job that affect traces, with their defaults.
_OF_TRACES: Mapping[str, object] = {
    "format": "chakra",
    "names": "full",
    "granularity": "op",
    "memory_events": False,
    "tensor_names": False,
    "name": None,
    "steps": None,
    "requests": None,
    "policy": "fcfs",
    "cache_blocks": None,
    "bucket": 1,
    "tick": None,
    "machine": None,
    "graphs": True,
    "used_ranks": None,
    "kernels_from": None,
    "peak_tflops": None,
    "memory_gbps": None,
}
_PACKAGES = ("lark", "numpy", "protobuf", "sympy")


def provenance(builder: JobBuilder, strategy: str, given: Mapping[str, Any]) -> dict[str, object]:
    """The command, digests of the texts, sizes, strategy and versions."""
    texts = {
        n: hashlib.sha256(s.text.encode()).hexdigest() for n, s in builder.module.sources.items()
    }
    texts |= {} if given["machine"] is None else _machine_texts(given["machine"])
    for table in given["measured"]:
        texts[str(table)] = hashlib.sha256(Path(table).read_bytes()).hexdigest()
    return {
        "model": builder.model_name,
        "command": command_of(builder.options, given),
        "inputs": texts,
        "symbols": builder.module.symbols,
        "strategy": strategy,
        "versions": {"stagec": __version__, **{p: version(p) for p in _PACKAGES}},
    }


def _machine_texts(machine: str) -> dict[str, str]:
    """The digests of the files that `--machine` names."""
    from stagec.machines import file_text, files_of

    return {
        path: hashlib.sha256(file_text(Path(path)).encode()).hexdigest()
        for path in files_of(machine)
    }


def command_of(options: JobOptions, given: Mapping[str, Any]) -> str:
    """The command line that writes the same traces."""
    return shlex.join(_command(options, given))


def _command(options: JobOptions, given: Mapping[str, Any]) -> Iterator[str]:
    """The words of the command line."""
    yield from ("stagec", "compile", *job_words(options))
    for table in given["measured"]:
        yield from words("measured", table)
    for name, usual in _OF_TRACES.items():
        if given[name] != usual:
            yield from words(name, _option_value(name, given[name]))


def _option_value(name: str, value: object) -> object:
    """A value in the form of its option, such as a tick in milliseconds."""
    if name == "used_ranks" and isinstance(value, Mapping):
        return used_text(cast("Mapping[str, int]", value))
    return str(Decimal(value) / 10**6) if name == "tick" and isinstance(value, int) else value
