"""Worker processes: the results of units of work, by any number of processes.

Workers are forks: they inherit the compiled job, and end when their parent does.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess  # Windows has none

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
    function: Callable[[U], R], workers: int, kind: Callable[[U], Hashable] | None = None
) -> Generator[Callable[[Sequence[U]], Generator[tuple[int, R]]]]:
    """The same for several lists of units: workers stay, with what they have found, until all is
    done. Units of a kind go to the worker that had the first of them; another one takes them only
    if none of them has been begun."""
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield lambda units: ((i, function(unit)) for i, unit in enumerate(units))
        return
    started: list[ForkProcess] = []
    pipes: list[Connection] = []
    try:
        # What Python runs around a fork would swallow a Ctrl-C.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                pipes.append(_started(function, started))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        homes: dict[Hashable, int] = {}
        yield lambda units: _results(pipes, units, _Runs(len(pipes), units, kind, homes))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.join()


class _Runs:
    """The units of each worker, by number: neighbours; or those of kinds that it had before, and of
    new kinds so many that all have work. `homes` are the workers of kinds."""

    def __init__(
        self,
        workers: int,
        units: Sequence[U],
        kind: Callable[[U], Hashable] | None,
        homes: dict[Hashable, int],
    ) -> None:
        self._homes, count = homes, len(units)
        bounds = [count * i // workers for i in range(workers + 1)]
        self._runs = [deque(range(*bounds[i : i + 2])) for i in range(workers)]
        self._kinds: Sequence[Hashable] = [None] * count if kind is None else [*map(kind, units)]
        if kind is None:
            return
        self._runs = [deque[int]() for _ in range(workers)]
        for each in sorted(dict.fromkeys(self._kinds), key=lambda k: k not in homes):
            shortest = min(range(workers), key=lambda i: len(self._runs[i]))
            home = homes.get(each, shortest)
            self._runs[home].extend(i for i in range(count) if self._kinds[i] == each)

    def next(self, worker: int) -> int | None:
        """The next unit for a worker: of its own, or else the last one of the longest run if its
        kind has no home yet."""
        run, longest = self._runs[worker], max(self._runs, key=len)
        number = run.popleft() if run else None
        if number is None and longest and self._kinds[longest[-1]] not in self._homes:
            number = longest.pop()
        if number is not None and self._kinds[number] is not None:
            self._homes.setdefault(self._kinds[number], worker)
        return number


def _results(
    pipes: Sequence[Connection], units: Sequence[Any], runs: _Runs
) -> Generator[tuple[int, Any]]:
    working: dict[Connection, int] = {}
    numbers = {pipe: i for i, pipe in enumerate(pipes)}
    for pipe in pipes:
        _give(pipe, runs.next(numbers[pipe]), units, working)
    while working:
        for pipe in cast("list[Connection]", wait(working)):
            number = working.pop(pipe)
            result = _received(pipe)
            _give(pipe, runs.next(numbers[pipe]), units, working)
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
    pipe: Connection, number: int | None, units: Sequence[Any], working: dict[Connection, int]
) -> None:
    """Give a worker a unit, if there is one for it."""
    if number is not None:
        try:
            pipe.send(units[number])
        except ConnectionError:
            raise _killed() from None
        working[pipe] = number


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
        "a worker process was killed; memory may have run out",
        remedy="run the same command with fewer --jobs; compile and materialize have --resume",
    )


# -- in a worker -----------------------------------------------------------------------------------


def _serve(
    other_end: Connection, pipe: Connection, function: Callable[[Any], Any], parent: int
) -> None:
    """Work until the pipe is closed."""
    other_end.close()
    _start(parent)
    gc.freeze()  # what is inherited is no garbage, and looking at it copies it
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
