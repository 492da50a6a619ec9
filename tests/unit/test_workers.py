"""Worker processes: every unit once, whoever does it; failures are reported, and nobody is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from itertools import pairwise

import pytest

from stagec.ir.expr import UnboundError
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError, error
from stagec.traces.workers import crew, run_units


def who(unit: int) -> tuple[int, int]:
    time.sleep(0.01)
    return unit, os.getpid()


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_every_unit_is_done_once(count: int, workers: int) -> None:
    actual = list(run_units(who, range(count), workers))
    assert sorted(number for number, _ in actual) == list(range(count))
    assert all(number == unit for number, (unit, _) in actual)
    processes = {process for _, (_, process) in actual}
    assert len(processes) == min(workers, count)
    assert (os.getpid() in processes) == (min(workers, count) == 1)
    assert not multiprocessing.active_children()


def test_neighbours_go_to_the_same_worker() -> None:
    actual = dict(run_units(who, range(40), 2))
    in_order = [actual[number][1] for number in range(40)]
    changes = sum(a != b for a, b in pairwise(in_order))
    assert changes < 10, "a program would be made by every worker again and again"


def test_who_is_done_takes_over_from_who_is_slow() -> None:
    def slow_at_first(unit: int) -> int:
        time.sleep(0.5 if unit == 0 else 0.001)
        return os.getpid()

    actual = dict(run_units(slow_at_first, range(20), 2))
    assert sum(process == actual[0] for process in actual.values()) < 5


def test_what_a_worker_raises_is_raised() -> None:
    def failing(unit: int) -> int:
        if unit == 3:
            raise OSError(28, "No space left on device", "some file")
        return unit

    with pytest.raises(OSError, match="No space left") as caught:
        list(run_units(failing, range(8), 2))
    assert (caught.value.errno, caught.value.filename) == (28, "some file")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("moment", [0.0, 0.02])
def test_a_killed_worker_is_reported(moment: float) -> None:
    def dying(unit: int) -> int:
        if unit == 2:
            time.sleep(moment)
            os.kill(os.getpid(), signal.SIGKILL)
        return unit

    with pytest.raises(DiagnosticError, match="killed") as caught:
        list(run_units(dying, range(8), 2))
    assert "--jobs" in str(caught.value.diagnostics[0].remedy)
    assert not multiprocessing.active_children()


def test_an_interrupt_during_a_fork_is_raised() -> None:
    """Python ignores what is raised in its hooks around a fork."""
    script = (
        "import os, signal\n"
        "from stagec.traces.workers import run_units\n"
        "os.register_at_fork(before=lambda: signal.raise_signal(signal.SIGINT))\n"
        "print(len(list(run_units(abs, range(4), 2))))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.stderr.splitlines()[-1]) == ("", "KeyboardInterrupt")
    assert "ignored" not in ran.stderr


def test_who_stops_asking_leaves_no_worker() -> None:
    results = run_units(who, range(50), 3)
    next(results)
    results.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "problem",
    [
        NotAnIntegerError("B/3", Fraction(1, 3)),
        UnboundError(["B", "S"]),
        error("no such thing", remedy="make one"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_errors_cross_processes(problem: Exception) -> None:
    def failing(unit: int) -> int:
        raise problem

    with pytest.raises(type(problem)) as caught:
        list(run_units(failing, range(4), 2))
    assert str(caught.value) == str(problem)
    assert vars(caught.value) == vars(problem)


def test_units_of_a_kind_stay_with_a_worker() -> None:
    """From list to list, whatever else there is to do; kinds are spread over all workers."""
    with crew(who, 2, lambda unit: unit % 4) as run:
        seen = [dict(run(range(16))) for _ in range(3)]
    homes = [{actual[n][1] for actual in seen for n in range(kind, 16, 4)} for kind in range(4)]
    assert all(len(home) == 1 for home in homes)
    assert len({process for home in homes for process in home}) == 2
