"""Equal types are one object, however they are made."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from typing import Any

import pytest

from stagec.ir.expr import symbol
from stagec.ir.types import AxisUse, Dim, Load, Partial, TensorType
from tests.support import dim

B, F = symbol("B"), symbol("F")


def test_equal_types_are_one_object() -> None:
    made = TensorType("bf16", (dim(B, "dp"), Dim(F)), Partial("sum", ("tp",)), True)
    again = TensorType("bf16", (Dim(B, (AxisUse("dp"),)), dim(F)), Partial("sum", ("tp",)), True)
    assert made is again
    assert replace(replace(made, role="param"), role="") is made
    assert replace(made, role="param").inner is made
    assert pickle.loads(pickle.dumps(made)) is made
    assert copy.deepcopy(made) is made


@pytest.mark.parametrize(
    "changed",
    [
        *({"dtype": "f32"}, {"dims": (dim(B), Dim(F))}, {"partial": None}, {"placed": False}),
        *({"memory": "host"}, {"stage": ("pp", 1)}, {"role": "param"}, {"part": ("w", 0)}),
        {"share": Fraction(1, 2)},
    ],
)
def test_types_that_differ_are_others(changed: dict[str, Any]) -> None:
    made = TensorType("bf16", (dim(B, "dp"), Dim(F)), Partial("sum", ("tp",)), True)
    other = replace(made, **changed)
    assert other is not made
    assert other != made
    assert other is replace(made, **changed)


def test_dimensions_that_differ_are_others() -> None:
    made = {Dim(B), Dim(B, open=True), Dim(B, load=Load("E")), dim(B, "dp"), dim(B, "tp"), Dim(F)}
    assert len(made) == 6


def test_a_share_of_all_is_none() -> None:
    assert TensorType("f32", (Dim(B),), share=Fraction(2, 2)) is TensorType("f32", (Dim(B),))


def test_types_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TensorType("f32").dtype = "bf16"  # type: ignore[misc]


class _Slow(str):
    """An element type; whoever looks it up a second time is overtaken by another maker."""

    looks = 0

    def __hash__(self) -> int:
        _Slow.looks += 1
        if _Slow.looks == 2:
            overtaking.append(TensorType("slow"))
        return hash("slow")


overtaking: list[TensorType] = []


def test_types_that_are_made_at_once_are_one_object() -> None:
    """As by two threads of a worker: a type that another one makes meanwhile is the one."""
    made = TensorType(_Slow("slow"))
    assert overtaking == [made]
    assert overtaking[0] is made
