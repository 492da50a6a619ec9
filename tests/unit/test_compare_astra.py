"""The comparison with ASTRA-sim: the tool with a stand-in for the program, and with the program
where `ASTRA_SIM` names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagec.machines import load_machine
from stagec.support.diagnostics import DiagnosticError
from tests.support import LLAMA, LONG, TINY
from tools.compare_astra import JOBS, MACHINE, compared

TOLERANCE = 0.03
SIZES = ",".join(f"{name}={size}" for name, size in TINY[LLAMA].items())
JOB = {"one": [LLAMA, "--set", SIZES]}
SMALL = {name: JOBS[name] for name in ("one device, tiny", "FSDP, tiny", "1F1B, tiny")}


def stand_in(folder: Path, ends: str) -> Path:
    """A program that tells these ends, whatever it reads."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{ends}\nEND\n")
    program.chmod(0o755)
    return program


@pytest.mark.long
def test_the_last_rank_is_compared(tmp_path: Path) -> None:
    more = ", exposed communication 2 cycles."
    ends = f"sys[0] finished, 70 cycles{more}\nsys[1] finished, 90 cycles{more}"
    program = stand_in(tmp_path, ends)
    (actual,) = compared(program, MACHINE, JOB, tmp_path / "traces")
    assert (actual.ranks, actual.theirs) == (1, 90)
    assert actual.difference == pytest.approx(actual.ours / 90 - 1)


@LONG
def test_a_rank_that_does_not_end_is_reported(tmp_path: Path) -> None:
    end = "sys[0] finished, 70 cycles, exposed communication 2 cycles."
    program = stand_in(tmp_path, end)
    with pytest.raises(DiagnosticError, match="1 of 2 ranks"):
        list(compared(program, MACHINE, JOB, tmp_path / "traces"))


def test_all_types_have_the_peak_of_the_simulator() -> None:
    """Otherwise steps in fp8 would be faster here: `peak-perf` is one for all types."""
    rates = load_machine(str(MACHINE)).compute.matrix
    assert {dtype: rate.value for dtype, rate in rates.items() if rate.value != 989e12} == {}


@pytest.mark.skipif("ASTRA_SIM" not in os.environ, reason="ASTRA_SIM names no program")
@pytest.mark.parametrize("name", SMALL)
def test_times_are_those_of_the_simulator(tmp_path: Path, name: str) -> None:
    (actual,) = compared(Path(os.environ["ASTRA_SIM"]), MACHINE, {name: SMALL[name]}, tmp_path)
    assert abs(actual.difference) < TOLERANCE
