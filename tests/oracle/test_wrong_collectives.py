"""A wrong collective must not go unseen: each one is broken in turn, and the machine has to raise
or compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from stagec.interp.machine import DisagreementError
from stagec.ir.core import Operation
from stagec.ir.expr import const
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir_spec.ops.comm import Collective
from stagec.support.diagnostics import DiagnosticError
from tests.support import (
    EXHAUSTIVE,
    GPT,
    LLAMA,
    MIXTRAL,
    PLACE,
    STEP,
    inputs_of,
    run_numeric,
    tiny_module,
)

MESH = ("dp", "tp")
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-sp-fsdp": (LLAMA, {"dp": 2, "tp": 2, "sp": True, "zero": 3}),
    "llama-sp-zero1-gathered": (
        LLAMA,
        {"dp": 2, "tp": 2, "sp": True, "zero": 1, "no_vocab_parallel": True},
    ),
    "mixtral-ep-fsdp": (MIXTRAL, {"dp": 4, "ep": 2, "tp": 2, "sp": True, "zero": 3}),
    "mixtral-whole-experts": (MIXTRAL, {"dp": 4, "ep": 4, "tp": 2, "etp": 1, "sp": True}),
    "gpt-sp-ddp-accumulated": (GPT, {"dp": 2, "tp": 2, "sp": True, "microbatches": 2}),
}


class Broken(Collective):
    """A collective whose exchange is another one's, changed."""

    def __init__(
        self, change: Callable[[Sequence[Array], Operation, int], Sequence[Array]]
    ) -> None:
        self._change = change

    def exchange(self, op: Operation, index: int, parts: Sequence[Array]) -> Sequence[Array]:
        return self._change(parts, op, index)


def collectives(module: Module) -> list[Operation]:
    return [op for op in module.walk() if isinstance(op.definition, Collective)]


@contextmanager
def with_definition(op: Operation, definition: Collective) -> Generator[None]:
    before, op.definition = op.definition, definition
    try:
        yield
    finally:
        op.definition = before


@contextmanager
def with_attr(op: Operation, name: str, value: Any) -> Generator[None]:
    before = dict(op.attrs)
    op.attrs[name] = value
    try:
        yield
    finally:
        op.attrs = before


def breakages(op: Operation) -> Iterator[tuple[str, Any]]:
    """Ways to break a collective, as context managers."""
    whole = op.definition
    assert isinstance(whole, Collective)
    yield "left out", with_definition(op, Broken(lambda parts, _op, _i: parts))
    yield "axes", with_attr(op, "over", other_axes(op))
    if "dim" in op.attrs:
        for index in sorted({0, len(op.operands) - 1}):
            rank = op.operands[index].tensor.rank
            if rank > 1:
                yield f"dim of operand {index}", with_attr(op, "dim", other_dim(op, index, rank))
        yield "order", with_definition(op, Broken(lambda p, o, i: swapped(whole, p, o, i)))
    elif op.text("kind", "sum") == "sum":
        # A sum where the maximum of the logits is due changes nothing: any shift will do.
        yield "kind", with_attr(op, "kind", "max")


def swapped(
    whole: Collective, parts: Sequence[Array], op: Operation, index: int
) -> Sequence[Array]:
    """The exchange as if the ranks of the group stood in the opposite order."""
    return list(whole.exchange(op, index, list(parts)[::-1]))[::-1]


def other_axes(op: Operation) -> tuple[str, ...]:
    over = op.names("over")
    return tuple(a for a in MESH if a not in over) if len(over) == 1 else over[:1]


def other_dim(op: Operation, index: int, rank: int) -> Any:
    value = op.attrs["dim"]
    dims = list(value) if isinstance(value, tuple) else [value]
    dims = dims if len(dims) == len(op.operands) else dims * len(op.operands)
    now = dims[index]
    dims[index] = const((int(str(now)) + 1) % rank)
    return tuple(dims)


def unseen(module: Module, inputs: dict[str, Array], expected: list[Array]) -> bool:
    """Whether the module, broken as it is, computes what it should."""
    try:
        actual = run_numeric(module, inputs)
    except (DisagreementError, DiagnosticError, ValueError, IndexError):
        return False
    return all(
        np.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in zip(expected, actual, strict=True)
    )


#: Their kinds of collectives are in the other configurations too.
MORE = ("mixtral-ep-fsdp", "llama-sp-zero1-gathered")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=EXHAUSTIVE if n in MORE else ()) for n in CONFIGURATIONS]
)
def test_a_broken_collective_is_seen(name: str) -> None:
    model, options = CONFIGURATIONS[name]
    sizes = {"B": 4, "L": 1}
    module = tiny_module(model, f"{STEP},{PLACE}", sizes=sizes, **options)
    start = tiny_module(model, STEP, sizes=sizes)
    inputs = {n: a * 3 if a.dtype.kind == "f" else a for n, a in inputs_of(start, 4).items()}
    expected = run_numeric(start, inputs)
    assert unseen(module, inputs, expected), "the intact program must be right"
    survivors: list[str] = []
    tried = 0
    for op in collectives(module):
        for kind, broken in breakages(op):
            with broken:
                tried += 1
                if unseen(module, inputs, expected):
                    survivors.append(f"{kind}: %{op.results[0].name} = {op!r}")
    assert not survivors, "\n".join(survivors)
    assert tried > 40
