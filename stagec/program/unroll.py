"""Unrolls a lowered graph into the program of a rank class: the nodes of one rank, in order.

Repeats, accumulations and the actions of a pipeline schedule are unrolled only here. When the order
is final, nodes get identifiers, and each stream (computations, collectives, the messages of each
ordered pair of ranks) gets its control edges.
"""

from collections.abc import Mapping, Sequence

from stagec.ir.core import Operation, Region
from stagec.ir.queries import NumberOf, ask
from stagec.program.groups import Channel
from stagec.program.join import MOST_NODES, StepProgram
from stagec.program.nodes import Program
from stagec.program.sizes import Layered
from stagec.program.stamp import NODE, shape_of
from stagec.program.stepper import Order, Stepper, Templates
from stagec.support.limits import MAX_ITERATIONS


def unroll(
    graph: Operation,
    name: str,
    env: Mapping[str, int],
    order: Order | None = None,
    channels: Mapping[Channel, int] | None = None,
    loads: Layered | None = None,
    templates: Templates | None = None,
) -> Program:
    """Unroll an et.graph with the values `env` of symbols.

    `order` is the work of its pipeline stage, `channels` are the numbers of all message streams,
    `loads` sizes that differ from layer to layer, `templates` the steps that were unrolled for
    other stages. Raises `DiagnosticError` if there are no nodes, or too many.
    """
    program = unrolled(graph, env, order, channels, loads, templates).finish(name)
    if not len(program):
        raise graph.error("the program has no nodes", remedy="let the function compute something")
    return program


def unrolled(
    graph: Operation,
    env: Mapping[str, int],
    order: Order | None = None,
    channels: Mapping[Channel, int] | None = None,
    loads: Layered | None = None,
    templates: Templates | None = None,
) -> Stepper:
    """The first half of `unroll`: a stepper that has run the graph. Raises `DiagnosticError` for
    too many nodes or iterations."""
    count = _count(graph.body, env)
    if count > MOST_NODES:
        raise graph.error(
            f"the program has {count:,} nodes per rank, expected at most {MOST_NODES:,}",
            remedy="choose fewer layers or microbatches",
        )
    turns = _iterations(graph.body, env)
    if turns > MAX_ITERATIONS:
        raise graph.error(
            f"the repeats of the program run {turns:,} iterations and carried values, "
            f"expected at most {MAX_ITERATIONS:,}",
            remedy="choose smaller counts, and repeat what computes",
        )
    stepper = Stepper(
        env, order or Order(), channels or {}, loads, {} if templates is None else templates
    )
    stepper.returned = stepper.region(graph.body)
    return stepper


def unroll_step(
    graph: Operation,
    name: str,
    env: Mapping[str, int],
    order: Order,
    channels: Mapping[Channel, int],
    loads: Layered | None,
    templates: Templates,
    takes: Mapping[str, str],
    leaves: Sequence[str | None],
) -> StepProgram:
    """Unroll an et.graph that is one step of several. `takes` maps arguments to the names under
    which they take values of earlier steps; `leaves` has for each result the name under which later
    steps take it, or None.

    A stacked argument has the shape of the result that is left under its name, so the graph is
    first unrolled once to determine it. Raises `DiagnosticError` as `unroll` does.
    """
    given = env, order, channels, loads, templates
    named = [(v, takes[v.name]) for v in graph.body.args if v.name in takes]
    ends = unrolled(graph, *given).returned
    shapes = {n: shape_of(r) for n, r in zip(leaves, ends, strict=True) if n is not None}
    stepper = Stepper(*given)
    heads = [h for v, n in named for h in stepper.take(v, n, shapes.get(n, NODE))]
    ends = stepper.region(graph.body)
    tails = [
        t for n, r in zip(leaves, ends, strict=True) if n is not None for t in stepper.leave(n, r)
    ]
    return StepProgram(stepper.finish(name), heads, tails, channels)


def _count(region: Region, env: Mapping[str, int]) -> int:
    """The number of nodes of a region, where a reduction in buckets counts as one."""
    return sum(
        _times(op, env) * _count(op.region, env) if op.region else 1 for op in region.ops[:-1]
    )


def _iterations(region: Region, env: Mapping[str, int]) -> int:
    """The number of iterations of all repeats, plus the values that each yields: they take time
    even without nodes."""
    repeats = [(op, op.region) for op in region.ops if op.region]
    return sum(
        _times(op, env) * (1 + len(r.terminator.operands) + _iterations(r, env))
        for op, r in repeats
    )


def _times(op: Operation, env: Mapping[str, int]) -> int:
    return ask(NumberOf(op.expr("count")), env) if "count" in op.attrs else 1
