"""Messages that wait for their receivers: the replay against the clock node by node, closed forms, and
what a machine says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import Any

import pytest

from stagec.machines import load_machine
from stagec.program.nodes import Node
from stagec.time.path import critical_path
from stagec.time.step import step_time
from stagec.time.streams import Cost
from tests.support import EXHAUSTIVE, each_value
from tests.unit.test_step_time import (
    JOBS,
    arbitrary,
    clocked,
    compare,
    issued_of,
    options_of,
)

#: Jobs with messages.
STAGED = [name for name, (_, options) in JOBS.items() if "pp" in options]


def heard(eager: float, node: Node) -> Cost:
    """An arbitrary cost; of a message of more than `eager` bytes with one for its handshake."""
    cost = arbitrary(node)
    if not node.is_message or node.size <= eager:
        return cost
    return replace(cost, handshake=7 + node.size % 83)


GRID = each_value(
    [
        {"job": job, "some": some, "slowdown": slowdown, "one_stream": one_stream}
        for job in STAGED
        for some in (False, True)
        for slowdown in (0, 300)
        for one_stream in (False, True)
    ],
    lambda row: "-".join(map(str, row.values())),
)


@pytest.mark.parametrize("row", GRID)
def test_the_replay_is_the_clock(row: Mapping[str, Any]) -> None:
    """Every node ends at the same picosecond, whether all messages wait or the larger ones do."""
    issued = issued_of(options_of(*JOBS[row["job"]]))
    sizes = sorted({n.size for n in issued.samples if n.is_message})
    eager = sizes[0] if row["some"] and len(sizes) > 1 else 0
    costs = dict.fromkeys(range(len(issued.classes)), partial(heard, eager))
    how: dict[str, Any] = {"overlap": True, "one_stream": row["one_stream"]}
    step, classes = compare(issued, costs, row["slowdown"], **how, eager=eager)
    for each in classes:
        assert sum(each.parts(step).values()) == step
        assert min(each.parts(step).values()) > 0
    free = max(end for _, end in clocked(issued, dict.fromkeys(costs, arbitrary), 0, **how).values())
    assert step >= free or row["slowdown"]
