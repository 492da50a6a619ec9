"""Messages that wait for their receivers: the replay against the clock node by node, and what a
machine says of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stagec.machines import load_machine, read_machine
from stagec.time.step import step_time
from tests.support import EXHAUSTIVE, stagec
from tests.unit.test_step_time import JOBS, check_step, compare, heard, issued_of, options_of

#: Jobs with messages; all but some are for `make test-all`.
STAGED = [name for name, (_, options) in JOBS.items() if "pp" in options]
USUAL = (("gpipe", False, 0, True), ("interleaved", True, 0, True), ("tied embeddings", True, 300))
ROWS = [
    pytest.param(job, all_, slowdown, one, marks=() if _usual else EXHAUSTIVE)
    for job in STAGED
    for all_ in (True, False)
    for slowdown in (0, 300)
    for one in (False, True)
    for _usual in [any((job, all_, slowdown, one)[: len(row)] == row for row in USUAL)]
]
WAITING = """
base = "h100-sxm"
title = "messages wait"
[efficiency.rendezvous]
above = "{above} B"
handshake = "8 KiB"
"""


@pytest.mark.parametrize(("job", "all_", "slowdown", "one_stream"), ROWS)
def test_the_replay_is_the_clock(job: str, slowdown: int, *, all_: bool, one_stream: bool) -> None:
    """Every node ends at the same picosecond, whether all messages wait or the larger ones do."""
    issued = issued_of(options_of(*JOBS[job]))
    eager = 0 if all_ else min(n.size for n in issued.samples if n.is_message)
    costs = dict.fromkeys(range(len(issued.classes)), partial(heard, eager))
    how: dict[str, Any] = {"overlap": True, "one_stream": one_stream}
    step, classes = compare(issued, costs, slowdown, **how, eager=eager)
    for each in classes:
        assert sum(each.parts(step).values()) == step
        assert min(each.parts(step).values()) > 0


def test_small_messages_do_not_wait() -> None:
    """A threshold that no message is above changes nothing; below it steps over a slow network are
    longer, and what they spend still adds up."""
    issued = issued_of(options_of(*JOBS["zbv"]))
    largest = max(n.size for n in issued.samples if n.is_message)
    slow = {"efficiency.host.issue": 0.0, "network.latency": 0.01}
    steps = [
        step_time(issued, machine.changed(slow))
        for machine in (
            load_machine("h100-sxm"),
            *(read_machine("m", WAITING.format(above=n), "m") for n in (largest, largest - 1)),
        )
    ]
    eager, above, below = (step.picoseconds for step in steps)
    assert eager == above < below
    check_step(steps[2])


def test_the_simulator_is_reported(tmp_path: Path) -> None:
    machine = Path(__file__).parents[2] / "docs/examples/astra-sim-rendezvous.toml"
    words = ("compile", "llama3-8b", "--set", "L=2,S=64", "--tp", "2", "--format", "astra-sim")
    done = stagec(*words, "--machine", str(machine), "-o", tmp_path, "--quiet")
    assert done.code == 0, done.err
    assert "--rendezvous-protocol=true" in (tmp_path / "run.sh").read_text()
    assert '"rendezvous": true' in (tmp_path / "stagec.json").read_text()
