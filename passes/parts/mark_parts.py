"""mark-parts: an stg.cross behind each value that ends a part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagec.api import (
    Builder,
    Loc,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Value,
    error,
    made_by,
    note,
    read_strategy,
)
from stagec.ir.types import FLOATS, PARAMETERS
from stagec.ir_spec.ops.parts import MAIN, Cross, PartRule
from stagec.sharding.parts import crosses
from stagec.support.suggest import did_you_mean


@dataclass(frozen=True)
class MarkParts(Pass):
    """Put an `stg.cross` behind each value that `stg.part` names; all users take its result.

    What the value is computed of is the part, as far as nothing else takes it. What no parameter
    has a part in, such as a mask, every part computes for itself. A parameter that the rest of the
    model uses too, such as a tied embedding, is main's: what takes it there is main's, and crosses
    to the part.

    Before:
        stg.strategy @s {
          stg.part[encoder, of = e]
        }
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> f32[] {
          %e = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%e) : f32[]
          stg.return(%l)
        }
    After:
        stg.strategy @s {
          stg.part[encoder, of = e]
        }
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> f32[] {
          %e = stg.mul(%x, %w) : f32[B]
          %e_main = stg.cross[e, source = encoder, to = main](%e) : f32[B]
          %l = stg.sum["b->"](%e_main) : f32[]
          stg.return(%l)
        }
    """

    name = "mark-parts"
    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).all(PartRule))

    def run(self, module: Module) -> None:
        mark_parts(module, read_strategy(module).all(PartRule))


def mark_parts(module: Module, rules: tuple[PartRule, ...]) -> None:
    """Put an `stg.cross` behind the value of each part, in place.

    Raises `DiagnosticError` for names that are unknown or stand twice, values that are no result of
    the function itself, parts of parts, and parameters of two parts.
    """
    body = module.main.body
    names: set[str] = set()
    for rule in rules:
        if rule.name in names or rule.name == MAIN:
            what = "is the rest of the model" if rule.name == MAIN else "stands twice"
            raise error(f"the part '{rule.name}' {what}", rule.loc, remedy="choose another name")
        names.add(rule.name)
        value = _named(body, rule)
        if not value.uses:
            raise error(f"nothing uses %{value.name}", rule.loc, remedy="name another value")
        _cross(module, value, rule.name, MAIN, rule.loc)
    for op in crosses(body):
        _share(module, body, op)
    _check_alone(body)


def _cross(module: Module, value: Value, source: str, to: str, loc: Loc) -> None:
    """Let all that use a value take what crosses."""
    users, op = list(value.uses), value.producer
    attrs = {"value": value.name, "source": source, "to": to}
    if op is not None:
        b = Builder.after(module.registry, op, loc=made_by(MarkParts.name, loc))
        there = b.value("stg.cross", [value], attrs, hint=f"{value.name}_{to}")
        for user, index in users:
            user.set_operand(index, there)


def _share(module: Module, body: Region, end: Operation) -> None:
    """Leave main what takes a parameter that main uses too, and nothing of the part."""
    mine, theirs = _takes(body, [end.operands[0]])[0], _takes(body, body.terminator.operands)[0]
    for shared in [v for v in _parameters(mine) if v in theirs]:
        for op in dict.fromkeys(op for op, _ in shared.uses if op in body.ancestors(end.operands)):
            alone = set(_parameters(_takes(body, op.operands)[0])) == {shared}
            if alone and op.region is None:
                _cross(module, op.result, MAIN, end.text("source"), end.loc)


def _named(body: Region, rule: PartRule) -> Value:
    """The value that ends a part. Raises `DiagnosticError`."""
    if len(rule.of) != 1:
        raise error(f"the part '{rule.name}' has several values", rule.loc, remedy="name one")
    name = rule.of[0]
    found = [v for v in body.values() if v.is_called(name)]
    own = [v for v in found if v.producer is not None and v.region is body]
    if not found:
        known = {v.name.rpartition("/")[2] for v in body.values() if v.producer is not None}
        raise error(
            f"the model has no value '%{name}'",
            rule.loc,
            remedy=did_you_mean(name, known) or "'stagec models NAME' prints the model's text",
        )
    if not own or own[0].tensor.dtype not in FLOATS:
        what = "an argument" if found[0].producer is None and found[0].region is body else ""
        what = what or ("made inside of layers" if not own else f"no number: {own[0].type}")
        raise error(
            f"%{name} ends the part '{rule.name}', and is {what}",
            rule.loc,
            remedy="name a value that the function itself computes, outside of repeats",
            notes=[note(f"%{name} is here", found[0].loc)],
        )
    if len(own) > 1:
        raise error(
            f"the model has several values '%{name}': {', '.join(f'%{v.name}' for v in own)}",
            rule.loc,
            remedy="write more of the path",
        )
    return own[0]


# -- parts have nothing but crossings in common ----------------------------------------------------


def _check_alone(body: Region) -> None:
    """Refuse parts of parts, and parameters that two parts use."""
    users: dict[Value, str] = {}
    ends: dict[str, list[Value]] = {MAIN: list(body.terminator.operands)}
    for op in crosses(body):
        ends.setdefault(op.text("source"), []).append(op.operands[0])
    for part, values in ends.items():
        taken, given = _takes(body, values)
        for op in given:
            if op.text("to") != part:
                raise error(
                    f"the part '{part}' takes %{op.operands[0].name} of the part "
                    f"'{op.text('source')}'",
                    op.loc,
                    remedy="let one part compute both",
                )
        for value in _parameters(taken):
            if (other := users.setdefault(value, part)) != part:
                raise error(
                    f"the parameter %{value.name} is used by the parts '{other}' and '{part}'",
                    value.loc,
                    remedy="untie it, or name a value that it has no part in",
                )


def _takes(body: Region, ends: Iterable[Value]) -> tuple[set[Value], list[Operation]]:
    """The arguments that values are computed of without crossing, and what crosses to them."""
    found: set[Value] = set()
    given: list[Operation] = []
    pending, seen = list(ends), set[Value]()
    while pending:
        value = pending.pop()
        op = value.producer
        if value in seen:
            continue
        seen.add(value)
        if op is None:
            found.add(value)
        elif isinstance(op.definition, Cross):
            given.append(op)
        elif op.parent is body:
            pending += op.reads()
    return found, given


def _parameters(values: Iterable[Value]) -> Iterator[Value]:
    return (v for v in values if v.tensor.role in PARAMETERS)
