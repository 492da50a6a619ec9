"""The analysis as plain data: the object that `stagec analyze --json` prints, with numbers or
expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stagec.analysis.count import FLOP_PHASES, MATMUL_PHASES, MEMORY, Counts, count_module
from stagec.ir.expr import ZERO, Expr, evaluate, expand
from stagec.ir.module import Module
from stagec.ir.types import axis_size
from stagec.support.diagnostics import error

SCHEMA = 1
Show = Callable[[Expr], Any]


def analysis(module: Module, model: str, *, symbolic: bool = False) -> dict[str, Any]:
    """Counts per rank and training step of a lowered module.

    With `symbolic` every number is the text of an expression. Raises `DiagnosticError` if a size is
    open otherwise.
    """
    counts = count_module(module)
    env = module.env
    show: Show = _text if symbolic else lambda e: _number(e, env, module)
    mesh = module.mesh
    axes = {a: (n if n is not None else a) for a, n in mesh.sizes.items()} if mesh else {}
    return {
        "schema": SCHEMA,
        "model": model,
        "ranks": show(counts.ranks),
        "mesh": axes,
        "parameters": show(counts.parameters),
        "classes": [_class(counts, show, symbolic)],
    }


def _text(value: Expr) -> str:
    return str(value)


def _number(value: Expr, env: Mapping[str, int], module: Module) -> int:
    missing = sorted(value.symbols - env.keys())
    if missing:
        raise error(
            f"no value for {', '.join(missing)}",
            module.root.loc,
            remedy=f"{module.how_to_set(missing)}, or print expressions: --symbolic",
        )
    return evaluate(value, env)


def _class(counts: Counts, show: Show, symbolic: bool) -> dict[str, Any]:
    return {
        "name": "stage0",
        "count": show(counts.ranks),
        "example_rank": 0,
        "coords": {},
        "flops": {p: show(counts.flops.get(p, ZERO)) for p in FLOP_PHASES},
        "matmul_flops": {p: show(counts.matmul.get(p, ZERO)) for p in MATMUL_PHASES},
        "collectives": _collectives(counts, show, symbolic),
        "p2p": [],
        "memory": {n: show(counts.memory.get(n, ZERO)) for n in MEMORY},
        "nodes": {
            "comp": show(counts.computations),
            "coll": show(counts.communications),
            "send": show(ZERO),
            "recv": show(ZERO),
        },
    }


def _collectives(counts: Counts, show: Show, symbolic: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key, found in counts.collectives.items():
        size = axis_size(key.over)
        n = show(size)
        wire = show(found.wire(key)) if symbolic else _ring(show(found.bytes), n, key.op)
        rows.append(
            {
                "op": key.op,
                "over": list(key.over),
                "group_size": n,
                "phase": key.phase,
                "dtype": key.dtype,
                "count": show(expand(found.count)),
                "bytes": show(found.bytes),
                "wire_bytes": wire,
            }
        )
    return rows


def _ring(size: int, members: int, op: str) -> int:
    """Bytes sent per rank on a ring, rounded up to a whole byte where a buffer does not divide."""
    steps = (2 if op == "all_reduce" else 1) * (members - 1)
    return -(-size * steps // members)
