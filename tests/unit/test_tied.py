"""What joins pipeline stages, as the gradient of a tied embedding, is summed behind the schedule.
So a device with one place for communication is not held up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.builder import JobBuilder
from stagec.program.classes import rank_classes
from stagec.program.nodes import Node
from stagec.schedule.registry import SCHEDULES
from tests.one_queue import unfinished
from tests.support import GPT, KINDS, LONG, crossed, one_of_each_kind, stagec, tiny_options

MORE: list[dict[str, Any]] = [{}, {"dp": 2, "ddp_bucket": 300}, {"dp": 2, "zero": 1}]


def programs(schedule: str, more: dict[str, Any]) -> dict[int, list[Node]]:
    """The nodes of each stage of a GPT, whose first and last stage share the embedding."""
    options: dict[str, Any] = {"pp": 4, "microbatches": 8, "schedule": schedule, **more}
    module = JobBuilder(tiny_options(GPT, sizes={"B": 16, "L": 8}, **options)).lower()
    return {each.stage: each.program().nodes for each in rank_classes(module)}


@LONG
@crossed(one_of_each_kind, more=MORE, schedule=SCHEDULES)
def test_one_place_for_communication_is_enough(schedule: str, more: dict[str, Any]) -> None:
    assert unfinished(programs(schedule, more), "pp") == {}


@pytest.mark.parametrize("more", MORE)
def test_a_sum_over_stages_is_issued_behind_the_last_send(more: dict[str, Any]) -> None:
    for stage, nodes in programs("1f1b", more).items():
        sums = [n for n in nodes if "pp" in n.group.axes and n.phase == "gradient"]
        assert bool(sums) == (stage in (0, 3))
        before = [n for n in nodes if n.phase == "backward"]
        last = [n for n in before if n.is_computation][-1]
        for node in sums:
            assert all(n.id < node.id for n in before)
            assert last in (*node.deps, *node.after)


def test_a_sum_that_starts_at_once_holds_up_a_send() -> None:
    """The queue of tests/one_queue.py notices what the order is there for."""
    nodes = programs("1f1b", {})
    for mine in nodes.values():
        for node in mine:
            if "pp" in node.group.axes and node.phase == "gradient":
                node.after = []
    assert set(unfinished(nodes, "pp")) == {0, 1, 2, 3}


RING = "--tp 2 --sp --cp 2 --cp-order plain --pp 2 --microbatches 4"


@pytest.mark.parametrize("schedule", KINDS)
def test_a_tied_llama_with_rings_and_split_sequences_is_sound(
    schedule: str, tmp_path: Path
) -> None:
    """Ring attention, tensor and sequence parallelism and stages together: `stagec check` proves
    the job, and every schedule has it."""
    sizes = "B=8,S=16,L=4,D=8,H=4,G=2,K=2,F=16,V=16"
    flags = [*RING.split(), "--schedule", schedule, "--set", sizes]
    compiled = stagec("compile", "llama3.2-1b", *flags, "-o", tmp_path / "job", "--quiet")
    assert compiled.code == 0, compiled.err
    checked = stagec("check", tmp_path / "job")
    assert checked.code == 0, checked.out
    assert "well-formed, free of deadlock with eager" in checked.out
