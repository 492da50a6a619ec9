"""Worker processes: the results of units of work, by any number of processes.

Workers are forks: they inherit the compiled job, and end when their parent does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar, cast

from stagec.support.diagnostics import error

U = TypeVar("U")
R = TypeVar("R")

_PR_SET_PDEATHSIG = 1


def run_units(
    function: Callable[[U], R], units: Sequence[U], workers: int
) -> Generator[tuple[int, R]]:
    """The results of `function` for all units, as they come, each with the number of its unit.

    Units that are neighbours go to the same worker as long as all have work. With one worker, or
    where processes cannot be forked, all runs in this process. Raises what the function raises, and
    `DiagnosticError` if a worker is killed.
    """
    with crew(function, min(workers, len(units))) as run:
        yield from run(units)


@contextmanager
def crew(
    function: Callable[[U], R], workers: int
) -> Generator[Callable[[Sequence[U]], Generator[tuple[int, R]]]]:
    """The same for several lists of units: workers stay, with what they have found, until all is
    done."""
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield lambda units: ((i, function(unit)) for i, unit in enumerate(units))
        return
    started: list[ForkProcess] = []
    pipes: list[Connection] = []
    try:
        for _ in range(workers):
            pipes.append(_started(function, started))
        yield lambda units: _results(pipes, units)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.join()


def _results(pipes: Sequence[Connection], units: Sequence[Any]) -> Generator[tuple[int, Any]]:
    bounds = [len(units) * i // len(pipes) for i in range(len(pipes) + 1)]
    runs = [deque(range(*bounds[i : i + 2])) for i in range(len(pipes))]
    working: dict[Connection, tuple[deque[int], int]] = {}
    for pipe, run in zip(pipes, runs, strict=True):
        _give(pipe, run, runs, units, working)
    while working:
        for pipe in cast("list[Connection]", wait(working)):
            run, number = working.pop(pipe)
            result = _received(pipe)
            _give(pipe, run, runs, units, working)
            yield number, result


def _started(function: Callable[[Any], Any], started: list[ForkProcess]) -> Connection:
    """The pipe to a new worker."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    given = ours, theirs, function, os.getpid()
    process = context.Process(target=_serve, args=given, daemon=True)
    process.start()
    theirs.close()
    started.append(process)
    return ours


def _give(
    pipe: Connection,
    run: deque[int],
    runs: Sequence[deque[int]],
    units: Sequence[Any],
    working: dict[Connection, tuple[deque[int], int]],
) -> None:
    """The next unit of its run for a worker, or the last one of the longest run."""
    number = run.popleft() if run else None
    if number is None and (longest := max(runs, key=len)):
        number = longest.pop()
    if number is not None:
        try:
            pipe.send(units[number])
        except ConnectionError:
            raise _killed() from None
        working[pipe] = run, number


def _received(pipe: Connection) -> object:
    try:
        done, result = pipe.recv()
    except (EOFError, ConnectionError):
        raise _killed() from None
    if not done:
        raise result
    return result


def _killed() -> Exception:
    return error(
        "a worker process was killed, perhaps for lack of memory",
        remedy="run the same command with fewer --jobs; compile and materialize have --resume",
    )


# -- in a worker -----------------------------------------------------------------------------------


def _serve(
    other_end: Connection, pipe: Connection, function: Callable[[Any], Any], parent: int
) -> None:
    """Work until the pipe is closed."""
    other_end.close()
    _start(parent)
    try:
        while True:
            unit = pipe.recv()
            try:
                answer = True, function(unit)
            except Exception as problem:  # whatever it is, the parent raises it
                answer = False, problem
            pipe.send(answer)
    except (EOFError, ConnectionError):
        return


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
