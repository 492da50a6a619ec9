"""The analysis as plain data: the object of `stagec analyze --json`, with numbers or
expressions."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stagec.analysis.count import (
    FLOP_PHASES,
    MATMUL_PHASES,
    MEMORY,
    Counts,
    count_graph,
    group_size,
    lowered_graphs,
    ring_bytes,
)
from stagec.analysis.mean_loads import MeanLoads
from stagec.analysis.memory import staged_memory
from stagec.analysis.model_flops import ModelFlops, step_flops
from stagec.ir.core import Operation
from stagec.ir.expr import ZERO, Env, Expr, const, evaluate, expand, total
from stagec.ir.kernel import EXTENTS
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.types import axis_size, index_name
from stagec.memory.timeline import BUCKETS, CACHES
from stagec.program.classes import class_coordinates

SCHEMA = 1
Show = Callable[[Expr], Any]


def analysis(
    module: Module,
    model: str,
    *,
    symbolic: bool = False,
    worst: Mapping[int, Mapping[str, Any]] | None = None,
    flops: ModelFlops | None = None,
) -> dict[str, Any]:
    """The counts per rank and step of a lowered module; `worst` are the `worst_moments` of its
    plan, and `flops` the `model_flops` of its text.

    With `symbolic` every number is the text of an expression. Without it, raises `DiagnosticError`
    if a size is open.
    """
    graphs = lowered_graphs(module)
    show: Show = _text if symbolic else in_env(module.env, module)
    summed = _multiplied_out if symbolic else show
    mesh = module.mesh
    axes = {a: (n if n is not None else a) for a, n in mesh.sizes.items()} if mesh else {}
    peaks = worst or {}
    classes: list[dict[str, Any]] = []
    products: dict[str, Expr] = dict.fromkeys(MATMUL_PHASES, ZERO)
    for graph in graphs:
        for stage, entry, matmul in _classes(module, graph, symbolic):
            classes.append({**entry, "worst": peaks.get(stage)})
            products = {phase: products[phase] + matmul[phase] for phase in products}
    parameters = graphs[0].attrs.get("parameters")
    trainable = graphs[0].attrs.get("trainable", parameters)
    return {
        "schema": SCHEMA,
        "model": model,
        "ranks": show(axis_size(axes)),
        "mesh": axes,
        "parameters": show(parameters if isinstance(parameters, Expr) else ZERO),
        "trainable_parameters": show(trainable if isinstance(trainable, Expr) else ZERO),
        "model_flops": None if flops is None else show(step_flops(flops, graphs)),
        "matmul_flops": {phase: summed(flops) for phase, flops in products.items()},
        "classes": sorted(classes, key=lambda c: list(c["coords"].values())),
        "fit": None,
        "cautions": [],
    }


def _classes(
    module: Module, graph: Operation, symbolic: bool
) -> Iterator[tuple[int, dict[str, Any], Mapping[str, Expr]]]:
    """The stage and the entry of each rank class that runs the graph, and the FLOPs of matrix
    products of all its ranks. Figures that do not differ between classes are computed once."""
    means, figures = MeanLoads(module, graph), dict[str, Any]()
    counts = count_graph(module, graph, Operation.expr if symbolic else means.size)
    memories: dict[int, dict[str, Any]] = {}
    axis = graph.text("over")
    planned: Show = _text if symbolic else in_env(planned_env(module), module)
    for coords in class_coordinates(module, graph):
        inner = {index_name(a): i for a, i in coords.items() if a != axis}
        loads = means.values(coords)
        env: Env = {**module.env, **inner, **loads}
        show: Show = _text if symbolic else in_env(env, module)
        if inner or loads or not figures:
            figures = _class(counts, show, symbolic)
        stage = coords.get(axis, 0)
        rest = [f"{a}{i}" for a, i in coords.items() if a != axis]
        if stage not in memories:
            memory = staged_memory(module, graph, counts.memory, stage)
            named = (n for n in MEMORY if n not in (CACHES, BUCKETS) or n in memory)
            memories[stage] = {
                "communication" if n == BUCKETS else n: planned(memory.get(n, ZERO)) for n in named
            }
        ranks = _ranks(module, coords)
        entry = {
            **figures,
            "name": "-".join((f"stage{stage}", *rest)),
            "count": show(ranks),
            "example_rank": _first_rank(module, coords),
            "coords": coords,
            "memory": memories[stage],
        }
        flops = figures["matmul_flops"]
        products = {
            p: ranks * (counts.matmul.get(p, ZERO) if symbolic else const(flops[p]))
            for p in MATMUL_PHASES
        }
        yield stage, entry, products


def _ranks(module: Module, coords: Mapping[str, int]) -> Expr:
    axes = module.mesh.axes if module.mesh else ()
    return axis_size(a for a in axes if a not in coords)


def _first_rank(module: Module, coords: Mapping[str, int]) -> int:
    """The lowest rank at these coordinates; open axes count as 1."""
    rank = 0
    sizes = module.mesh.sizes if module.mesh else dict[str, int | None]()
    for axis, size in sizes.items():
        rank = rank * (size or 1) + coords.get(axis, 0)
    return rank


def in_env(env: Env, module: Module) -> Show:
    """A function that evaluates expressions, and raises `DiagnosticError` for open sizes."""
    return lambda e: _number(e, env, module)


def _text(value: Expr) -> str:
    return str(value)


def _multiplied_out(value: Expr) -> str:
    """The text of an expanded expression. Numbers do not need this, and it is slow."""
    return str(expand(value))


def _number(value: Expr, env: Env, module: Module) -> int:
    if not value.symbols <= env.keys():
        value = expand(value)  # some may cancel
    missing = sorted(value.symbols - env.keys())
    if missing:
        more = ", or print expressions: 'stagec analyze --symbolic'"
        raise module.no_value(missing, module.root.loc, more=more)
    return evaluate(value, env)


def _class(counts: Counts, show: Show, symbolic: bool) -> dict[str, Any]:
    summed = _multiplied_out if symbolic else show
    return {
        "name": "",
        "count": 0,
        "example_rank": 0,
        "coords": {},
        "flops": {p: summed(counts.flops.get(p, ZERO)) for p in FLOP_PHASES},
        "matmul_flops": {p: summed(counts.matmul.get(p, ZERO)) for p in MATMUL_PHASES},
        "bytes_touched": {k: summed(counts.bytes.get(k, ZERO)) for k in EXTENTS},
        "collectives": _collectives(counts, show, symbolic),
        "p2p": _messages(counts, show, summed),
        "memory": {},
        "nodes": {
            "comp": show(counts.computations),
            "coll": show(counts.communications),
            "send": show(_count_of(counts, "send")),
            "recv": show(_count_of(counts, "recv")),
            "store": show(counts.copies.get("host", ZERO)),
            "load": show(counts.copies.get("device", ZERO)),
        },
    }


def _collectives(counts: Counts, show: Show, symbolic: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for key, sent in counts.collectives.items():
        n = show(group_size(key.over))
        wire = show(sent.wire(key)) if symbolic else ring_bytes(show(sent.bytes), n, key.op)
        rows.append(
            {
                "op": key.op,
                "over": key.over.words,
                "group_size": n,
                "phase": key.phase,
                "dtype": key.dtype,
                "count": (_multiplied_out if symbolic else show)(sent.count),
                "bytes": show(sent.bytes),
                "wire_bytes": wire,
            }
        )
    return rows


def _messages(counts: Counts, show: Show, summed: Show) -> list[dict[str, Any]]:
    """The sent and received messages; those without calls at these sizes are left out."""
    rows = [
        {
            "dir": key.dir,
            "over": key.over,
            "peer": show(key.peer),
            "phase": key.phase,
            "dtype": key.dtype,
            "count": summed(sent.count),
            "bytes": summed(sent.bytes),
        }
        for key, sent in counts.messages.items()
    ]
    return [row for row in rows if row["count"] != 0]


def _count_of(counts: Counts, direction: str) -> Expr:
    return total(f.count for key, f in counts.messages.items() if key.dir == direction)
