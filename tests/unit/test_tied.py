"""What joins pipeline stages, as the gradient of a tied embedding, is summed behind the schedule.
So a device with one place for communication is not held up.
"""

from __future__ import annotations

from typing import Any

import pytest

from stagec.driver.job import JobBuilder
from stagec.program.classes import rank_classes
from stagec.program.nodes import Node
from stagec.schedule.registry import SCHEDULES
from tests.one_queue import unfinished
from tests.support import GPT, crossed, one_of_each_kind, tiny_options

MORE: list[dict[str, Any]] = [{}, {"dp": 2, "ddp_bucket": 300}, {"dp": 2, "zero": 1}]


def programs(schedule: str, more: dict[str, Any]) -> dict[int, list[Node]]:
    """The nodes of each stage of a GPT, whose first and last stage share the embedding."""
    options: dict[str, Any] = {"pp": 4, "microbatches": 8, "schedule": schedule, **more}
    module = JobBuilder(tiny_options(GPT, sizes={"B": 16, "L": 8}, **options)).lower()
    return {each.stage: each.program().nodes for each in rank_classes(module)}


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
