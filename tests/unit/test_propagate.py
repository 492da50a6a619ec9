"""Propagation: placements spread as the rules say, whatever the program; and whatever it decides,
the program computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from stagec.ir.core import Value
from stagec.ir.module import Module
from stagec.ir.types import TensorType
from stagec.support.diagnostics import DiagnosticError
from stagec.text.printer import print_module
from tests.support import LONG, clone, compiled, examples, inputs_of, parse, run_numeric, run_passes

PROPAGATE = "infer-shapes,propagate-sharding"
PLACE = "infer-shapes,propagate-sharding,insert-collectives"
AXES = ("x", "y")
SIZES = {"A": 4, "B": 4, "C": 4}


def function(args: str, body: str, returns: str = "%y") -> str:
    """A module on a mesh of 2 x 2, all sizes open but divisible."""
    relations = ", ".join(f"{n} % ({a}) == 0" for n in SIZES for a in ("x", "y", "x*y"))
    sizes = ", ".join(f"{n} = {v}" for n, v in SIZES.items())
    return (
        f"stg.module @m {{\n  stg.symbols[{sizes}]\n  stg.assume[{relations}]\n"
        f"  stg.mesh @p[x = 2, y = 2]\n  stg.func @f({args}) {{\n{body}\n"
        f"    stg.return({returns})\n  }}\n}}\n"
    )


def types_of(module: Module) -> dict[str, str]:
    """The text of the type of every value."""
    values: list[Value] = list(module.main.body.args)
    for op in module.main.body.walk():
        values += [*op.results, *(op.region.args if op.region else ())]
    return {v.name: str(v.type) for v in values}


@pytest.mark.parametrize(
    ("args", "body", "expected"),
    [
        (
            "%a: f32[A@x, B], %w: f32[B, C@y]",
            '%y = stg.einsum["ab,bc->ac"](%a, %w)',
            "f32[A@x, C@y]",
        ),
        (
            "%a: f32[A, B@x], %w: f32[B@x, C]",
            '%y = stg.einsum["ab,bc->ac"](%a, %w)',
            "f32[A, C | sum(x)]",
        ),
        (
            "%a: f32[A@y, B@x], %w: f32[B@x, C]",
            '%y = stg.einsum["ab,bc->ac"](%a, %w)',
            "f32[A@y, C | sum(x)]",
        ),
        ("%a: f32[A@(y, x), B]", "%y = stg.gelu(%a)", "f32[A@(y, x), B]"),
        ("%a: f32[A, B@x]", "%y = stg.softmax(%a)", "f32[A, B@x]"),
        ("%a: f32[A, B@x]", "%y = stg.softmax[causal](%a)", "f32[A, B | rep]"),
        ("%a: f32[A, B@x], %w: f32[B]", "%y = stg.rmsnorm(%a, %w)", "f32[A, B@x]"),
        ("%a: f32[A, B@x], %w: f32[A, C@y]", "%y = stg.concat(%a, %w)", "f32[A@(x, y), B + C]"),
        ("%a: f32[A, B@x!1], %w: f32[A, C]", "%y = stg.concat(%a, %w)", "f32[A, B + C | rep]"),
        ("%a: f32[A, B@x]", '%y = stg.sum["ab->a"](%a)', "f32[A | sum(x)]"),
        ("%a: f32[A, B@x]", '%y = stg.max["ab->a"](%a)', "f32[A | max(x)]"),
        ("%a: f32[A@x!1, B], %b: f32[A, B@x]", "%y = stg.add(%a, %b)", "f32[A, B@x]"),
        ("%a: f32[A@x!2, B], %b: f32[A, B@x!1]", "%y = stg.add(%a, %b)", "f32[A, B@x]"),
        ("%a: f32[A, B]", "%y = stg.gelu(%a)", "f32[A, B | rep]"),
    ],
)
def test_table(args: str, body: str, expected: str) -> None:
    assert types_of(compiled(function(args, body), PROPAGATE))["y"] == expected


def test_placements_flow_backward_into_what_is_not_pinned() -> None:
    body = "%b = stg.gelu(%a)\n    %c = stg.silu(%b)\n"
    body += "    %y = stg.sharding_constraint(%c) : f32[A@x, B@y]"
    actual = types_of(compiled(function("%a: f32[A, B | rep]", body), PROPAGATE))
    assert actual["y"] == "f32[A@x, B@y]"
    assert actual["b"] == actual["c"] == "f32[A@x, B@y]"
    assert actual["a"] == "f32[A, B | rep]"


def test_a_pin_wins_over_what_flows() -> None:
    body = "%b = stg.gelu(%a)\n    %p = stg.sharding_constraint(%b) : f32[A, B@y]\n"
    body += "    %y = stg.gelu(%p)"
    actual = types_of(compiled(function("%a: f32[A@x, B]", body), PROPAGATE))
    assert actual["p"] == "f32[A, B@y]"
    assert actual["y"] == "f32[A, B@y]"


def test_a_carried_value_has_one_placement() -> None:
    body = (
        "%y = stg.repeat[count = C, carry = 1] (%h = %a, %s = %w) {\n"
        "      %o = stg.mul(%h, %s)\n      stg.yield(%o)\n    }"
    )
    text = function("%a: f32[A@x, B], %w: f32[C, A, B@y]", body)
    actual = types_of(compiled(text, PROPAGATE))
    assert actual["h"] == actual["y"] == actual["o"] == "f32[A@x, B@y]", "moved in every iteration"
    assert actual["s"] == "f32[A, B@y]"


@pytest.mark.parametrize(
    "args", ["%a: f32[A@x, B]", "%a: f32[A, B@(x, y)]", "%a: f32[A@y, B@x]", "%a: f32[A, B | rep]"]
)
def test_propagation_is_a_fixpoint(args: str) -> None:
    """What it decided, pinned, is decided again."""
    body = "%b = stg.gelu(%a)\n    %c = stg.softmax(%b)\n    %y = stg.add(%a, %c)"
    once = compiled(function(args, body), PROPAGATE)
    text = print_module(once)
    again = parse(text.replace("phase = sharded", "phase = shaped"))
    run_passes(again, "propagate-sharding")
    assert print_module(again) == text


# -- any program


@dataclass(frozen=True)
class Drawn:
    """A drawn program."""

    args: tuple[str, ...]
    lines: tuple[str, ...]
    returned: tuple[str, ...]

    @property
    def text(self) -> str:
        """The module."""
        return function(", ".join(self.args), "\n".join(self.lines), ", ".join(self.returned))


@st.composite
def splits(draw: st.DrawFn, rank: int) -> list[str]:
    """The `@...` of each dimension; no axis twice."""
    actual: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(AXES)):
        where = draw(st.integers(-1, rank - 1))
        if where >= 0:
            actual[where].append(axis)
    priority = draw(st.sampled_from(["", "", "!1", "!2"]))
    return [
        f"@({', '.join(a + priority for a in axes)})"
        if len(axes) > 1
        else f"@{axes[0]}{priority}"
        if axes
        else ""
        for axes in actual
    ]


@st.composite
def placed(draw: st.DrawFn, dims: str, parts: bool = False) -> str:
    """A type of these dimensions with a placement; with `parts`, perhaps a partial sum."""
    marks = draw(splits(len(dims)))
    text = ", ".join(d + m for d, m in zip(dims, marks, strict=True))
    free = [a for a in AXES if not any(a in m for m in marks)]
    if parts and free and draw(st.booleans()):
        return f"f32[{text} | sum({draw(st.sampled_from(free))})]"
    return f"f32[{text}{'' if any(marks) else ' | rep'}]"


@st.composite
def programs(draw: st.DrawFn, parts: bool = False) -> Drawn:
    """Values of one or two dimensions, combined in any way; some are pinned, with `parts` as
    partial sums as well."""
    shapes = {"a": "AB", "w": "BC", "v": "B"}
    args = tuple(f"%{n}: {draw(placed(s))}" for n, s in shapes.items())
    lines: list[str] = []
    for i in range(draw(st.integers(1, 7))):
        name = f"t{i}"
        source = draw(st.sampled_from(sorted(shapes)))
        dims = shapes[source]
        ops = ["gelu", "softmax", "scale", "sharding_constraint", "cumsum"]
        ops += [f"{kind}:{n}" for n, s in shapes.items() for kind in ("add", "mul") if s == dims]
        ops += [f"matmul:{n}" for n, s in shapes.items() if dims[-1] == s[0] and len(s + dims) > 2]
        ops += ["sum", "max", "norm", "permute"] if len(dims) == 2 else []
        ops += [f"join:{n}" for n, s in shapes.items() if s == dims]
        ops += [
            f"{kind}:{n}" for kind in ("rms", "layer") for n, s in shapes.items() if s == dims[-1]
        ]
        ops += [f"bias:{n}" for n, s in shapes.items() if len(dims) == 2 and s == dims[1]]
        text, result = draw(line(draw(st.sampled_from(ops)), source, dims, shapes))
        if not result:
            continue
        pinned = "sharding_constraint" in text
        if parts and pinned and draw(st.booleans()):
            text = f"stg.sharding_constraint(%{source}) : {draw(placed(dims, parts))}"
        elif parts and not pinned and "NAME" not in text and draw(st.booleans()):
            text = f"{text} : {draw(placed(result, parts))}"
        text = text if "NAME" in text else f"%NAME = {text}"
        lines.append(f"    {text.replace('NAME', name)}")
        shapes[name] = result
    last = [line.split()[0] for line in lines] or ["%a"]
    returned = draw(st.lists(st.sampled_from(last), min_size=1, max_size=2, unique=True))
    return Drawn(args, tuple(lines), tuple(returned))


#: What the reductions of a value are, and what keeps its dimensions.
REDUCED = {
    "norm": 'stg.einsum["{row},{row}->{kept}"](%{x}, %{x})',
    "sum": 'stg.sum["{row}->{kept}"](%{x})',
    "max": 'stg.max["{row}->{kept}"](%{x})',
}
KEPT = {
    "gelu": "stg.gelu(%{x})",
    "softmax": "stg.softmax(%{x})",
    "scale": "stg.scale[by = 1/2](%{x})",
    "cumsum": "stg.cumsum[dim = 0](%{x})",
    "add": "stg.add(%{x}, %{y})",
    "mul": "stg.mul(%{x}, %{y})",
    "bias": 'stg.add["{row},{last}->{row}"](%{x}, %{y})',
    "rms": "stg.rmsnorm(%{x}, %{y})",
    "layer": "stg.layernorm(%{x}, %{y}, %{y})",
    "join": "%NAME_all = stg.concat(%{x}, %{y})\n"
    "    %NAME, %NAME_b = stg.cut[sizes = ({size}, {size})](%NAME_all)",
}


@st.composite
def line(
    draw: st.DrawFn, op: str, source: str, dims: str, shapes: dict[str, str]
) -> tuple[str, str]:
    """An operation on a value, and the dimensions of its result ("" for none); where it takes two,
    %NAME is the result."""
    kind, _, other = op.partition(":")
    low = dims.lower()
    if kind in KEPT:
        said = {"x": source, "y": other, "row": low, "last": low[-1], "size": dims[-1]}
        return KEPT[kind].format(**said), dims
    match kind:
        case "sharding_constraint":
            return f"stg.sharding_constraint(%{source}) : {draw(placed(dims))}", dims
        case "norm" | "sum" | "max":
            return REDUCED[kind].format(x=source, row=low, kept=low[0]), dims[0]
        case "permute":
            return f'stg.permute["{low}->{low[::-1]}"](%{source})', dims[::-1]
        case _:
            right = shapes[other].lower()
            out = low[:-1] + right[1:]
            if len(set(out)) != len(out) or not out:
                return "", ""
            return f'stg.einsum["{low},{right}->{out}"](%{source}, %{other})', out.upper()


PREFIX = Drawn(
    ("%a: f32[A, B | rep]", "%w: f32[B@(x, y), C]", "%v: f32[B@x]"),
    ('    %t0 = stg.einsum["b,bc->c"](%v, %w)',),
    ("%t0",),
)


@examples(120)
@example(PREFIX)
@given(programs())
def test_a_placed_program_computes_the_same(program: Drawn) -> None:
    """All ranks in lockstep against one device, for any program and any pins."""
    plain = compiled(program.text, "infer-shapes")
    inputs = inputs_of(plain)
    expected = run_numeric_plain(plain, inputs)
    module = compiled(program.text, PLACE)
    for x, y in zip(expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-9)


def unless_refused(text: str, passes: str, *reasons: str) -> Module | None:
    """The module after the passes; None if it is refused for one of these reasons."""
    try:
        module = compiled(text, passes)
    except DiagnosticError as e:
        if not any(reason in str(e) for reason in reasons):
            raise
        event("refused")
        return None
    event("with parts" if "sum(" in text else "without")
    return module


@LONG
@examples(300)
@given(programs(parts=True))
def test_pinned_parts_are_true_or_refused(program: Drawn) -> None:
    """Whatever is pinned as a partial sum: what compiles computes the same."""
    module = unless_refused(program.text, PLACE, "unreduced", "contradictory placements")
    if module is None:
        return
    inputs = inputs_of(module)
    expected = run_numeric_plain(compiled(program.text, "infer-shapes"), inputs)
    for x, y in zip(expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-9)


@examples(150)
@given(programs())
def test_what_was_decided_may_be_pinned(program: Drawn) -> None:
    """Also the partial sums among it, which are true."""
    decided = print_module(compiled(program.text, PROPAGATE))
    pinned = decided.replace("phase = sharded", "phase = shaped")
    passes = PLACE.removeprefix("infer-shapes,")
    module = unless_refused(pinned, passes, "contradictory placements")
    if module is None:
        return
    inputs = inputs_of(module)
    expected = run_numeric_plain(compiled(program.text, "infer-shapes"), inputs)
    for x, y in zip(expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-9)


def run_numeric_plain(module: Module, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The program on one device, placements ignored."""
    text = print_module(module).replace("x = 2, y = 2", "x = 1, y = 1")
    return run_numeric(parse(text), inputs)


@examples(80)
@given(programs())
def test_every_value_is_placed_and_uses_an_axis_once(program: Drawn) -> None:
    module = compiled(program.text, PROPAGATE)
    for op in module.main.body.walk():
        for value in op.results:
            type_ = value.type
            assert isinstance(type_, TensorType)
            assert type_.placed
            assert len(set(type_.axes)) == len(type_.axes)
            assert all(use.priority == 0 for d in type_.dims for use in d.split)
    text = print_module(module)
    assert print_module(clone(module)) == text
