"""Ops that gather an operand themselves: the fused product of docs/writing-an-op.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest

from stagec.api import (
    DiagnosticError,
    Loaded,
    Module,
    OpDef,
    Operation,
    PassManager,
    Rule,
    Source,
    load_plugins,
    make_rule,
    parse_module,
    place_from_operands,
)
from stagec.interp.machine import run_module
from stagec.ir.rule import RuleSyntaxError
from tests.support import inputs_of, operations, run_one_device, stagec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-an-op.md"
PLACE = "infer-shapes,propagate-sharding,insert-collectives"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in that the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    actual = re.search(r"<!-- file: gather_matmul.py -->\n```python\n(.*?)```", text, re.DOTALL)
    assert actual is not None
    file = tmp_path_factory.mktemp("plugin") / "gather_matmul.py"
    file.write_text(actual[1], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def loaded(plugin: Path) -> Loaded:
    return load_plugins([plugin])


@cache
def text_of(x: str, w: str, op: str = "fused", pinned: str = "", extra: str = "") -> str:
    name = {
        "fused": 'my.gather_matmul["bsd,df->bsf", gather = s]',
        "plain": 'stg.einsum["bsd,df->bsf"]',
    }[op]
    return (
        "stg.module @m {\n  stg.symbols[B = 2, S = 24, D = 6, F = 12]\n"
        f"  stg.mesh @pod[cp = 2, tp = 3]\n{extra}"
        f"  stg.func @f(%x: f32[{x} | param], %w: f32[{w} | param]) {{\n"
        f"    %u = {name}(%x, %w){pinned}\n    %m = stg.gelu(%u)\n"
        '    %loss = stg.einsum["bsf,bsf->"](%m, %m)\n    stg.return(%loss)\n  }\n}\n'
    )


def compiled(loaded: Loaded, text: str, passes: str = PLACE) -> Module:
    module = parse_module(Source("fused.stg", text), loaded.registry)
    PassManager(loaded.pipeline(passes), known=loaded.passes.values()).run(module)
    return module


def gathered(module: Module) -> list[str]:
    return [
        f"{op.operands[0].name} over {op.names('over')}"
        for op in module.walk()
        if op.name == "stg.all_gather"
    ]


@pytest.mark.parametrize(
    ("x", "w", "result", "moves"),
    [
        ("B, S@tp, D", "D, F@tp", "B, S, F@tp", []),
        ("B, S@(cp, tp), D", "D, F@tp", "B, S@cp, F@tp", []),
        ("B, S@cp, D", "D, F@tp", "B, S@cp, F@tp", []),
        ("B, S@tp, D", "D, F", "B, S@tp, F", []),
        ("B, S@(tp, cp), D", "D, F@(cp, tp)", "B, S, F@(cp, tp)", []),
        ("B@cp, S@tp, D", "D@cp, F@tp", "B@cp, S, F@tp", ["w over ('cp',)"]),
    ],
)
def test_the_operand_is_left_as_it_is(
    loaded: Loaded, x: str, w: str, result: str, moves: Sequence[str]
) -> None:
    module = compiled(loaded, text_of(x, w))
    (op,) = operations(module, "my.gather_matmul")
    assert str(op.operands[0].tensor).startswith(f"f32[{x}")
    assert str(op.result.type) == f"f32[{result}]"
    assert gathered(module) == moves


@pytest.mark.parametrize("x", ["B, S@tp, D", "B, S@(cp, tp), D", "B, S@(tp, cp), D", "B, S, D"])
@pytest.mark.parametrize("w", ["D, F@tp", "D@cp, F@tp", "D@tp, F", "D, F@(cp, tp)"])
def test_all_ranks_compute_what_one_computes(loaded: Loaded, x: str, w: str) -> None:
    """With gradients, whose products are plain."""
    text = text_of(x, w)
    step = compiled(loaded, text, "infer-shapes,differentiate")
    inputs = inputs_of(step, 1)
    sharded = compiled(loaded, text, PLACE.replace("shapes", "shapes,differentiate"))
    actual = run_module(sharded, sharded.env, inputs)
    for a, b in zip(actual, run_one_device(step, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.parametrize("x", ["B, S@tp!1, D", "B, S@(cp, tp!1), D"])
def test_its_nodes_cost_what_the_plain_product_and_the_gather_cost(loaded: Loaded, x: str) -> None:
    """Also where a share of the bytes is no integer."""
    plain, fused = (lowered(loaded, text_of(x, "D, F@tp", op)) for op in ("plain", "fused"))
    assert sum_of(plain, "et.coll", "bytes") == sum_of(fused, "et.coll", "bytes") > 0
    for cost in ("flops", "matmul", "bytes", "out"):
        assert sum_of(plain, "et.comp", cost) == sum_of(fused, "et.comp", cost), cost
    gather, first, last = fused[:3]
    assert first.integer("flops") == 2 * last.integer("flops")
    product = next(op for op in plain if op.name == "et.comp")
    assert first.integer("m") + last.integer("m") == product.integer("m")
    for step in (first, last, product):
        extents = prod(step.integer(n) for n in ("batch", "m", "n", "k"))
        assert step.integer("flops") == 2 * extents
    assert gather.result in last.operands
    assert gather.result not in first.operands


def lowered(loaded: Loaded, text: str) -> list[Operation]:
    """The nodes, with numbers."""
    module = compiled(loaded, text, f"{PLACE},plan-memory,lower-to-trace,bind")
    return operations(module, "et.coll", "et.comp")


def sum_of(nodes: Sequence[Operation], kind: str, attr: str) -> int:
    return sum(op.integer(attr) for op in nodes if op.name == kind and attr in op.attrs)


def test_its_trace_follows_the_memory_plan(plugin: Path, tmp_path: Path) -> None:
    (tmp_path / "fused.stg").write_text(text_of("B, S@tp!1, D", "D, F@tp"), encoding="utf-8")
    made = stagec(
        *("compile", tmp_path / "fused.stg", "--plugin", plugin, "--memory-events"),
        *("--pipeline", "forward", "-o", tmp_path / "out", "--quiet"),
    )
    assert made.code == 0, made.err
    assert stagec("check", tmp_path / "out").code == 0


def test_it_is_placed_from_its_operands_alone(loaded: Loaded) -> None:
    """As ops that a partition builds."""
    module = compiled(loaded, text_of("B, S@(cp, tp), D", "D, F@tp"))
    (op,) = operations(module, "my.gather_matmul")
    placed = op.result.type
    op.result.type = op.result.tensor.unplaced()
    place_from_operands(op, module.facts)
    assert op.result.type == placed


class Outer(OpDef):
    """Gathers both of its operands."""

    name = "my.outer"
    operands = ("x", "y")

    def rule(self, op: Operation) -> Rule:
        return make_rule("s,t->st", gathered="st")


def test_two_gathers_of_one_op_are_over_the_same_axes() -> None:
    loaded = load_plugins()
    loaded.registry.add(Outer())
    text = (
        "stg.module @m[phase = partitioned] {\n  stg.mesh @pod[cp = 2, tp = 2]\n"
        "  stg.func @f(%x: f32[4@cp], %y: f32[4@tp]) {\n"
        "    %z = my.outer(%x, %y) : f32[4, 4 | rep]\n    stg.return(%z)\n  }\n}\n"
    )
    with pytest.raises(DiagnosticError, match=r"gathers %x over cp and %y over tp itself"):
        compiled(loaded, text, "plan-memory,lower-to-trace")


def test_positions_in_zigzag_order_are_not_gathered(loaded: Loaded) -> None:
    text = text_of("B, S@cp, D", "D, F@cp", extra="  stg.zigzag[S, over = cp]\n")
    with pytest.raises(DiagnosticError, match="gathers S, whose parts on the ranks of cp are in"):
        compiled(loaded, text)


def test_a_gathered_factor_is_a_dimension_of_a_result_alone() -> None:
    for text in ("bs,sd->bd", "b(sr),rd->b(sr)d"):
        with pytest.raises(RuleSyntaxError, match="'s' is gathered, so it must be a dimension"):
            make_rule(text, gathered="s")
