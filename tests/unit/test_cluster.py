"""Writing by a Dask cluster of worker processes: the same bytes, whatever workers are lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stagec.jobs.builder import JobBuilder
from stagec.support.diagnostics import DiagnosticError
from stagec.traces import cluster as engine
from stagec.traces import remote, writer
from stagec.traces.archive import Archive
from stagec.traces.cluster import cluster
from stagec.traces.emit import EmittedJob, make_job
from stagec.traces.remote import written_by
from stagec.traces.writer import Emission, write_source
from tests.support import LLAMA, LONG, stagec, tiny_options, tries

dask: Any = pytest.importorskip("dask")
distributed: Any = pytest.importorskip("distributed")

SIZES = "L=4,B=32,S=4,D=8,H=4,G=4,K=2,F=8,V=16"
HOW = ["--dp", "4", "--tp", "2", "--pp", "2", "--microbatches", "4", "--quiet"]
#: Units of work after which a worker is killed.
KILLS = (1, 8, 16)[: tries(3)]
JOB = ["compile", LLAMA, "--set", SIZES, *HOW]


def local_cluster(workers: int, threads: int = 1) -> Any:
    """Workers are processes, the scheduler is a thread here. One process imports what all need, and
    workers are forks of it."""
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=threads,
        processes=True,
        dashboard_address=":0",
        silence_logs=50,
    )


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    with local_cluster(2, threads=2) as made:
        yield made


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is a unit of work."""
    monkeypatch.setattr(writer, "_UNIT_BYTES", 1)


def job() -> EmittedJob:
    """A pipeline of two stages, 32 ranks."""
    options = tiny_options(LLAMA, dp=16, pp=2, microbatches=4, sizes={"B": 64})
    return make_job(JobBuilder(options).lower(), "tiny")


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@LONG
def test_a_cluster_writes_what_one_process_writes(local: Any, tmp_path: Path) -> None:
    on = ["--scheduler", local.scheduler_address]
    assert stagec(*JOB, "-o", tmp_path / "here").code == 0
    ran = stagec(*JOB, "-o", tmp_path / "there", *on)
    assert ran.code == 0, ran.err
    expected = content(tmp_path / "here")
    assert content(tmp_path / "there") == expected
    assert stagec(*JOB, "--archive", tmp_path / "job.stagec").code == 0
    some: list[str | Path] = [
        "materialize",
        tmp_path / "job.stagec",
        "--only-ranks",
        "3,9-11",
        "--quiet",
    ]
    assert stagec(*some, "-o", tmp_path / "some-here").code == 0
    assert stagec(*some, "-o", tmp_path / "some-there", *on).code == 0
    assert content(tmp_path / "some-there") == content(tmp_path / "some-here")
    names = ["here", "job.stagec", "some-here", "some-there", "there"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names, "an archive was left"


@LONG
def test_a_cluster_writes_pods(local: Any, tmp_path: Path) -> None:
    sizes = "L=2,D=64,H=8,G=4,K=8,F=128,V=128"
    step = ("--serve", "disaggregated", "--batch", "8", "--prompt", "16", "--set", sizes)
    pods = ("--prefill", "tp=2,pp=2,microbatches=2", "--decode", "tp=2,dp=2", "--quiet")
    words = ("compile", "llama3-8b", *step, *pods)
    assert stagec(*words, "-o", tmp_path / "here").code == 0
    ran = stagec(*words, "-o", tmp_path / "there", "--scheduler", local.scheduler_address)
    assert ran.code == 0, ran.err
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_a_cluster_completes_what_an_interrupted_run_left(local: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stagec(*JOB, "-o", out).code == 0
    expected = content(out)
    (out / f"{LLAMA}.3.et").write_bytes(b"damaged")
    untouched = (out / f"{LLAMA}.4.et").stat().st_mtime_ns
    assert stagec(*JOB, "-o", out, "--resume", "--scheduler", local.scheduler_address).code == 0
    assert content(out) == expected
    assert (out / f"{LLAMA}.4.et").stat().st_mtime_ns == untouched


def slowly(function: Callable[[Any], Any], unit: Any) -> Any:
    """What a worker runs: slow enough to be lost meanwhile."""
    time.sleep(0.05)
    return function(unit)


def write_on(address: str, directory: Path, progress: Callable[[int, int], None]) -> None:
    """Write the job by the workers of a cluster."""
    made = job()
    with cluster(address) as run:
        elsewhere = written_by(lambda function, units: run(partial(slowly, function), units), made)
        write_source(made, directory, {}, Emission(progress=progress, elsewhere=elsewhere))


@LONG
def test_the_loss_of_workers_in_mid_run_changes_nothing(tmp_path: Path) -> None:
    write_source(job(), tmp_path / "expected", {})
    lost: list[int] = []
    with local_cluster(2) as made, distributed.Client(made, set_as_default=False) as client:

        def lose_one(done: int, _total: int) -> None:
            """Kill a worker that has work to do, no more often than a unit bears it."""
            busy = [a for a, w in dict(made.scheduler.workers).items() if w.processing]
            if not busy or len(lost) == len(KILLS) or done < KILLS[len(lost)]:
                return
            pids: dict[str, int] = client.run(os.getpid, workers=busy[:1])
            lost.extend(pids.values())
            os.kill(lost[-1], signal.SIGKILL)
            (tmp_path / ".out.partial" / ".tiny.0.et.half").write_bytes(b"what it was writing")

        write_on(made.scheduler_address, tmp_path / "out", lose_one)
    assert lost
    assert content(tmp_path / "out") == content(tmp_path / "expected")


@LONG
def test_a_scheduler_that_is_lost_leaves_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PATIENCE", 0.5)
    made = local_cluster(1)

    def lose_all(_done: int, _total: int) -> None:
        made.close()

    with pytest.raises(DiagnosticError) as caught:
        write_on(made.scheduler_address, tmp_path / "out", lose_all)
    assert "--resume" in str(caught.value.diagnostics[0].remedy)


@LONG
def test_a_cluster_analyzes_what_processes_here_analyze(local: Any) -> None:
    swept = ["analyze", LLAMA, "--set", "L=4", "--json", "--sweep", "tp=1,2,3,4"]
    ran = stagec(*swept, "--scheduler", local.scheduler_address)
    assert ran.code == 0, ran.err
    assert ran.out == stagec(*swept).out


# -- what cannot work ends in a message


def refusal(tmp_path: Path, *more: str) -> str:
    ran = stagec(*JOB, "-o", tmp_path / "out", *more)
    assert (ran.code, "\n  help: " in ran.err) == (1, True), ran.err
    assert not (tmp_path / "out").exists()
    return ran.err


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "pip install 'stagec[dask]'" in refusal(tmp_path, "--scheduler", "tcp://127.0.0.1:1")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense", "ftp://x:1", "nowhere.json"])
def test_without_a_scheduler(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_CONNECT", 0.2)
    assert f"cannot reach a Dask scheduler at '{address}'" in refusal(
        tmp_path, "--scheduler", address
    )


def test_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PATIENCE", 0.1)
    with local_cluster(0) as made:
        message = refusal(tmp_path, "--scheduler", made.scheduler_address)
    assert "has had no worker" in message


def test_an_archive_is_not_for_a_cluster(tmp_path: Path) -> None:
    ran = stagec(*JOB, "--archive", tmp_path / "x", "--scheduler", "tcp://127.0.0.1:1")
    assert (ran.code, "leave these options out" in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"archive": "/nowhere/job"}, "cannot see"),
        ({"folder": "/nowhere/out"}, "cannot see"),
        ({"digest": "0"}, "reads a different file"),
    ],
)
def test_a_worker_that_sees_something_else_says_so(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert stagec(*JOB, "--archive", tmp_path / "job").code == 0
    archive = Archive.open(tmp_path / "job")
    right = remote.WorkOrder(
        str(archive.path), archive.digest, archive.format, str(tmp_path), compare=False
    )
    unit = 0, archive.members[0][:1]
    write = remote._write  # pyright: ignore[reportPrivateUsage]
    assert write(right, unit)[1]
    with pytest.raises(DiagnosticError) as caught:
        write(replace(right, **changed), unit)
    assert message in f"{caught.value} {caught.value.diagnostics[0].remedy}"


def test_a_worker_of_another_version_says_so(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "__version__", "0.0.0")
    with cluster(local.scheduler_address) as run, pytest.raises(DiagnosticError) as caught:
        list(run(abs, [1]))
    assert "this command runs 0.0.0" in str(caught.value)


# -- SLURM: dask-jobqueue makes the cluster, so here is something in its place


@LONG
def test_a_cluster_of_slurm_jobs_is_asked_for_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = ModuleType("dask_jobqueue")
    fake.SLURMCluster = lambda: local_cluster(0)
    monkeypatch.setitem(sys.modules, "dask_jobqueue", fake)
    assert "--jobs 8" in refusal(tmp_path, "--scheduler", "slurm")
    ran = stagec(*JOB, "-o", tmp_path / "out", "--scheduler", "slurm", "--jobs", "2")
    assert ran.code == 0, ran.err
    assert stagec(*JOB, "-o", tmp_path / "here").code == 0
    assert content(tmp_path / "out") == content(tmp_path / "here")


def test_slurm_without_its_package_or_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unconfigured() -> None:
        raise ValueError("You must specify how much cores to use per job")

    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    assert "dask-jobqueue" in refusal(tmp_path, "--scheduler", "slurm", "--jobs", "2")
    fake: Any = ModuleType("dask_jobqueue")
    fake.SLURMCluster = unconfigured
    monkeypatch.setitem(sys.modules, "dask_jobqueue", fake)
    assert "jobqueue.yaml" in refusal(tmp_path, "--scheduler", "slurm", "--jobs", "2")
