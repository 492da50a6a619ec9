"""Stacks of layers: repeats whose layers run interleaved.

A repeat without an order is a stack by itself. Repeats with the same `order` in one region form one
stack in forward and one in backward: their layers run in the declared order, and the carried values
pass through all of them.

    stg.order @layers[(2*a, b)*2]

    %x1 = stg.repeat @a[count = 4, carry = 1, order = @layers] (%h = %x, ...)
    %y = stg.repeat @b[count = 2, carry = 1, order = @layers] (%g = %x1, ...)

runs a 0, a 1, b 0, a 2, a 3, b 1: %h of a 2 is what b 0 yields, and %y is what b 1 yields.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stagec.ir.core import Operation, Region, SymbolRef, Value
from stagec.ir.order import LayerOrder
from stagec.ir.traits import Repeats


class LayerTurn(NamedTuple):
    """A layer of a stack: its position in the stack, the index of its kind among the members, and
    its number among the layers of the kind."""

    place: int
    member: int
    number: int


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Repeats whose layers run interleaved. The carried operands of each member are the results of
    the previous one in the text. `order` is None for a repeat by itself."""

    members: tuple[Operation, ...]
    order: LayerOrder | None = None

    def turns(self, count: int) -> Sequence[LayerTurn]:
        """The layers in execution order; a repeat by itself has `count` of them."""
        alone = self.order is None
        result = [LayerTurn(i, 0, i) for i in range(count)] if alone else self._ordered
        return result[::-1] if self.members[0].flag("reverse") else result

    @cached_property
    def _ordered(self) -> list[LayerTurn]:
        numbers = {op.symbol: number for number, op in enumerate(self.members)}
        layers = enumerate(self.order.numbered) if self.order is not None else ()
        return [LayerTurn(p, numbers[k], i) for p, (k, i) in layers if k in numbers]

    @property
    def carried(self) -> int:
        """The number of values that pass from layer to layer."""
        return self.members[0].integer("carry", 1)

    @property
    def inputs(self) -> Sequence[Value]:
        """The carried values that enter the first layer."""
        return self.members[0].operands[: self.carried]


def kind_of(repeat: Operation) -> str | None:
    """The name of a repeat that is one kind of layers of a stack; None for a repeat by itself."""
    return repeat.symbol if "order" in repeat.attrs else None


def order_of(repeat: Operation) -> LayerOrder | None:
    """The order of the stack of a repeat, None for a repeat by itself. Raises `DiagnosticError` if
    it is not declared."""
    name = repeat.attrs.get("order")
    if not isinstance(name, SymbolRef):
        return None
    declared = declaration_of(repeat, name)
    order = declared.attrs.get("layers") if declared is not None else None
    if isinstance(order, LayerOrder):
        return order
    raise repeat.error(
        f"no stg.order {name} is declared",
        remedy=f"declare it in the module: stg.order {name}[2*{repeat.symbol or 'kind'}]",
    )


def declaration_of(repeat: Operation, name: SymbolRef) -> Operation | None:
    """The operation of the module that declares an order, or None."""
    op: Operation = repeat
    while (outer := op.parent_op) is not None:
        op = outer
    ops = op.region.ops if op.region is not None else ()
    declared = (o for o in ops if o.definition.declares == "layers" and o.symbol == name.name)
    return next(declared, None)


def place_of(repeat: Operation, index: int) -> int:
    """The position in its stack of the layer `index` of a repeat."""
    order = order_of(repeat)
    return index if order is None else order.places[repeat.symbol or ""][index]


def stack_of(repeat: Operation) -> LayerStack:
    """The stack of a repeat; any other operation is a stack by itself."""
    if not repeat.has(Repeats) or "order" not in repeat.attrs or repeat.parent is None:
        return LayerStack((repeat,))
    return LayerStack(tuple(_members(repeat, repeat.parent)), order_of(repeat))


def entering(arg: Value) -> Value:
    """The argument of the first repeat of the stack for the carried value of this argument."""
    return stack_of(arg.region.owner).members[0].body.args[arg.index]


def _members(repeat: Operation, region: Region) -> Iterator[Operation]:
    """The repeats of the stack of a repeat, in text order. A second repeat of a kind begins another
    stack."""
    members: list[Operation] = []
    for op in region.ops:
        if not op.has(Repeats) or _key(op) != _key(repeat):
            continue
        if any(op.symbol == other.symbol for other in members):
            if repeat in members:
                break
            members = []
        members.append(op)
    return iter(members)


def _key(op: Operation) -> tuple[object, ...]:
    forward = op.phase == "forward"
    return op.attrs.get("order"), forward, op.flag("reverse"), op.integer("carry", 1) > 0


def in_order(region: Region) -> list[Operation | LayerStack]:
    """The operations of a region without the terminator, in execution order. The repeats of a stack
    run together, at the place of the first one.

    Operations between them run before the stack if a repeat needs them, else after it. Raises
    `DiagnosticError` if a repeat needs a result of another one of its stack that is not carried.
    """
    ops = region.ops[:-1]
    if not any(op.has(Repeats) and "order" in op.attrs for op in ops):
        return [LayerStack((op,)) if op.has(Repeats) else op for op in ops]
    steps: list[Operation | LayerStack] = []
    done: set[Operation] = set()
    for number, op in enumerate(ops):
        if op in done:
            continue
        if not op.has(Repeats):
            steps.append(op)
            continue
        stack = stack_of(op)
        later = [o for o in ops[number + 1 :] if o not in done]
        before = _needed(stack, later)
        steps += [LayerStack((o,)) if o.has(Repeats) else o for o in before]
        steps.append(stack)
        done |= {*before, *stack.members}
    return steps


def _needed(stack: LayerStack, later: Sequence[Operation]) -> list[Operation]:
    """Those of the later operations on which a further repeat of the stack depends."""
    rest, wanted = stack.members[1:], set[Value]()
    for op in rest:
        wanted.update(list(op.reads())[stack.carried :])
    needed: list[Operation] = []
    for op in reversed(later):
        if op in rest or not wanted.intersection(op.results):
            continue
        needed.append(op)
        wanted.update(op.reads())
    for op in stack.members:
        for value in op.results:
            if value in wanted:
                raise op.error(
                    f"%{value.name} is produced by layers of one kind and used by layers of "
                    "another kind in the same stack",
                    remedy="pass it on as a carried value, or leave the order out",
                )
    return needed[::-1]
