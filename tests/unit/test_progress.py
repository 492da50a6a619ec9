"""Long work says what goes on, and an interrupt what is known so far."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagec.answers.time.timed import time_job
from stagec.jobs.request.machine import machine_of
from stagec.jobs.request.options import JobOptions
from stagec.jobs.serve_steps import _counted  # pyright: ignore[reportPrivateUsage]
from stagec.jobs.session import Session
from stagec.serving.step import SequenceClass, Step, step_of
from stagec.serving.stepped import StepTime
from tests.support import stagec


def test_a_step_tells_each_of_its_passes_and_the_replay() -> None:
    expected: list[str] = []
    options = JobOptions("llama3-8b", sizes={"L": 2, "B": 2}, tp=2)
    time_job(
        options,
        machine_of("h100-sxm", Session()),
        Session(),
        levers=False,
        progress=expected.append,
    )
    passes = [line for line in expected if line.startswith("compiling, pass ")]
    numbers = [tuple(map(int, line.split(":")[0].split()[2::2])) for line in passes]
    assert [n for n, _ in numbers] == sorted({n for n, _ in numbers})
    assert len({count for _, count in numbers}) == 1
    assert numbers[-1][0] <= numbers[-1][1]
    assert expected[-1] == "replaying the step on the machine"


def test_steps_of_a_server_are_counted_while_they_are_timed() -> None:
    expected: list[str] = []
    step = step_of([SequenceClass(1, 10, 1)])
    counted = _counted(lambda _: (7, 7), 500, expected.append)
    assert [counted(step) for _ in range(201)] == [(7, 7)] * 201
    assert expected == [f"serving: {n} of at most 500 steps timed" for n in (1, 101, 201)]


def test_an_interrupted_server_says_how_many_requests_it_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is done before the other, which takes a million steps."""
    file = tmp_path / "requests.csv"
    file.write_text("arrival,prompt,output\n0,8,2\n0,8,1000000\n")
    timed: list[Step] = []

    def time(step: Step) -> tuple[int, int]:
        timed.append(step)
        if len(timed) > 20:
            raise KeyboardInterrupt
        return 1, 1

    def times(*_: object) -> StepTime:
        return time

    monkeypatch.setattr("stagec.answers.compile_steps.step_times", times)
    words = ("compile", "llama3-8b", "--serve", "mixed", "--set", "L=2", "--machine", "h100-sxm")
    ran = stagec(*words, "--requests", file, "-o", tmp_path / "out")
    assert ran.code == 130
    assert "interrupted with 1 of 2 requests served" in ran.err
    assert not (tmp_path / "out").exists()
