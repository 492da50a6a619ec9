"""Requests over time: the event loop beside the engine that goes step by step, and what holds of
every server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.serving.engine import Engine
from stagec.serving.policy import FirstComeFirstServed, ServerLimits
from stagec.serving.replica import Replica, StepLine
from stagec.serving.requests import Request
from stagec.serving.routing import ROUTERS
from stagec.serving.simulate import Failure, Simulation
from stagec.serving.step import Step
from tests.support import examples

NANOSECOND = 10**6
SECOND = 10**15
#: Tokens after which the slope of a step's time changes.
CELL = 64


@dataclass(frozen=True)
class Linear:
    """Steps of a fixed time, and so many nanoseconds for each sequence, new token and cached token;
    with `cells` the slope over cached tokens differs from cell to cell."""

    fixed: int = 1000
    sequence: int = 10
    new: int = 20
    cells: bool = False

    def decode(self, count: int, total: int) -> StepLine:
        at = self.fixed + (self.sequence + self.new) * count
        if not self.cells:
            return StepLine(at * NANOSECOND, NANOSECOND, 0, 1 << 40)
        cell = total // CELL
        at += self.cached(cell * CELL)
        return StepLine(at * NANOSECOND, self.slope(cell) * NANOSECOND, cell * CELL, cell * CELL + CELL)

    def slope(self, cell: int) -> int:
        return cell % 3 + 1 if self.cells else 1

    def cached(self, total: int) -> int:
        cell, rest = divmod(total, CELL)
        return sum(self.slope(i) * CELL for i in range(cell)) + rest * self.slope(cell)

    def mixed(self, count: int, total: int, chunks: Sequence[tuple[int, int]]) -> int:
        tokens = self.sequence * (count + len(chunks)) + self.new * (count + sum(n for n, _ in chunks))
        return NANOSECOND * (self.fixed + tokens + self.cached(total + sum(q for _, q in chunks)))

    def of(self, step: Step) -> int:
        """Nanoseconds of a step of the engine."""
        pieces = [(c.new, c.cached) for c in step.classes for _ in range(c.count)]
        return self.mixed(0, 0, pieces) // NANOSECOND


def requests_of(gaps: Sequence[int], prompts: Sequence[int], outputs: Sequence[int]) -> list[Request]:
    at, found = 0, []
    for gap, prompt, output in zip(gaps, prompts, outputs, strict=True):
        at += gap
        found.append(Request(at, prompt, output))
    return found


@st.composite
def loads(draw: st.DrawFn, most: int = 25) -> list[Request]:
    number = draw(st.integers(1, most))
    lists = (
        draw(st.lists(st.integers(*bounds), min_size=number, max_size=number))
        for bounds in ((0, 20_000), (2, 60), (1, 40))
    )
    return requests_of(*lists)


def served(
    requests: Sequence[Request], limits: ServerLimits, costs: Any = None, **how: Any
) -> Simulation:
    count = how.pop("count", 1)
    costs = costs or Linear()
    each = [Replica(i, limits, costs, **how.pop(f"replica{i}", {})) for i in range(count)]
    run = Simulation(requests, each, ROUTERS[how.pop("route", "least-loaded")], **how)
    run.run()
    return run


LIMITS = st.builds(
    ServerLimits,
    tokens=st.integers(8, 64),
    sequences=st.integers(1, 8),
    blocks=st.one_of(st.none(), st.integers(25, 60)),
    block=st.just(4),
)


@examples(200)
@given(loads(), LIMITS, st.booleans())
def test_every_event_is_that_of_the_engine_that_steps(
    requests: list[Request], limits: ServerLimits, cells: bool
) -> None:
    costs = Linear(cells=cells)
    engine = Engine(requests, FirstComeFirstServed(), limits, costs.of)
    steps = sum(s.count for s in engine.stretches(1 << 20))
    run = served(requests, limits, costs)
    found = sorted((j.number, j.first, j.last, j.preempted) for j in run.done)
    expected = sorted(
        (s.number, s.first * NANOSECOND, s.last * NANOSECOND, s.preempted) for s in engine.served
    )
    assert found == expected
    assert sum(r.tally.steps for r in run.replicas) == steps
