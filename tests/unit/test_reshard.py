"""Resharding: the steps of a plan lead from one placement to the other, in types and in numbers,
and no other sequence of collectives sends less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stagec.interp.machine import Interpreter
from stagec.ir.builder import Builder
from stagec.ir.core import Value
from stagec.ir.expr import const, symbol
from stagec.ir.module import Module
from stagec.ir.queries import Divides
from stagec.ir.types import Dim, Partial, TensorType
from stagec.sharding.reshard import Axes, CollectiveStep, NoPlanError, Resharding
from tests.support import EXHAUSTIVE, dim, examples, parse

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

    @property
    def used(self) -> set[str]:
        """The axes that split a dimension or are part of the sum."""
        return {*self.partial, *(a for axes in self.splits for a in axes)}


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


PLANS = Resharding({"x": 2, "y": 2, "z": 2}, lambda axes, d: True)


def steps_of(have: Placement, want: Placement) -> list[CollectiveStep]:
    return PLANS.plan(have.type, want.splits, want.partial)


def program(have: Placement, steps: list[CollectiveStep]) -> tuple[Module, Value]:
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


@examples(200)
@given(placements(), placements())
def test_the_steps_lead_to_the_target(have: Placement, want: Placement) -> None:
    assume(set(want.partial) <= set(have.partial))
    module, value = program(have, steps_of(have, want))
    assert value.tensor.dims == want.type.dims
    assert set(value.tensor.partial_axes) == set(want.partial)
    env: dict[str, int] = dict.fromkeys(AXES, 2)
    whole = np.arange(SIZE**RANK, dtype=float).reshape([SIZE] * RANK)
    (actual,) = Interpreter(module, env).run(module.main, {"a": whole})
    parts = 2 ** len(have.partial)  # every part of the sum holds the whole
    np.testing.assert_array_equal(actual, whole * parts)


@examples(100)
@given(placements())
def test_no_step_where_nothing_is_to_do(have: Placement) -> None:
    assert steps_of(have, have) == []


@examples(100)
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


@examples(100)
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
        (Placement(((), ())), Placement((("x",), ())), ["all_slice x @0"]),
        (Placement(((), ()), ("x", "y")), Placement(((), ())), ["all_reduce x,y"]),
        (
            Placement(((), ()), ("x", "y")),
            Placement((("x",), ())),
            ["reduce_scatter x @0", "all_reduce y"],
        ),
        (Placement(((), ()), ("y",)), Placement((("x",), ())), ["all_slice x @0", "all_reduce y"]),
        (
            Placement(((), ()), ("x",)),
            Placement((("x", "y"), ())),
            ["all_slice y @1", "reduce_scatter x @0", "all_to_all y @1>0"],
        ),
        (
            Placement((("x",), ("y",))),
            Placement((("y",), ())),
            ["all_gather x @0", "all_to_all y @1>0"],
        ),
        (
            Placement((("x", "y"), ())),
            Placement(((), ("x",))),
            ["all_to_all x,y @0>1", "all_gather y @1"],
        ),
        (
            Placement((("x",), (), ()), ("y",)),
            Placement((("y",), (), ("x",))),
            ["all_to_all x @0>2", "reduce_scatter y @0"],
        ),
        (Placement(((), ()), ("x", "y")), Placement((("x", "y"), ())), ["reduce_scatter x,y @0"]),
        (Placement((("x", "y"), ())), Placement(((), ())), ["all_gather x,y @0"]),
        (Placement((("x", "y"), ())), Placement((("x",), ())), ["all_gather y @0"]),
        (Placement((("x",), ())), Placement((("x", "y"), ())), ["all_slice y @0"]),
        (Placement((("x",), ()), ("y",)), Placement((("x",), ("y",))), ["reduce_scatter y @1"]),
    ],
)
def test_the_table_of_collectives(have: Placement, want: Placement, expected: list[str]) -> None:
    """What a value has, what its user needs, and the collective for it."""
    assert [shown(s) for s in steps_of(have, want)] == expected


def shown(step: CollectiveStep) -> str:
    name = step.op.removeprefix("stg.")
    at = "" if name == "all_reduce" else f" @{step.dim}"
    if name == "all_to_all":
        at = f" @{step.source}>{step.dim}"
    return f"{name} {','.join(step.over)}{at}"


def test_a_partial_maximum_is_reduced_as_a_maximum_and_never_scattered() -> None:
    type_ = TensorType("f32", (Dim(dim(SIZE).size),), Partial("max", ("x",)), placed=True)
    assert PLANS.plan(type_, [("x",)]) == [
        CollectiveStep("stg.all_reduce", ("x",), kind="max"),
        CollectiveStep("stg.all_slice", ("x",), 0),
    ]


def test_no_split_is_passed_through_that_does_not_surely_divide() -> None:
    have, want = Placement(((), ()), ("x",)), Placement((("x", "y"), ()))
    strict = Resharding({"x": 2, "y": 2}, lambda axes, d: False)
    steps = strict.plan(have.type, want.splits)
    assert [shown(s) for s in steps] == ["reduce_scatter x @0", "all_slice y @0"]


def test_a_way_depends_on_the_sizes_that_decide_which_splits_divide() -> None:
    have, want = Placement((("x", "y"), ()), ()), Placement(((), ("x",)))
    mesh, n = {"x": 2, "y": 2}, symbol("N")
    known = {**mesh, "N": 8}
    plans = Resharding(mesh, lambda axes, d: Divides(const(prod(mesh[a] for a in axes)), n), known)
    way = plans.find(have.type, want.splits).way
    steps = [[shown(s) for s in way({**mesh, "N": size})] for size in (8, 6, 8)]
    assert steps[0] == steps[2] == ["all_to_all x,y @0>1", "all_gather y @1"]
    assert steps[1] == ["all_gather y @0", "all_to_all x @0>1"]
    more = way.cost({"x": 2, "y": 4, "N": 6})
    assert more > way.cost({**mesh, "N": 6})


# -- against all sequences of collectives


def all_placements(axes: Axes, rank: int) -> list[Placement]:
    actual: set[Placement] = set()
    for where in product(range(-2, rank), repeat=len(axes)):
        partial = tuple(a for a, w in zip(axes, where, strict=True) if w == -1)
        members = [[a for a, w in zip(axes, where, strict=True) if w == d] for d in range(rank)]
        actual |= {Placement(s, partial) for s in product(*map(permutations, members))}
    return sorted(actual, key=str)


def sent(name: str, over: Axes, splits: tuple[Axes, ...], sizes: Mapping[str, int]) -> Fraction:
    """Bytes that a rank sends for a collective on a tensor of one byte, split so before it."""
    n = prod(sizes[a] for a in over)
    before = Fraction(1, prod(sizes[a] for s in splits for a in s))
    buffer = {"all_reduce": 2 * before, "all_gather": before * n, "all_slice": Fraction()}
    return buffer.get(name, before) * (n - 1) / n


def collective(have: Placement, want: Placement) -> tuple[str, Axes] | None:
    """The one collective that leads from one placement to another, if one does."""
    reduced = tuple(a for a in have.partial if a not in want.partial)
    if not set(want.partial) <= set(have.partial) or have == want:
        return None
    pairs = [(d, h, w) for d, (h, w) in enumerate(zip(have.splits, want.splits, strict=True))]
    if any(h[: len(w)] != w and w[: len(h)] != h for _, h, w in pairs):
        return None
    gone = [(a, d) for d, h, w in pairs for a in h[len(w) :]]
    come = [(a, d) for d, h, w in pairs for a in w[len(h) :]]
    left, right = dict(gone), dict(come)
    if reduced:
        if gone or {a for a, _ in come} - set(reduced) or len(set(right.values())) > 1:
            return None
        return (
            ("reduce_scatter", reduced)
            if set(right) == set(reduced)
            else (None if come else ("all_reduce", reduced))
        )
    if not gone:
        return ("all_slice", tuple(right)) if len(set(right.values())) == 1 else None
    if not come:
        return ("all_gather", tuple(left)) if len(set(left.values())) == 1 else None
    blocks = [
        [a for a in left if (left[a], right.get(a)) == way]
        for way in product(set(left.values()), set(right.values()))
    ]
    whole = all(in_one_piece(b, gone) and in_one_piece(b, come) for b in blocks)
    return ("all_to_all", tuple(left)) if set(left) == set(right) and whole else None


def in_one_piece(block: list[str], moves: list[tuple[str, int]]) -> bool:
    axes = [a for a, _ in moves]
    return any(axes[i : i + len(block)] == block for i in range(len(axes)))


def shortest(places: list[Placement], sizes: Mapping[str, int]) -> list[list[tuple[Fraction, int]]]:
    """Bytes and calls of the best sequence between any two placements (Floyd and Warshall)."""
    never = (Fraction(1 << 30), 0)
    scale = prod(sizes.values()) ** 2
    length = np.full((len(places), len(places)), int(never[0]), dtype=np.int64)
    for i, have in enumerate(places):
        length[i, i] = 0
        for j, want in enumerate(places):
            if (actual := collective(have, want)) is not None:
                share = sent(*actual, have.splits, sizes) * scale
                length[i, j] = int(share) * 64 + (actual[0] != "all_slice")
    for k in range(len(places)):
        length = np.minimum(length, length[:, k, None] + length[None, k, :])
    return [[(Fraction(int(n) // 64, scale), int(n) % 64) for n in row] for row in length]


def bytes_and_calls(
    have: Placement, steps: list[CollectiveStep], sizes: Mapping[str, int]
) -> tuple[Fraction, int]:
    """Of a plan."""
    local, total = Fraction(1, prod(sizes[a] for s in have.splits for a in s)), Fraction(0)
    for step in steps:
        n, name = prod(sizes[a] for a in step.over), step.op.removeprefix("stg.")
        total += sent(name, step.over, ((),), sizes) * local
        if name == "all_gather":
            local *= n
        elif name in ("reduce_scatter", "all_slice"):
            local /= n
    return total, sum(s.op != "stg.all_slice" for s in steps)


MESHES = [
    {"x": 2, "y": 2},
    {"x": 2, "y": 4},
    {"x": 3, "y": 2},
    pytest.param({"x": 2, "y": 3, "z": 4}, marks=EXHAUSTIVE),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_sequence_of_collectives_is_cheaper(mesh: Mapping[str, int]) -> None:
    """Between all placements of a tensor of rank 3, which has those of lower ranks among them; on
    the axes that the two placements use, be it for a split or for a partial sum."""
    plans = Resharding(mesh, lambda axes, d: True)
    for axes in (some for n in range(1, len(mesh) + 1) for some in combinations(mesh, n)):
        places = all_placements(axes, RANK)
        best = shortest(places, mesh)
        for (i, have), (j, want) in product(enumerate(places), enumerate(places)):
            if have.splits != tuple(sorted(have.splits)):
                continue  # the same as one with its dimensions in another order
            if set(want.partial) <= set(have.partial) and have.used | want.used == set(axes):
                steps = plans.plan(have.type, want.splits, want.partial)
                assert bytes_and_calls(have, steps, mesh) == best[i][j], (have, want, steps)
                assert plans.find(have.type, want.splits, want.partial).cost == best[i][j][0]
