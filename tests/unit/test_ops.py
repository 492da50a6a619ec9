"""What classes of ops state as data, and which of them are ops."""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest

from stagec.api import DiagnosticError, IndexRule, OpDef, Operation, make_rule
from stagec.ir_spec import ops
from tests.support import compiled


def first_op(line: str) -> Operation:
    """The op of a line with a table %t [V, D], values %x [B, S, D] and numbers %i [B, S]."""
    text = (
        "stg.module @m {\n  stg.symbols[B, S, D, V]\n"
        "  stg.func @f(%t: bf16[V, D], %x: bf16[B, S, D], %i: i32[B, S]) {\n"
        f"    {line}\n    stg.return(%y)\n  }}\n}}\n"
    )
    return compiled(text, "infer-shapes").main.body.ops[0]


def test_each_class_with_a_name_is_an_op() -> None:
    """No module of ops is forgotten."""
    named = set[str]()
    for module in iter_modules(ops.__path__, f"{ops.__name__}."):
        for _, item in inspect.getmembers(import_module(module.name), inspect.isclass):
            if issubclass(item, OpDef) and vars(item).get("name"):
                named.add(item.name)
    assert named <= {op.name for op in ops.OPS}


def test_ops_that_follow_from_another_one_stand_behind_it() -> None:
    names = [op.name for op in ops.OPS]
    followers = [(op.name, d.name) for op in ops.OPS for d in op.derived()]
    assert ("stg.silu", "stg.silu_grad") in followers
    assert ("stg.ssd", "stg.ssd_state") in followers
    for name, follower in followers:
        assert follower.startswith(name)
        assert names.index(name) < names.index(follower)


@pytest.mark.parametrize(
    ("line", "text", "spelled"),
    [
        ("%y = stg.embedding(%t, %i)", "vx,...->...x", "vx,ab->abx"),
        ("%y = stg.embedding(%t, %i)", "...x,...->...", "ax,a->a"),
        ("%y = stg.mul(%x, %x)", "...b,...b->...", "acb,acb->ac"),
    ],
)
def test_three_dots_are_the_dimensions_that_are_not_named(
    line: str, text: str, spelled: str
) -> None:
    """As many as the first operand with dots has; their letters are not those of the text."""
    rule, expected = IndexRule(text).of(first_op(line)), make_rule(spelled)
    assert (rule.operands, rule.results) == (expected.operands, expected.results)


def test_a_parameter_is_the_size_of_a_factor() -> None:
    op = first_op("%y, %k = stg.topk[k = 3](%x)")
    rule = op.definition.rule(op)
    assert rule is not None
    assert str(rule.sizes["k"]) == "3"


def test_an_operand_with_too_few_dimensions_is_an_error() -> None:
    with pytest.raises(DiagnosticError) as caught:
        IndexRule("...bsdv->...").of(first_op("%y = stg.mul(%x, %x)"))
    assert "'stg.mul' expects %x to have at least 4 dimensions" in str(caught.value)


def test_results_have_the_element_types_that_are_stated() -> None:
    """A type, or that of the operand of this name."""
    op = first_op("%y, %k = stg.topk[k = 3](%x)")
    assert op.definition.element_types == ("x", "i32")
    assert [r.tensor.dtype for r in op.results] == ["bf16", "i32"]
