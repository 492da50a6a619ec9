"""Writing a job by the workers of a cluster.

They get the path of an archive of the job, ranks and a folder, and materialize these ranks: the
file system must be shared. Files appear under their names when complete, so that a worker that is
lost, or that comes back, does no harm.
"""

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stagec.formats.base import Format
from stagec.formats.registry import BUILTIN
from stagec.support.diagnostics import error
from stagec.traces.archive import Archive, write_archive
from stagec.traces.cluster import Run
from stagec.traces.emit import EmittedJob
from stagec.traces.pod_programs import PodsJob
from stagec.traces.writer import Done, Elsewhere, Files, RankWriter, Unit

_SHARED = "driver and workers must share a file system, with the same paths"
#: Seconds until what a worker has written is seen here.
_LAG = 30.0
_opened = threading.local()


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """What a worker has to know beside the ranks."""

    archive: str
    digest: str
    format: Format
    folder: str
    compare: bool


def written_by(run: Run, source: EmittedJob | PodsJob | Archive) -> Elsewhere:
    """Writes files of a job with the workers that `run` gives work to."""

    def write(folder: Path, units: Sequence[Unit], compare: bool) -> Iterator[tuple[int, Done]]:
        with _stored(source, folder) as archive:
            path, place = archive.path.resolve(), folder.resolve()
            order = WorkOrder(str(path), archive.digest, archive.format, str(place), compare)
            for number, done in run(partial(_write, order), units):
                _arrived(folder, done[1])
                yield number, done

    return write


@contextmanager
def _stored(source: EmittedJob | PodsJob | Archive, folder: Path) -> Generator[Archive]:
    """An archive of the job: itself, or one beside the folder for as long as it is needed."""
    if isinstance(source, Archive):
        yield source
        return
    path = folder.with_name(f"{folder.name}.archive")
    try:
        write_archive(source, path, {})
        yield Archive.open(path, _brought(source.format))
    finally:
        path.unlink(missing_ok=True)


def _arrived(folder: Path, files: Files) -> None:
    """Raise `DiagnosticError` for files that are not where the driver looks for them."""
    deadline = time.monotonic() + _LAG
    while missing := [n for n, (size, _) in files.items() if _size(folder / n) != size]:
        if time.monotonic() > deadline:
            raise error(
                f"a worker wrote '{missing[0]}', which does not appear in '{folder}' here",
                remedy=_SHARED,
            )
        time.sleep(0.1)


def _brought(format_: Format) -> list[Format]:
    """The format, if it is one of a plug-in."""
    return [] if format_.name in BUILTIN else [format_]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


# -- in a worker ---------------------------------------------------------------------------------


def _write(order: WorkOrder, unit: Unit) -> Done:
    """Write some ranks; each thread of a worker keeps what it has opened last."""
    kept: Mapping[WorkOrder, RankWriter] = getattr(_opened, "writers", {})
    if order not in kept:
        _opened.writers = kept = {order: _writer(order)}
    return kept[order].write(unit)


def _writer(order: WorkOrder) -> RankWriter:
    path, folder = Path(order.archive), Path(order.folder)
    if not folder.is_dir() or not path.is_file():
        raise error(f"a worker cannot see '{path}' or '{folder}'", remedy=_SHARED)
    archive = Archive.open(path, _brought(order.format))
    if archive.digest != order.digest:
        raise error(f"a worker reads a different file at '{path}'", remedy=_SHARED)
    return RankWriter(archive, folder, order.compare, by_rename=True)
