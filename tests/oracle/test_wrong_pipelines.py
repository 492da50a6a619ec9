"""What is wrong in the functions of pipeline stages is seen when they run: lost or crossed
messages, reductions between stages that are missing or go to the wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stagec.interp.machine import DisagreementError
from stagec.interp.pipeline import run_named
from stagec.ir.core import Operation
from stagec.ir.expr import const
from stagec.ir.module import Module
from stagec.ir.traits import Repeats
from tests.oracle.test_pipeline import PLACED, SCALE
from tests.support import GPT, STEP, inputs_of, operations, tiny_module

Break = Callable[[Module], None]
OPTIONS = {"pp": 2, "dp": 2, "microbatches": 4}


def reductions(module: Module, pairs: str) -> list[Operation]:
    """The reductions over stages: of mirrored pairs, or of all."""
    actual = operations(module, "stg.all_reduce")
    return [op for op in actual if op.flag("stages") and op.text("pairs") == pairs]


def drop(op: Operation) -> None:
    """Users take the operand instead."""
    for result, value in zip(op.results, op.operands, strict=True):
        result.replace_with(value)
    op.erase()


def no_tied_sum(module: Module) -> None:
    for op in reductions(module, "mirrored"):
        drop(op)


def no_norm_sum(module: Module) -> None:
    for op in reductions(module, ""):
        drop(op)


def norm_of_a_pair(module: Module) -> None:
    """The embedding counts twice in the norm."""
    for func in module.functions:
        tied = next(op for op in func.body.ops if op.text("pairs") == "mirrored")
        norm = next(op for op in func.body.ops if op.flag("stages") and "pairs" not in op.attrs)
        square = Operation(module.registry["stg.squared_norm"], [tied.result], loc=tied.loc)
        more = Operation(module.registry["stg.add"], (), loc=tied.loc)
        part = square.add_result("again", norm.operands[0].type)
        more.add_operand(norm.operands[0])
        more.add_operand(part)
        total = more.add_result("more", norm.operands[0].type)
        for op in (square, more):
            func.body.insert(norm.position(), op)
        norm.set_operand(0, total)


def lose_a_message(module: Module) -> None:
    operations(module, "stg.send")[0].erase()


def cross_channels(module: Module) -> None:
    for op in operations(module, "stg.recv"):
        op.attrs["channel"] = const(1 - op.integer("channel", 0))


def other_way_round(module: Module) -> None:
    """The first stage sends what it got instead of what it computed."""
    (send,) = [op for op in module.functions[0].body.walk() if op.name == "stg.send"]
    (repeat,) = [op for op in send.parent.ops if op.has(Repeats)] if send.parent else []
    send.set_operand(0, repeat.operands[0])


def skip_a_layer(module: Module) -> None:
    """A repeat of the last stage runs once less."""
    last = module.functions[-1]
    for op in last.body.walk():
        if op.has(Repeats) and op.phase == "forward":
            op.attrs["count"] = op.expr("count") - 1
            return


@pytest.mark.parametrize(
    "damage",
    [
        no_tied_sum,
        no_norm_sum,
        norm_of_a_pair,
        lose_a_message,
        cross_channels,
        other_way_round,
        skip_a_layer,
    ],
)
def test_a_broken_stage_is_seen(damage: Break) -> None:
    sizes = {"L": 4, "B": 16}
    plain = tiny_module(GPT, STEP, sizes=sizes)
    inputs = {n: a * SCALE if a.dtype.kind == "f" else a for n, a in inputs_of(plain, 2).items()}
    expected = run_named(plain, plain.env, inputs)
    module = tiny_module(GPT, PLACED, sizes=sizes, **OPTIONS)
    right = run_named(module, module.env, inputs)
    assert all(np.allclose(right[n], expected[n], rtol=1e-9) for n in expected if n in right)
    damage(module)
    try:
        actual = run_named(module, module.env, inputs)
    except (DisagreementError, ValueError, IndexError):
        return
    same = [np.allclose(actual[n], expected[n], rtol=1e-7) for n in expected if n in actual]
    assert not all(same)
