"""mark-parts: an stg.cross behind each value that ends a part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stagec.api import (
    Builder,
    Module,
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
    has a part in, such as a mask, every part computes for itself.

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
        _mark(module, body, rule)
    _check_alone(body)


def _mark(module: Module, body: Region, rule: PartRule) -> None:
    value = _named(body, rule)
    users, op = list(value.uses), value.producer
    if op is None or not users:
        raise error(f"%{value.name} is not computed and used", rule.loc, remedy="name another one")
    attrs = {"value": value.name, "source": rule.name, "to": MAIN}
    b = Builder.after(module.registry, op, loc=made_by(MarkParts.name, rule.loc))
    there = b.value("stg.cross", [value], attrs, hint=f"{value.name}_{MAIN}")
    for user, index in users:
        user.set_operand(index, there)


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
    ends = {op.text("source"): (op.operands[0], op.loc) for op in crosses(body)}
    users: dict[Value, str] = {}
    for part, (end, loc) in ends.items():
        taken, given = _takes(body, [end])
        if given:
            raise error(
                f"the part '{part}' takes %{given[0].name} of another part",
                loc,
                remedy="let one part compute both",
            )
        _claim(users, taken, part)
    taken, _ = _takes(body, body.terminator.operands)
    _claim(users, taken, MAIN)


def _claim(users: dict[Value, str], taken: Iterable[Value], part: str) -> None:
    """Note whose parameters these are. Raises `DiagnosticError` for one that another part has."""
    for value in (v for v in taken if v.tensor.role in PARAMETERS):
        if (other := users.setdefault(value, part)) != part:
            raise error(
                f"the parameter %{value.name} is used by the parts '{other}' and '{part}'",
                value.loc,
                remedy="untie it, or name a value that it has no part in",
            )


def _takes(body: Region, ends: Iterable[Value]) -> tuple[set[Value], list[Value]]:
    """The arguments that values are computed of without crossing, and what crosses to them."""
    found: set[Value] = set()
    given: list[Value] = []
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
            given.append(op.operands[0])
        elif op.parent is body:
            pending += op.reads()
    return found, given

