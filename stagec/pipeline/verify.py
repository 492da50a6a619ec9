"""Verification of a module against the rules of its phase, between passes."""

from __future__ import annotations

from collections.abc import Iterable

from stagec.ir.core import Value
from stagec.ir.module import Module
from stagec.ir.types import TensorType
from stagec.ir.verified import VerifiedCache
from stagec.ir.verify import check_module
from stagec.ir_spec.phases import Phase, PhaseRow, phase_named
from stagec.pipeline.verify_stages import check_stages
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
