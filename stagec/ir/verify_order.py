"""Checks of layers of several kinds: every kind is a repeat, and the repeats of a stack pass their
carried values to each other, and nothing else."""

from collections.abc import Iterator, Mapping

from stagec.ir.core import Operation, Region, SymbolRef, Value
from stagec.ir.expr import const, evaluate
from stagec.ir.facts import Relation
from stagec.ir.layers import LayerStack, declaration_of, in_order
from stagec.ir.module import Module
from stagec.ir.order import LayerOrder
from stagec.ir.traits import EndsLifetime, Repeats
from stagec.ir.types import TensorType, Type
from stagec.support.diagnostics import DiagnosticError, DiagnosticList
from stagec.support.suggest import did_you_mean


def check_orders(module: Module, problems: DiagnosticList) -> None:
    """Append errors of the stacks of a module, whose operations have valid signatures and regions
    with terminators."""
    owners = [*module.functions, *module.graphs]
    walked = (op for owner in owners for op in owner.walk())
    ordered = [op for op in walked if "order" in op.attrs and op.has(Repeats)]
    before = len(problems.items)
    for op in ordered:
        _check_kind(op, module.env, problems)
    if len(problems.items) > before:
        return
    regions = dict.fromkeys(op.parent for op in ordered if op.parent is not None)
    for region in regions:
        _check_region(region, problems)


def _check_kind(op: Operation, env: Mapping[str, int], problems: DiagnosticList) -> None:
    name = op.attrs["order"]
    declared = declaration_of(op, name) if isinstance(name, SymbolRef) else None
    order = declared.attrs.get("layers") if declared is not None else None
    if not isinstance(order, LayerOrder):
        problems.error(
            f"'{op.name}' refers to the order {name}, which the module does not declare",
            op.loc,
            remedy=f"declare it: stg.order {name}[4*{op.symbol or 'kind'}]",
        )
        return
    if op.symbol is None or op.symbol not in order.counts:
        actual = f"@{op.symbol}" if op.symbol else "no name"
        problems.error(
            f"'{op.name}' has {actual}, but the kinds of {name} are {', '.join(order.counts)}",
            op.loc,
            remedy=did_you_mean(op.symbol or "", order.counts, "@")
            or f"name it after its kind: stg.repeat @{next(iter(order.counts))}[...]",
        )
        return
    count, wanted = op.expr("count"), order.counts[op.symbol]
    if count.symbols <= env.keys() and not Relation(count, "==", const(wanted)).holds(env):
        is_ = f"{count} = " if count.symbols else ""
        problems.error(
            f"'{op.name} @{op.symbol}' runs {is_}{evaluate(count, env)} times, but {name} has "
            f"{wanted} layers of this kind",
            op.loc,
            remedy="change the order or the count: each layer of a kind is an iteration",
        )


def _check_region(region: Region, problems: DiagnosticList) -> None:
    try:
        steps = in_order(region)
    except DiagnosticError as e:
        problems.add(*e.diagnostics)
        return
    for step in steps:
        if isinstance(step, LayerStack) and step.order is not None and step.carried:
            misfits = _wrong(step, step.order)
            for op, message, remedy in misfits:
                problems.error(f"'{op.name} @{op.symbol}' {message}", op.loc, remedy=remedy)


_CHAIN = (
    "bind what it carries to what the repeat before it yields, and carry values in one placement: "
    "state the same splits for all kinds"
)


def _wrong(stack: LayerStack, order: LayerOrder) -> Iterator[tuple[Operation, str, str]]:
    """The repeats with errors, each with a message and a remedy."""
    first, name = stack.members[0], stack.members[0].attrs["order"]
    if missing := [k for k in order.counts if k not in {op.symbol for op in stack.members}]:
        yield (
            first,
            f"is a kind of layers of {name}, but the region has no stg.repeat @{missing[0]}",
            "write all kinds of layers of a stack in one region, one after the other",
        )
    for before, op in zip(stack.members, stack.members[1:], strict=False):
        if op.integer("carry", 1) != stack.carried:
            message = f"carries {op.integer('carry', 1)} values, @{before.symbol} {stack.carried}"
            yield op, message, "carry the same values through all kinds of a stack"
            continue
        for made, value in zip(before.results, op.operands[: stack.carried], strict=False):
            if value is not made:
                message = (
                    f"carries on with %{value.name}, expected %{made.name} of @{before.symbol}"
                )
                yield op, message, _CHAIN
            elif others := _others(made, op):
                yield (
                    before,
                    f"passes %{made.name} on to @{op.symbol}, but '{others[0].name}' uses it too",
                    "use the result of the last repeat of the stack: the layers are interleaved",
                )
        for mine, other in zip(first.body.args, op.body.args[: stack.carried], strict=False):
            if not _alike(mine.type, other.type):
                message = f"carries {other.type}, but @{first.symbol} carries {mine.type}"
                yield op, message, _CHAIN


def _others(value: Value, user: Operation) -> list[Operation]:
    """Other users of a value, except those that end its lifetime."""
    return [u for u, _ in value.uses if u is not user and not u.has(EndsLifetime)]


def _alike(one: Type | None, other: Type | None) -> bool:
    """Whether a layer can take a value of one type where another one is yielded."""
    if not isinstance(one, TensorType) or not isinstance(other, TensorType):
        return True
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and (one == other or not (one.placed and other.placed))
