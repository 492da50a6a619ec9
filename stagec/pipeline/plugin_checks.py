"""Checks of the contributions of a plug-in when it is loaded: names, kinds and classes.

Errors are reported with the class and its line, before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from stagec.ir.index_rule import IndexRule
from stagec.ir.opdef import OpDef
from stagec.ir.param import PARAM_KINDS, Param
from stagec.ir.traits import Trait
from stagec.pipeline.blame import place_of
from stagec.pipeline.passes import Pass, Plugin
from stagec.support.diagnostics import DiagnosticList
from stagec.support.source import Loc
from stagec.support.suggest import did_you_mean

_OP_NAME = re.compile(r"[a-z_]\w*\.[a-z_]\w*", re.ASCII)
_PASS_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
#: A message, and its remedy.
_Fault = tuple[str, str]


def valid_parts(plugin: Plugin, problems: DiagnosticList) -> Plugin:
    """The plug-in with its valid ops and passes only, and with other parts only where they are
    tuples; appends the errors of the others."""

    def kept(what: str, check: Callable[[object], Iterator[_Fault]] = _any) -> tuple[Any, ...]:
        given: Any = getattr(plugin, what)
        if not isinstance(given, tuple):
            message = f"plug-in '{plugin.name}': its {what} are not a tuple"
            problems.error(message, _place(given), remedy=f"write {what}=(MyOne,), with a comma")
            return ()
        return tuple(part for part in cast("tuple[object, ...]", given) if valid(part, check(part)))

    def valid(part: object, faults: Iterator[_Fault]) -> bool:
        messages = list(faults)
        for message, remedy in messages:
            problems.error(f"plug-in '{plugin.name}': {message}", _place(part), remedy=remedy)
        return not messages

    def pipelines(given: object) -> Mapping[str, str]:
        texts = cast("Mapping[str, str]", given if isinstance(given, Mapping) else {0: 0})
        if all(isinstance(text, str) for pair in texts.items() for text in cast("Any", pair)):
            return texts
        message = f"plug-in '{plugin.name}': its pipelines are not texts by name"
        remedy = 'write pipelines={"mine": "train,my-pass"}'
        problems.error(message, _place(plugin.pipelines), remedy=remedy)
        return {}

    return Plugin(
        plugin.name,
        kept("passes", _pass),
        kept("ops", _op),
        pipelines(plugin.pipelines),
        kept("schedules"),
        kept("formats"),
        kept("families"),
        kept("policies"),
    )


def _any(_: object) -> Iterator[_Fault]:
    return iter(())


def _place(part: object) -> Loc:
    return place_of(part if isinstance(part, type) else type(part))


def _pass(given: object) -> Iterator[_Fault]:
    if not isinstance(given, type) or not issubclass(given, Pass):
        yield f"{given!r} is not a class of a pass", "bring classes: passes=(MyPass,)"
        return
    if not given.name:
        yield f"it has a pass without a name: {given.__name__}", 'add name = "my-pass" to the class'
    elif not _PASS_NAME.fullmatch(given.name):
        yield (
            f"'{given.name}' is not a valid name of a pass",
            "use letters, digits and '-': my-pass",
        )


def _op(given: object) -> Iterator[_Fault]:
    if isinstance(given, type) and issubclass(given, OpDef):
        message = f"{given.__name__} is the class of an op, expected an instance"
        yield message, f"bring {given.__name__}()"
        return
    if not isinstance(given, OpDef):
        yield f"{given!r} is not an op", "bring instances of subclasses of OpDef: ops=(MyOp(),)"
        return
    if not _OP_NAME.fullmatch(str(given.name)):
        yield f"{given.name!r} is not a valid name of an op", "write it as dialect.op: my.relu6"
    for what in ("operands", "results", "params", "traits", "element_types"):
        if not isinstance(getattr(given, what), tuple):
            message = f"the {what} of op '{given.name}' are not a tuple"
            yield message, f"write {what} = (...,), with a comma"
            return
    for trait in given.traits:
        if not isinstance(cast("object", trait), Trait):
            message = f"op '{given.name}' has {trait!r} as a trait"
            yield message, "write an instance of a trait of stagec.api.traits: View()"
    yield from _op_data(given)
    seen: set[str] = set()
    for param in given.params:
        for message, remedy in _param(param, seen):
            yield f"op '{given.name}' {message}", remedy


def _op_data(given: OpDef) -> Iterator[_Fault]:
    if not isinstance(cast("object", given.index), IndexRule | None):
        message = f"op '{given.name}' has {given.index!r} as its index rule"
        yield message, 'write index = IndexRule("...->...")'
    flops = cast("object", given.flops_per_point)
    if not isinstance(flops, int) or flops < 0:
        message = f"op '{given.name}' has {flops!r} FLOPs per point"
        yield message, "write an integer from 0, or define 'flops'"


def _param(param: object, seen: set[str]) -> Iterator[_Fault]:
    if not isinstance(param, Param):
        yield f"has {param!r} as a parameter", 'write Param("by", "size", "what it is")'
        return
    if param.kind not in PARAM_KINDS:
        kinds = f"the kinds are: {', '.join(PARAM_KINDS)}"
        remedy = did_you_mean(str(param.kind), PARAM_KINDS)
        message = f"has parameter '{param.name}' of the unknown kind {param.kind!r}"
        yield message, f"{remedy} {kinds}" if remedy else kinds
    if param.name in seen:
        yield f"has two parameters '{param.name}'", "rename one of the two"
    seen.add(param.name)
    if isinstance(cast("object", param.choices), str):
        message = f"has parameter '{param.name}' whose choices are a text"
        yield message, 'write choices=("a", "b")'
