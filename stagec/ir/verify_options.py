"""Checks of options: each is declared once, in a private function, and used as declared."""

from collections.abc import Iterator, Mapping

from stagec.ir.core import Operation
from stagec.ir.module import Module
from stagec.ir.options import conditions, declared_options, is_statics, words_of
from stagec.ir.param import STATICS
from stagec.ir.traits import Conditional
from stagec.support.diagnostics import DiagnosticList, note
from stagec.support.suggest import did_you_mean
from stagec.support.words import counted

Options = Mapping[str, Operation]


def check_options(module: Module, problems: DiagnosticList) -> None:
    """Append errors of the options of functions and of their uses."""
    for func in module.functions:
        if func.region is not None:
            options = declared_options(func)
            _check_declarations(func, options, problems)
            for op in func.region.walk():
                if op.has(Conditional):
                    _check_when(op, options, problems)
                if STATICS in op.attrs:
                    _check_statics(op, options, problems)


def _check_declarations(func: Operation, options: Options, problems: DiagnosticList) -> None:
    private = func.flag("private")
    for op in func.body.ops:
        if op.definition.declares not in ("option", "statics"):
            continue
        first = options[op.symbol or ""]
        if not private:
            problems.error(
                f"@{func.symbol} is not private, so it cannot have options",
                op.loc,
                remedy="drop it, or write 'stg.func @name[private]'",
            )
        elif first is not op:
            problems.error(
                f"option @{op.symbol} is declared twice",
                op.loc,
                remedy="drop one of the two",
                notes=[note("the other one is here", first.loc)],
            )


def _check_when(op: Operation, options: Options, problems: DiagnosticList) -> None:
    for misfit in _misfits(op):
        problems.error(f"'{op.name}' {misfit}", op.loc, remedy="see 'stagec ops stg.when'")
    for name, words in conditions(op):
        if _declared(op, name, options, problems):
            known = words_of(options[name])
            if wrong := [word for word in words if word not in known]:
                problems.error(
                    f"option {name} has no value {wrong[0]}",
                    op.loc,
                    remedy=f"choose among {', '.join(known)}",
                    notes=[note("it is declared here", options[name].loc)],
                )


def _misfits(op: Operation) -> Iterator[str]:
    results, given = len(op.results), len(op.operands)
    made = len(op.body.terminator.operands) if op.region is not None and op.region.ops else results
    if not op.attrs:
        yield "expects an option, such as [bias]"
    if made != results:
        yield f"has {counted(results, 'result')}, but its region yields {made}"
    if given not in (0, results):
        yield f"has {counted(given, 'operand')}, expected one for each result, or none"
    if op.region is not None and op.region.args:
        yield "takes operands, but its region takes no arguments"


def _check_statics(op: Operation, options: Options, problems: DiagnosticList) -> None:
    name = op.text(STATICS)
    if _declared(op, name, options, problems) and not is_statics(options[name]):
        problems.error(
            f"option {name} is a choice of words, but '{op.name}' expects static parameters",
            op.loc,
            remedy=f"declare the option with 'stg.statics @{name}[...]'",
            notes=[note("it is declared here", options[name].loc)],
        )


def _declared(op: Operation, name: str, options: Options, problems: DiagnosticList) -> bool:
    if name not in options:
        problems.error(
            f"the function has no option {name}",
            op.loc,
            remedy=did_you_mean(name, options) or f"declare it: stg.option @{name}[no, yes]",
        )
    return name in options
