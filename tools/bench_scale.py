"""Measures emission at scale: seconds, rate and memory relative to plain writes of files of the
same sizes, by as many processes, to the same disk in the same run; archives, single ranks and
checks.

`python tools/bench.py scale` prints JSON. Both sides are measured in turn, and the best of each are
compared. Writing to memory that a virtual machine has returned to its host is several times slower,
so both sides wait until previous files have been removed. A job of more than `--limit` bytes is
written for as many of its first ranks as fit, whose number is in the JSON.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stagec.support.processors import processors

#: The number of measurements of both sides.
TURNS = 3
#: The seconds until a host has reclaimed freed memory.
_PAUSE = 6.0

LLAMA: dict[str, Any] = {"tp": 8, "pp": 8, "sp": True, "microbatches": 8}
#: name, model, options, ranks in one data-parallel group
JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("llama3-70b", {**LLAMA, "dp": n // 64, "sizes": {"B": 8 * n // 64, "S": 8192}})
        for n in (64, 512, 4096, 32768)
    ),
    *(
        ("gpt-1008b", {"tp": 8, "pp": 64, "dp": 6, "sizes": {"B": 6 * m}, "microbatches": m})
        for m in (32, 512)
    ),
)
ARCHIVE = ("llama3-405b", {**LLAMA, "cp": 2, "pp": 16, "dp": 512, "sizes": {"B": 4096, "S": 8192}})


def scale(folder: Path, limit: int, largest: int) -> dict[str, Any]:
    """Measure all jobs of at most `largest` ranks, writing at most `limit` bytes at a time."""
    jobs = [j for j in JOBS if _ranks(j[1]) <= largest]
    return {
        "processors": processors(),
        "written": [_beside_plain(folder, *job, limit) for job in jobs],
        "archive": measured(_archive, folder, *ARCHIVE),
    }


def measured(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """The result of a function in a new process, with the peak memory of it and its workers
    together (proportional shares, sampled)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    peak = 0
    while not ours.poll(0.1):
        peak = max(peak, sum(_memory(p) for p in _family(process.pid or 0)))
    figures: dict[str, Any] = ours.recv()
    process.join()
    return {**figures, "peak_mb": round(peak / 1024)}


def _send(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _family(int(child))
    except OSError:
        return


def _memory(pid: int) -> int:
    """The memory of a process in kilobytes, with proportional shares of shared memory."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _ranks(options: dict[str, Any]) -> int:
    ranks = 1
    for axis in ("tp", "pp", "dp", "cp"):
        ranks *= options.get(axis, 1)
    return ranks


def _beside_plain(folder: Path, model: str, options: dict[str, Any], limit: int) -> dict[str, Any]:
    sizes: list[int] = measured(_emit, folder, model, options, limit)["sizes"]
    ours: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    for _ in range(TURNS):
        plain.append(measured(_plain, folder, sizes))
        ours.append(measured(_emit, folder, model, options, limit))

    def best(runs: list[dict[str, Any]], name: str) -> float:
        seconds: list[float] = [run[name] for run in runs]
        return min(seconds)

    total, emission, writing = sum(sizes), best(ours, "seconds"), best(plain, "seconds")
    lowering = best(ours, "seconds_to_lowered")
    return {
        **{n: ours[0][n] for n in ("model", "ranks", "ranks_written", "microbatches")},
        "files": len(sizes),
        "bytes": total,
        "seconds_to_lowered": lowering,
        "seconds_emission": emission,
        "seconds_plain": writing,
        "all_seconds_emission": [run["seconds"] for run in ours],
        "all_seconds_plain": [run["seconds"] for run in plain],
        "cpu_seconds_emission": best(ours, "cpu_seconds"),
        "cpu_seconds_plain": best(plain, "cpu_seconds"),
        "rate_mb_s": round(total / emission / 1e6),
        "rate_plain_mb_s": round(total / max(writing, 0.01) / 1e6),
        "rate_over_plain": round(writing / emission, 2),
        "within_1.3_plain_plus_5": lowering + emission < 1.3 * writing + 5,
        "peak_mb": max(run["peak_mb"] for run in ours),
        "load": round(os.getloadavg()[0], 1),
    }


def _emit(folder: Path, model: str, options: dict[str, Any], limit: int) -> dict[str, Any]:
    from stagec.jobs.builder import JobBuilder
    from stagec.jobs.request.options import JobOptions
    from stagec.traces.emit import make_job
    from stagec.traces.writer import Emission, parse_ranges, write_source

    began = time.perf_counter()
    job = make_job(JobBuilder(JobOptions(model, **options)).lower(), "job")
    lowered = time.perf_counter()
    largest = max(len(job.encoder(n).rank(int(job.members[n][0]))) for n in (0, -1))
    count = min(job.groups.ranks, limit // largest)
    ranks = None if count == job.groups.ranks else parse_ranges(f"0-{count - 1}")
    target = Path(tempfile.mkdtemp(dir=folder, prefix="stagec-scale-")) / "job"
    try:
        with _timed() as times:
            written = write_source(job, target, {}, Emission(ranks, processors()))
    finally:
        shutil.rmtree(target.parent, ignore_errors=True)
    return {
        "model": model,
        "ranks": job.groups.ranks,
        "ranks_written": count,
        "microbatches": options["microbatches"],
        "seconds_to_lowered": round(lowered - began, 2),
        **times,
        "sizes": list(written.files.values()),
    }


def _plain(folder: Path, sizes: list[int]) -> dict[str, Any]:
    """Only write files of the same sizes by the same number of processes."""
    target = Path(tempfile.mkdtemp(dir=folder, prefix="stagec-plain-"))
    block = memoryview(os.urandom(1 << 20) * (max(sizes) // (1 << 20) + 1))

    def write(first: int) -> None:
        for number in range(first, len(sizes), processors()):
            (target / str(number)).write_bytes(block[: sizes[number]])

    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write, args=(first,)) for first in range(processors())]
    try:
        with _timed() as times:
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join()
        return times
    finally:
        shutil.rmtree(target, ignore_errors=True)


@contextmanager
def _timed() -> Generator[dict[str, float]]:
    """A context that measures wall and CPU seconds of this process and its children, after waiting
    for the removal of previous files."""
    os.sync()
    time.sleep(_PAUSE)
    seconds: dict[str, float] = {}
    began, before = time.perf_counter(), os.times()
    yield seconds
    seconds["seconds"] = round(time.perf_counter() - began, 2)
    seconds["cpu_seconds"] = round(sum(os.times()[:4]) - sum(before[:4]), 2)


def _archive(folder: Path, model: str, options: dict[str, Any]) -> dict[str, Any]:
    from stagec.check.archive import check_archive
    from stagec.jobs.builder import JobBuilder
    from stagec.jobs.request.options import JobOptions
    from stagec.traces.archive import Archive, write_archive
    from stagec.traces.emit import make_job

    path = folder / f"stagec-scale-{os.getpid()}.archive"
    times = [time.perf_counter()]

    def lap() -> float:
        times.append(time.perf_counter())
        return round(times[-1] - times[-2], 3)

    try:
        job = make_job(JobBuilder(JobOptions(model, **options)).lower(), "job")
        lowered = lap()
        size = write_archive(job, path, {})
        written = lap()
        archive = Archive.open(path)
        opened = lap()
        rank = job.groups.ranks // 2 + 1
        archive.encoder(archive.class_of(rank)).rank(rank)
        one = lap()
        report = check_archive(path)
        return {
            "model": model,
            "ranks": job.groups.ranks,
            "bytes": size,
            "seconds_to_lowered": lowered,
            "seconds_writing": written,
            "seconds_opening": opened,
            "seconds_one_rank": one,
            "seconds_check": lap(),
            "check_ok": report.ok(),
            "nodes": report.nodes,
        }
    finally:
        path.unlink(missing_ok=True)
