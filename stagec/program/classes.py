"""Rank classes: groups of ranks whose programs differ only in communicators and peers.

Ranks of one class have the same pipeline stage, and the same coordinate along each axis that sizes
depend on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import numpy as np
import numpy.typing as npt

from stagec.ir.core import Attr, Operation
from stagec.ir.expr import Expr
from stagec.ir.loads import Loads
from stagec.ir.module import Module
from stagec.ir.queries import NumberOf, TrackedValues, ask, plain
from stagec.ir.types import index_name
from stagec.program.groups import (
    Channel,
    GroupAxes,
    channel_of,
    coordinate,
    crosses_pods,
    group_axes,
)
from stagec.program.nodes import Program
from stagec.program.sizes import Layered
from stagec.program.stepper import Order, Templates
from stagec.program.unroll import unroll
from stagec.schedule.attached import actions_of, joined_axis, receives_of, stages_of

#: What a graph is unrolled with.
_Given = tuple[Mapping[str, int], Order, Mapping[Channel, int], Layered | None, Templates]


@dataclass(frozen=True)
class RankClass:
    """The ranks that run a graph: those at `coords`.

    `env` contains the values of symbols, `inner` the coordinates that sizes depend on, `channels`
    the numbers of all message streams of the job, `templates` the steps that are already unrolled
    with these sizes.
    """

    module: Module
    graph: Operation
    coords: Mapping[str, int]
    env: Mapping[str, int]
    inner: Mapping[str, int]
    channels: Mapping[Channel, int]
    loads: Loads
    templates: Templates

    @property
    def name(self) -> str:
        """`stage0`, or with further coordinates `stage0-cp1`."""
        axis = self.graph.text("over")
        rest = [f"{a}{i}" for a, i in self.coords.items() if a != axis]
        return "-".join((f"stage{self.stage}", *rest))

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.coords.get(self.graph.text("over"), 0)

    def program(self) -> Program:
        """The program of each of its ranks. Raises `DiagnosticError` if it has no nodes, or too
        many."""
        return unroll(self.graph, self.name, *self.given())

    def given(self) -> _Given:
        """The arguments of `unroll` after the graph and the name."""
        where = self.module, self.graph, self.stage
        joined = joined_axis(self.module, self.graph)
        stages = stages_of(self.graph)
        slot = stages.index(self.stage) if stages else 0
        order = Order(actions_of(*where), receives_of(*where), joined, slot)
        loads = Layered(partial(self.loads.at, self.coords), slot) if self.loads else None
        return self.env, order, self.channels, loads, self.templates

    @cached_property
    def groups(self) -> list[GroupAxes]:
        """The groups of its collectives, without duplicates, in program order."""
        axes = (group_axes(op) for op in self.graph.body.walk() if op.name == "et.coll")
        return list(dict.fromkeys(axes))

    @cached_property
    def ways(self) -> list[tuple[str, str, int]]:
        """The directions of its messages, without duplicates: `send` or `recv`, the axis, and the
        coordinate of the receiver minus that of the sender, modulo the size of the axis. Messages
        between pods are not included."""
        ends = [(op, over) for op in _ends([self.graph]) if (over := op.text("over"))]
        ways = ((op, over, ask(NumberOf(op.expr("by")), self.env)) for op, over in ends)
        places = ((op.name.removeprefix("et."), a, by % self.env[a]) for op, a, by in ways)
        return list(dict.fromkeys(places))

    def members(self, mesh: Mapping[str, int]) -> npt.NDArray[np.int64]:
        """Its ranks, ascending."""
        ranks = np.arange(int(np.prod(list(mesh.values()), dtype=np.int64)), dtype=np.int64)
        inside = np.ones(ranks.size, dtype=bool)
        for axis, index in self.coords.items():
            inside &= coordinate(mesh, axis, ranks) == index
        return ranks[inside]


def rank_classes(module: Module) -> list[RankClass]:
    """The classes of a lowered module, sorted by stage. Raises `DiagnosticError` if a symbol has no
    value."""
    graphs = module.graphs
    if not graphs:
        raise module.root.error(
            f"module @{module.name} has no et.graph", remedy="run 'lower-to-trace' first"
        )
    env = module.env
    known = dict(plain(env))
    channels, loads = _channels(graphs), Loads(module)
    classes: list[RankClass] = []
    shared: dict[tuple[tuple[str, int], ...], Templates] = {}
    for graph in graphs:
        used = _symbols_in(graph)
        indices = _index_axes(module, used)
        missing = sorted(used - {**known, **{index_name(a): 0 for a in indices}}.keys())
        if missing:
            raise module.no_value(missing, graph.loc)
        each_alone = bool(loads) or any(map(crosses_pods, graph.body.walk()))
        for coords in _coordinates(module, graph, indices):
            given: Mapping[str, int] = {**known, **{index_name(a): i for a, i in coords.items()}}
            inner = {index_name(a): i for a, i in coords.items() if a in indices}
            if isinstance(env, TrackedValues):
                given = TrackedValues(given, env.decisions, inner)
            sizes = tuple((a, i) for a, i in coords.items() if each_alone or a in indices)
            templates = shared.setdefault(sizes, {})
            shares = channels, loads, templates
            classes.append(RankClass(module, graph, coords, given, inner, *shares))
    return sorted(classes, key=lambda c: (c.stage, *c.coords.values()))


def class_coordinates(module: Module, graph: Operation) -> Iterator[dict[str, int]]:
    """The coordinates of each class of a graph. Axes without a size are left out."""
    yield from _coordinates(module, graph, index_axes(module, graph))


def _coordinates(
    module: Module, graph: Operation, indices: Sequence[str]
) -> Iterator[dict[str, int]]:
    env, axis, stages = module.env, graph.text("over"), stages_of(graph)
    indices = [a for a in indices if a != axis and a in env]
    names = ([axis] if stages else []) + indices
    values = ([stages] if stages else []) + [range(env[a]) for a in indices]
    for choice in product(*values):
        yield dict(zip(names, choice, strict=True))


def index_axes(module: Module, graph: Operation) -> list[str]:
    """The axes that sizes in the graph depend on by coordinate."""
    return _index_axes(module, _symbols_in(graph))


def _index_axes(module: Module, used: Set[str]) -> list[str]:
    by_load = Loads(module).axes(used)
    axes = module.mesh.axes if module.mesh else ()
    return [a for a in axes if index_name(a) in used or a in by_load]


def _symbols_in(graph: Operation) -> set[str]:
    """The symbols in the attributes of a graph."""
    different = {value for op in graph.body.walk() for value in op.attrs.values()}
    return {name for value in different for name in _symbols(value)}


def _symbols(value: Attr) -> frozenset[str]:
    if isinstance(value, tuple):
        return frozenset(s for v in value for s in _symbols(v))
    return value.symbols if isinstance(value, Expr) else frozenset()


def _channels(graphs: list[Operation]) -> dict[Channel, int]:
    """A number for every stream of messages within a pod, the same on all ranks."""
    channels = {channel_of(op) for op in _ends(graphs) if not crosses_pods(op)}
    return {channel: number for number, channel in enumerate(sorted(channels, key=_place))}


def _ends(graphs: Iterable[Operation]) -> Iterator[Operation]:
    """The sends and receives of messages."""
    for graph in graphs:
        yield from (op for op in graph.body.walk() if op.name in ("et.send", "et.recv"))


def _place(channel: Channel) -> tuple[str, int, str, int]:
    over, by, number = channel
    return over, by.value or 0, str(by), number
