"""Verification of a module against the rules of its phase, between passes.

Beside it: checks between the functions, or the lowered graphs, of pipeline stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from stagec.ir.core import Operation, Value
from stagec.ir.module import Module
from stagec.ir.opdef import OpDef
from stagec.ir.types import TensorType
from stagec.ir.verified import VerifiedCache
from stagec.ir.verify import check_module
from stagec.ir_spec.ops import pipeline, trace
from stagec.ir_spec.phases import Phase, PhaseRow, phase_named
from stagec.schedule.attached import accumulation_of, schedule_of, stages_of
from stagec.sharding.local import implicit_moves
from stagec.sharding.order import misordered
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, DiagnosticList, error
from stagec.support.suggest import did_you_mean


def phase_of(module: Module) -> Phase:
    """The phase that a module states. Raises `DiagnosticError` if there is no such phase."""
    phase = phase_named(module.phase)
    if phase is None:
        labels = [p.label for p in Phase]
        raise error(
            f"unknown phase '{module.phase}'",
            module.root.loc,
            remedy=did_you_mean(module.phase, labels) or f"use one of {', '.join(labels)}",
        )
    return phase


def verify_module(module: Module, verified: VerifiedCache | None = None) -> None:
    """Check all rules of the phase of a module.

    Operations that are `verified` already, and unchanged, are not checked again. Raises
    `DiagnosticError` with all errors.
    """
    verified = verified or VerifiedCache()
    verified.start(module)
    if verified.knows(module.root, "all"):
        return
    problems = DiagnosticList()
    try:
        row = phase_of(module).row
    except DiagnosticError as e:
        problems.add(*e.diagnostics)
        row = PhaseRow(0)
    check_module(module, problems, typed=row.typed, verified=verified)
    if row.arguments:
        for func in module.functions:
            _check_placed(module, func.body.args, problems)
    if row.placed:
        for op in verified.unknown(module.functions, "placed", problems):
            args = op.region.args if op.region is not None else ()
            _check_placed(module, (*args, *op.results), problems)
    if row.explicit and not problems.errors:
        _check_explicit(module, problems, verified)
    if row.lowered:
        _check_lowered(module, problems)
    if not problems.errors:
        check_stages(module, problems)
    problems.check()
    verified.passed(module.root, "all")
    verified.keep()


def _check_placed(module: Module, checked: Iterable[Value], problems: DiagnosticList) -> None:
    for value in checked:
        if isinstance(value.type, TensorType) and not value.type.placed:
            problems.error(
                f"%{value.name} is not placed, but the module is {module.phase}: {value.type}",
                value.loc,
                remedy="state its placement, such as '@dp' at a dimension or '| rep' for none",
            )


def _check_explicit(module: Module, problems: DiagnosticList, verified: VerifiedCache) -> None:
    facts, order, deferred = verified.facts, module.zigzag, read_strategy(module).deferred
    for op in verified.unknown(module.functions, ("explicit", deferred), problems):
        if op.definition.declares:
            continue  # the function itself
        for message in implicit_moves(op, facts, deferred):
            problems.error(
                f"'{op.name}' {message}",
                op.loc,
                remedy="insert the collective that moves it, or run 'insert-collectives' before",
            )
        for message in misordered(op, order):
            problems.error(
                f"'{op.name}' {message}",
                op.loc,
                remedy="use plain order: stg.ring[S, order = plain], or --cp-order plain",
            )


def _check_lowered(module: Module, problems: DiagnosticList) -> None:
    graphs = module.graphs
    if not graphs or module.functions:
        problems.error(
            f"a lowered module holds et.graph and no stg.func, found {len(graphs)} and "
            f"{len(module.functions)}",
            module.root.loc,
            remedy="run 'lower-to-trace', or correct the phase of the module",
        )


#: Direction, `by` and channel of an end of a message.
_End = tuple[str, int, int]
#: The ops of each direction, before and after lowering.
_ENDS: Mapping[str, tuple[type[OpDef], ...]] = {
    "send": (pipeline.SendOp, trace.SendNode),
    "recv": (pipeline.RecvOp, trace.RecvNode),
}


def check_stages(module: Module, problems: DiagnosticList) -> None:
    """Check that every stage has one program, that its schedule supports its sizes, and that every
    send has a receive."""
    programs = [*module.functions, *module.graphs]
    staged = [op for op in programs if "stages" in op.attrs]
    if not staged:
        return
    over, loc = staged[0].text("over"), staged[0].loc
    count = module.env.get(over)
    if count is None:
        problems.error(
            f"the mesh gives no size to axis '{over}' of the pipeline stages",
            loc,
            remedy=f"give the mesh its size: stg.mesh @pod[{over} = {len(staged)}]",
        )
        return
    by_stage = {stage: op for op in staged for stage in stages_of(op)}
    every = sorted(stage for op in staged for stage in stages_of(op))
    if every != list(range(count)) or len(staged) != len(programs):
        problems.error(
            f"the programs are those of stages {', '.join(map(str, every))}, expected each of "
            f"0 to {count - 1} once",
            loc,
            remedy="write every stage in 'stages' of one program",
        )
        return
    for op in staged:
        _check_schedule(module, op, count, problems)
    for message, where in _unmatched(by_stage, count):
        problems.error(message, where.loc, remedy="write the other end, on the same channel")


def _check_schedule(module: Module, op: Operation, count: int, problems: DiagnosticList) -> None:
    accumulation = accumulation_of(op)
    if accumulation is None:
        problems.error(
            f"@{op.symbol} has no accumulation with a schedule",
            op.loc,
            remedy='state it: stg.accumulate[count = 8, schedule = "1f1b"]',
        )
        return
    try:
        schedule = schedule_of(module.registry, accumulation.text("schedule"))
        schedule.check(count, accumulation.integer("count"), accumulation.integer("chunks", 1))
    except DiagnosticError as e:
        problems.add(*e.diagnostics)


def _unmatched(by_stage: dict[int, Operation], count: int) -> Iterator[tuple[str, Operation]]:
    """Ends of messages without a matching end, once per program."""
    of_program = {op: _ends(op) for op in dict.fromkeys(by_stage.values())}
    ends = {stage: of_program[op] for stage, op in by_stage.items()}
    reported: set[tuple[str, _End]] = set()
    for stage, op in by_stage.items():
        for (kind, by, channel), number in ends[stage].items():
            step, other = (by, "recv") if kind == "send" else (-by, "send")
            peer = (stage + step) % count
            there = ends[peer][other, by, channel]
            end = kind, by, channel
            if there != number and (op.symbol or "", end) not in reported:
                reported.add((op.symbol or "", end))
                has = f"stage {stage} has {number} {kind}s with by = {by} on channel {channel}"
                yield f"{has}, but stage {peer} has {there} {other}s", op


def _ends(program: Operation) -> Counter[_End]:
    ends: Counter[_End] = Counter()
    for op in program.body.walk():
        for kind, ops in _ENDS.items():
            if isinstance(op.definition, ops) and op.text("over") == program.text("over"):
                ends[kind, op.integer("by"), op.integer("channel", 0)] += 1
    return ends
