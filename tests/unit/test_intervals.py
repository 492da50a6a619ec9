"""Intervals of seconds, from errors of a stack's measured rows."""

from __future__ import annotations

import csv
from typing import Any

import pytest

import stagec
from stagec.answers.intervals import STEP, TPOT, TTFT, Interval, kind_of, stack_errors
from stagec.answers.time.table import seconds_text
from stagec.ir_spec.strategy.sustained import FAMILIES
from stagec.machines import load_machine
from stagec.models import library_text, stacks


def test_the_table_is_of_stacks_and_families_that_are_there() -> None:
    """Rows stand once, are of enough measurements, and their ends are in order. Devices of which
    only a data sheet is known are less certain than any stack that was measured."""
    rows = list(csv.DictReader(library_text("stacks/errors.csv").splitlines()))
    keys = [(row["stack"], row["family"], row["kind"]) for row in rows]
    assert len({*keys}) == len(keys) > 0
    for (stack, family, kind), row in zip(keys, rows, strict=True):
        assert stack in stacks() or (not stack and kind == STEP)
        assert family in FAMILIES or not (stack or family)
        assert kind in (STEP, TTFT, TPOT)
        assert int(row["rows"]) >= 5
        assert 0 < float(row["low"]) <= float(row["high"])
    width = [float(row["high"]) / float(row["low"]) for row in rows]
    steps = {key: each for key, each in zip(keys, width, strict=True) if key[2] == STEP}
    own = [each for (stack, _, _), each in steps.items() if stack]
    assert max(own) < steps["", "", STEP]


def test_what_is_known_is_by_stack_family_and_kind() -> None:
    h100 = load_machine("h100-sxm")
    errors = stack_errors("nemo@25.11", h100)
    assert errors is not None
    assert errors.intervals[STEP] is not None
    assert errors.intervals[TPOT] is None
    assert errors.rows_text(TPOT) == "no measured servers of nemo on hopper"
    assert stack_errors("ideal", h100) is None


@pytest.mark.parametrize(
    ("stack", "machine", "whose"),
    [
        ("nemo@24.07", "h100-sxm", "of other software on hopper"),
        ("torchtitan", "b200", "of other software on blackwell"),
        ("nemo", "mi300x", "on other devices"),
        ("maxtext", "tpu-v5p", "on other devices"),
    ],
)
def test_what_was_not_measured_has_the_errors_of_others(
    stack: str, machine: str, whose: str
) -> None:
    errors = stack_errors(stack, load_machine(machine))
    assert errors is not None
    assert errors.intervals[TTFT] is None
    assert errors.intervals[STEP] is not None
    assert errors.rows_text(STEP).endswith(f" measured steps {whose}")


def test_seconds_are_parts_of_what_is_predicted() -> None:
    assert Interval(0.5, 2.0, 7).of(3.0) == {"low_seconds": 1.5, "high_seconds": 6.0, "measured": 7}


@pytest.mark.parametrize(("serve", "kind"), [(None, STEP), ("prefill", TTFT), ("decode", TPOT)])
def test_steps_of_serving_are_like_servers(serve: str | None, kind: str) -> None:
    assert kind_of(serve) == kind


def test_answers_have_them() -> None:
    """Of a stack they stand in JSON and in the text, of the ideal program nowhere."""
    job = stagec.job("llama3-8b", tp=8, sizes={"L": 1, "B": 1, "S": 64}, stack="nemo")
    step = job.time("h100-sxm")
    actual = step.as_json()["interval"]
    assert actual["low_seconds"] <= actual["high_seconds"]
    assert f"as 8 of 10 of {actual['measured']} measured steps of nemo on hopper" in str(step)
    ideal = stagec.job("llama3-8b", tp=8, sizes={"L": 1, "B": 1, "S": 64}).time("h100-sxm")
    assert "interval" not in ideal.as_json()
    assert "interval" not in str(ideal)


@pytest.mark.long
def test_rows_have_them() -> None:
    """Rows of sweeps and searches have that of their own seconds, which `time` gives alone."""
    sizes = {"L": 1, "B": 2, "S": 64}
    about: dict[str, Any] = {"machine": "h100-sxm", "sizes": sizes, "stack": "nemo"}
    swept = stagec.sweep("llama3-8b", {"tp": [1, 2]}, **about)
    rows = swept.rows()
    header, *lines = str(swept).splitlines()[2:]
    assert "8 of 10 from" in header
    assert len(lines[1:]) >= len(rows) == 2
    for line, row in zip(lines[1:], rows, strict=False):
        interval = row["time"]["interval"]
        assert all(seconds_text(interval[n]) in line for n in ("low_seconds", "high_seconds"))
    assert "8 of 10" not in str(
        stagec.sweep("llama3-8b", {"tp": [1, 2]}, **about | {"stack": "ideal"})
    )
    search: Any = stagec.search
    actual = search("llama3-8b", ranks=2, tp=2, zero=1, cp=1, **about)
    for row in (*(row["time"] for row in rows), actual.best[0].row):
        part = row["interval"]["high_seconds"] / row["step_seconds"]
        assert part == pytest.approx(row["interval"]["low_seconds"] / row["step_seconds"], abs=0.2)
        assert row["interval"]["measured"] >= 5
    assert "as 8 of 10 of" in str(actual)
    alone = stagec.job("llama3-8b", tp=2, sizes=sizes, stack="nemo").time("h100-sxm")
    assert rows[1]["time"]["interval"] == alone.as_json()["interval"]
