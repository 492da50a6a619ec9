"""Resharding: the steps of a plan lead from one placement to the other, in types and in numbers,
and no step is taken that is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stagec.interp.machine import Machine
from stagec.ir.builder import Builder
from stagec.ir.core import Value
from stagec.ir.module import Module
from stagec.ir.types import Dim, Partial, TensorType, dim
from stagec.sharding.reshard import Axes, NoPlanError, Step, plan
from tests.support import parse

AXES = ("x", "y", "z")
SIZE, RANK = 8, 3


@dataclass(frozen=True)
class Placement:
    """The axes of each dimension, major first, and those of a partial sum."""

    splits: tuple[Axes, ...]
    partial: Axes = ()

    @property
    def type(self) -> TensorType:
        """A tensor placed so."""
        dims = tuple(dim(SIZE, *axes) for axes in self.splits)
        partial = Partial("sum", self.partial) if self.partial else None
        return TensorType("f32", dims, partial, placed=True)


@st.composite
def placements(draw: st.DrawFn, most_partial: int = len(AXES)) -> Placement:
    """Each axis splits a dimension, in any order, or is part of a sum, or is not used."""
    splits: list[list[str]] = [[] for _ in range(RANK)]
    partial: list[str] = []
    for axis in draw(st.permutations(AXES)):
        where = draw(st.integers(-2, RANK - 1))
        if where >= 0:
            splits[where].append(axis)
        elif where == -1 and len(partial) < most_partial:
            partial.append(axis)
    return Placement(tuple(map(tuple, splits)), tuple(partial))


def steps_of(have: Placement, want: Placement) -> list[Step]:
    return plan(have.type, want.splits, want.partial)


def program(have: Placement, steps: list[Step]) -> tuple[Module, Value]:
    """A function that takes the steps; types follow from the ops' own inference."""
    module = parse(
        "stg.module @m[phase = partitioned] {\n  stg.mesh @p[x = 2, y = 2, z = 2]\n"
        f"  stg.func @f(%a: {have.type}) {{\n    stg.return(%a)\n  }}\n}}"
    )
    body = module.main.body
    value = body.args[0]
    builder = Builder(module.registry, body, 0)
    for step in steps:
        attrs: dict[str, object] = {"over": step.over}
        if step.op != "stg.all_reduce":
            attrs["dim"] = step.dim if isinstance(step.dim, tuple) else (step.dim,)
        if step.op == "stg.all_to_all":
            attrs["from"] = step.source if isinstance(step.source, tuple) else (step.source,)
        value = builder.value(step.op, [value], attrs)  # type: ignore[arg-type]
    body.terminator.set_operands([value])
    return module, value


@settings(max_examples=200, deadline=None)
@given(placements(), placements())
def test_the_steps_lead_to_the_target(have: Placement, want: Placement) -> None:
    assume(set(want.partial) <= set(have.partial))
    module, value = program(have, steps_of(have, want))
    assert value.tensor.dims == want.type.dims
    assert set(value.tensor.partial_axes) == set(want.partial)
    env: dict[str, int] = dict.fromkeys(AXES, 2)
    whole = np.arange(SIZE**RANK, dtype=float).reshape([SIZE] * RANK)
    (found,) = Machine(module, env).run(module.main, {"a": whole})
    parts = 2 ** len(have.partial)  # every part of the sum holds the whole
    np.testing.assert_array_equal(found, whole * parts)


@settings(max_examples=100, deadline=None)
@given(placements())
def test_no_step_where_nothing_is_to_do(have: Placement) -> None:
    assert steps_of(have, have) == []


@settings(max_examples=100, deadline=None)
@given(placements(), placements())
def test_no_axis_moves_twice_as_a_reduction(have: Placement, want: Placement) -> None:
    """Each axis of the partial sum is reduced once, and only if it has to be."""
    assume(set(want.partial) <= set(have.partial))
    reduced = [
        axis
        for step in steps_of(have, want)
        if step.op in ("stg.all_reduce", "stg.reduce_scatter")
        for axis in step.over
    ]
    assert sorted(reduced) == sorted(set(have.partial) - set(want.partial))


@settings(max_examples=100, deadline=None)
@given(placements(), placements())
def test_nothing_becomes_partial(have: Placement, want: Placement) -> None:
    assume(not set(want.partial) <= set(have.partial))
    with pytest.raises(NoPlanError, match="partial over"):
        steps_of(have, want)


@pytest.mark.parametrize(
    ("have", "want", "expected"),
    [
        (Placement(((), ()), ("x",)), Placement(((), ())), ["all_reduce x"]),
        (Placement(((), ()), ("x",)), Placement((("x",), ())), ["reduce_scatter x @0"]),
        (Placement((("x",), ())), Placement(((), ())), ["all_gather x @0"]),
        (Placement((("x",), ())), Placement(((), ("x",))), ["all_to_all x @0>1"]),
        (Placement(((), ())), Placement((("x",), ())), ["slice x @0"]),
        (Placement(((), ()), ("x", "y")), Placement(((), ())), ["all_reduce x,y"]),
        (
            Placement(((), ()), ("x", "y")),
            Placement((("x",), ())),
            ["reduce_scatter x @0", "all_reduce y"],
        ),
        (Placement(((), ()), ("x", "y")), Placement((("x", "y"), ())), ["reduce_scatter x,y @0"]),
        (Placement((("x", "y"), ())), Placement(((), ())), ["all_gather x,y @0"]),
        (Placement((("x", "y"), ())), Placement((("x",), ())), ["all_gather y @0"]),
        (Placement((("x",), ())), Placement((("x", "y"), ())), ["slice y @0"]),
        (Placement((("x",), ()), ("y",)), Placement((("x",), ("y",))), ["reduce_scatter y @1"]),
    ],
)
def test_the_table_of_collectives(have: Placement, want: Placement, expected: list[str]) -> None:
    """What a value has, what its user needs, and the collective for it."""
    assert [shown(s) for s in steps_of(have, want)] == expected


def shown(step: Step) -> str:
    name = step.op.removeprefix("stg.")
    at = "" if name == "all_reduce" else f" @{step.dim}"
    if name == "all_to_all":
        at = f" @{step.source}>{step.dim}"
    return f"{name} {','.join(step.over)}{at}"


def test_a_partial_maximum_is_reduced_as_a_maximum_and_never_scattered() -> None:
    type_ = TensorType("f32", (Dim(dim(SIZE).size),), Partial("max", ("x",)), placed=True)
    assert plan(type_, [("x",)]) == [
        Step("stg.all_reduce", ("x",), kind="max"),
        Step("stg.slice", ("x",), 0),
    ]
