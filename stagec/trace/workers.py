"""Worker processes: the results of units of work, in order, by any number of processes.

Workers are forks: they inherit the compiled job, and end when their parent does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar, cast

from stagec.support.diagnostics import error

U = TypeVar("U")
R = TypeVar("R")

_PR_SET_PDEATHSIG = 1
#: What the forks of this process run.
_function: list[Callable[[Any], Any]] = []


def run_units(function: Callable[[U], R], units: Sequence[U], workers: int) -> Iterator[R]:
    """The results of `function` for all units, in their order.

    With one worker, or where processes cannot be forked, all runs in this process. Raises what the
    function raises, and `OSError` if a worker is killed.
    """
    workers = min(workers, len(units))
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, units)
        return
    _function[:] = [function]
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _start, (os.getpid(),))
    try:
        futures = [pool.submit(_run, unit) for unit in units]
        for index in range(len(futures)):
            future, futures[index] = futures[index], _DONE  # results are not kept
            yield cast("R", future.result())
    except BrokenProcessPool:
        raise error(
            "a worker process was killed, perhaps for lack of memory",
            remedy="run the same command with --resume, with fewer --jobs",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        _function.clear()


_DONE: Future[Any] = Future()


def _run(unit: Any) -> Any:
    return _function[0](unit)


def _start(parent: int) -> None:
    """End with the parent, however it ends; leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):  # not Linux
        return
    if os.getppid() != parent:
        os._exit(1)
