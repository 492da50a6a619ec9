"""Workers of a Dask cluster, on any number of machines: the one place that knows Dask.

`cluster` gives what `workers.run_units` is to local processes: the results of units of work, with
their numbers. A unit whose worker is lost is run again by another one, so units must bear being run
twice.
"""

import importlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from stagec import __version__
from stagec.support.diagnostics import error

#: Runs a function for each unit: the results in any order, each with the number of its unit.
Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[tuple[int, Any]]]
SLURM = "slurm"
#: Seconds without any worker after which a cluster that is there counts as dead.
PATIENCE = 60.0
_POLL = 1.0
_CONNECT = 10.0
_ENVIRONMENT = "scheduler and workers must run in the same Python environment as this command"


@contextmanager
def cluster(scheduler: str, jobs: int | None = None) -> Generator[Run]:
    """The workers of a scheduler: an address, a scheduler file, or `slurm` for a cluster of `jobs`
    workers of its own, made by dask-jobqueue.

    Functions and units are sent by pickle, functions by name. What units raise is raised;
    `DiagnosticError` if the cluster cannot be reached or does not hold.
    """
    distributed = _package("distributed", "pip install 'stagec[dask]'")
    if (scheduler == SLURM) != (jobs is not None):
        raise error(
            "--jobs is the number of workers that --scheduler slurm starts; other schedulers have "
            "their own workers",
            remedy="use --scheduler slurm --jobs 8, or --scheduler ADDRESS without --jobs",
        )
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters is told here
    with ExitStack() as stack:
        place: dict[str, Any] = {"address": scheduler}
        if jobs is not None:
            place = {"address": stack.enter_context(_slurm(jobs))}
        try:
            if scheduler.endswith(".json"):
                Path(scheduler).open().close()  # Dask would wait for it
                place = {"scheduler_file": scheduler}
            client = distributed.Client(**place, timeout=_CONNECT)
        except (OSError, ValueError) as problem:
            raise error(
                f"cannot reach a Dask scheduler at '{scheduler}': {problem}",
                remedy="start one with 'dask scheduler', and give its address: tcp://HOST:8786",
            ) from None
        patience = PATIENCE if jobs is None else float("inf")  # a queue takes its time
        with client:
            yield lambda function, units: _results(client, function, units, patience)


def _package(name: str, remedy: str) -> Any:
    """An optional package without types. Raises `DiagnosticError`."""
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise error(
            f"--scheduler needs a package that is not installed: {problem}", remedy=remedy
        ) from None


def _slurm(jobs: int) -> Any:
    """A cluster as dask-jobqueue's own configuration file describes it."""
    dask_jobqueue = _package("dask_jobqueue", "pip install 'stagec[dask]' dask-jobqueue")
    try:
        made = dask_jobqueue.SLURMCluster()
    except (ValueError, TypeError) as problem:
        raise error(
            f"dask-jobqueue cannot start a cluster: {problem}",
            remedy="describe the workers under 'jobqueue: slurm:' in ~/.config/dask/jobqueue.yaml",
        ) from None
    made.scale(jobs)
    return made


def _results(
    client: Any, function: Callable[[Any], Any], units: Sequence[Any], patience: float
) -> Iterator[tuple[int, Any]]:
    futures = client.map(partial(_run, __version__, function), units, pure=False)
    try:
        for number in range(len(units)):
            _await(client, futures[0], patience)
            yield number, futures.pop(0).result()  # results are not kept
    except importlib.import_module("distributed.scheduler").KilledWorker as problem:
        raise error(
            f"several workers of the cluster died on the same unit of work: {problem}",
            remedy="read their logs (memory may run out), then repeat the command with --resume",
        ) from None
    except CancelledError:
        raise error(
            "lost the connection to the Dask scheduler",
            remedy="start it again, then repeat the command with --resume",
        ) from None
    except (ImportError, AttributeError, RuntimeError) as problem:
        raise error(f"the cluster failed: {problem}", remedy=_ENVIRONMENT) from None
    finally:
        if client.status == "running":
            client.cancel(futures, force=True)


def _run(version: str, function: Callable[[Any], Any], unit: Any) -> Any:
    """What a worker does."""
    if version != __version__:
        raise error(
            f"a worker runs stagec {__version__}, this command runs {version}",
            remedy="install the same version on all machines",
        )
    return function(unit)


def _await(client: Any, future: Any, patience: float) -> None:
    """Wait for a result, but not for workers that do not come."""
    wait = importlib.import_module("distributed").wait
    alive = time.monotonic()
    while not future.done():
        try:
            wait([future], timeout=_POLL)
        except TimeoutError:
            if client.status != "running":
                raise CancelledError from None
            if client.nthreads():
                alive = time.monotonic()
            elif time.monotonic() - alive > patience:
                raise error(
                    f"the cluster has had no worker for {patience:.0f} s",
                    remedy="start workers ('dask worker ADDRESS'), then repeat with --resume",
                ) from None
