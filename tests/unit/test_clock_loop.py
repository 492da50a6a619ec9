"""The loop of the clock: its worked example, and the compiled one against what it means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from stagec.program.nodes import Node
from stagec.time.clock.speed import COMPILED, in_python, looped
from stagec.time.clock.times import ClockedStep, NodeCosts
from stagec.time.streams import merged, stretched
from tests.unit.test_step_time import JOBS, arbitrary, issued_of, options_of, replayed

compiled = pytest.mark.skipif(not COMPILED, reason="no compiler: the loop is Python")


class Example:
    """Rows of a table: the nodes that each waits for, its span, start, end and cause."""

    def __init__(self, text: str) -> None:
        self.before: list[list[int]] = []
        self.span: list[int] = []
        self.expected: list[tuple[int, int, int]] = []
        row = r"^ +(\d+)  .*? {3,}((?:\d+ )*\d+)? +(\d+) +(\d+) +(\d+) +(-?\d+)$"
        for number, before, span, *times in re.findall(row, text, re.M):
            assert int(number) == len(self.before)
            self.before.append([int(n) for n in before.split()])
            self.span.append(int(span))
            start, end, cause = map(int, times)
            self.expected.append((start, end, cause))


def arrays(before: Sequence[Sequence[int]]) -> tuple[Any, Any, Any]:
    """An order, and what the nodes wait for, as the loop takes it."""
    begins = np.cumsum([0, *map(len, before)]).astype(np.int32)
    flat = np.array([j for row in before for j in row], dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    turned = [np.zeros(n, dtype=np.int32) for n in (len(before), len(before) + 2, len(flat))]
    looped("turn_round", begins, flat, none, none, *turned)
    order = np.empty(len(before), dtype=np.int32)
    assert looped("put_in_order", *turned, order) == len(before)
    return order, begins, flat


def test_the_worked_example_is_what_it_says() -> None:
    example = Example(in_python().__doc__ or "")
    assert len(example.span) == 16
    order, begins, before = arrays(example.before)
    for kind in (np.int64, object):  # compiled, and in Python
        span = np.array(example.span, dtype=kind)
        start, end, cause = np.zeros_like(span), np.zeros_like(span), np.zeros(16, dtype=np.int32)
        none, no_time = np.empty(0, dtype=np.int32), np.empty(0, dtype=kind)
        about = order, begins, before, span, start, end, cause
        looped("run", *about, no_time, none, none, none, none, 1024)
        assert [*zip(start.tolist(), end.tolist(), cause.tolist(), strict=True)] == example.expected
    assert max(end for _, end, _ in example.expected) == 92


@compiled
@pytest.mark.parametrize("seed", range(20))
def test_compiled_and_python_say_the_same(seed: int) -> None:
    """On random graphs of two classes, in which collectives run beside computations."""
    random = Random(seed)
    count = 120
    chain: dict[int, int] = {}
    before: list[list[int]] = []
    owner, past = [random.randrange(2) for _ in range(count)], [-1] * count
    beside: list[list[int]] = [[], []]
    for i, mine in enumerate(owner):
        rows = [random.randrange(i) for _ in range(random.randrange(3)) if i]
        if random.random() < 0.4:
            beside[mine].append(i)
        else:
            rows += [chain[mine]] if mine in chain else []
            rows += beside[mine]  # in the order of the loop, too
            chain[mine], past[i] = i, len(beside[mine])
        before.append([*dict.fromkeys(rows)])
    shift = 0, len(beside[0])
    past = [n + shift[mine] if n >= 0 else n for n, mine in zip(past, owner, strict=True)]
    gap = [random.randrange(5) for _ in range(count)]
    span = [g + random.choice((0, 3, 50, 400)) for g in gap]
    order, begins, flat = arrays(before)
    rate = random.choice((0, 1, 700, 1024))
    actual: list[list[list[int]]] = []
    for kind in (np.int64, object):
        start, end = np.zeros(count, dtype=kind), np.zeros(count, dtype=kind)
        cause, low = np.zeros(count, dtype=np.int32), np.array([0, len(beside[0])], dtype=np.int32)
        numbers = (np.array(row, dtype=np.int32) for row in (past, owner, beside[0] + beside[1]))
        about = order, begins, flat, np.array(span, dtype=kind), start, end, cause
        looped("run", *about, np.array(gap, dtype=kind), *numbers, low, rate)
        actual.append([start.tolist(), end.tolist(), cause.tolist(), low.tolist()])
    assert actual[0] == actual[1]


@pytest.mark.parametrize("seed", range(50))
def test_work_beside_collectives_is_stretched(seed: int) -> None:
    """As `stretched` says of intervals that are apart; these overlap."""
    random = Random(seed)
    times = [(t, t + random.randrange(40)) for t in (random.randrange(200) for _ in range(5))]
    start, end = [first for first, _ in times], [last for _, last in times]
    now, work, slowdown = (
        random.randrange(150),
        random.randrange(200),
        random.choice((1, 300, 1024)),
    )
    actual = in_python().slowed_end(now, work, range(5), 0, 5, start, end, 1024 - slowdown)
    assert actual == stretched(now, work, merged(times), slowdown)


@pytest.mark.parametrize("days", [50, 10**9])
def test_steps_of_many_days_are_exact(days: int) -> None:
    """Of more picoseconds than numpy counts, too: in one node, or in all together."""
    unit = days * 86400 * 10**12

    def far(node: Node) -> Any:
        cost = arbitrary(node)
        return type(cost)(cost.time * unit, cost.launch * unit)

    issued = issued_of(options_of(*JOBS["1f1b"]))
    numbers = range(len(issued.classes))
    step, near = replayed(issued, dict.fromkeys(numbers, arbitrary))
    long_step, times = replayed(issued, dict.fromkeys(numbers, far))
    assert long_step == step * unit
    for each, other in zip(near, times, strict=True):
        assert (each.ends.astype(object) * unit).tolist() == other.ends.tolist()
        assert {p: t * unit for p, t in each.parts(step).items()} == other.parts(long_step)


def test_costs_of_nodes_without_end_are_numbers_of_python() -> None:
    issued = issued_of(options_of(*JOBS["one"]))
    graph = issued.graph(overlap=True)
    costs = NodeCosts(*(np.full(len(graph.classes[0].prototypes), 2**61) for _ in range(3)))
    assert ClockedStep(graph, costs).end == 2**62 * sum(
        node.is_computation for node in issued.programs[0].nodes
    )
