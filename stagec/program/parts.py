"""What crosses between two parts of a model, in both directions: which ranks of each pod hold it,
and the numbers of their messages.

A message is known to both pods by the number of its value among all that cross between them, and by
the microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagec.ir.core import Operation
from stagec.ir.module import Module
from stagec.ir.types import TensorType
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.program.crossings import HeldCache, LayerShare, Numbers, PodMesh, microbatches, pod_mesh
from stagec.program.handover import Handover, Ints, Layouts, NoHandoverError, handover
from stagec.support.diagnostics import error


class PartWay(NamedTuple):
    """What crosses: its name, and the parts that it comes from and goes to."""

    value: str
    source: str
    to: str

    def __str__(self) -> str:
        return f"%{self.value} from '{self.source}' to '{self.to}'"


@dataclass(frozen=True, slots=True)
class PartCrossing:
    """How a value crosses: who meets whom, the number of the first message in each pod, the number
    of the value, and whether each message is all of it."""

    way: Handover
    first: Mapping[str, int]
    stream: int
    whole: bool


@dataclass(frozen=True, slots=True)
class PartCrossings:
    """All that crosses between two pods. `peers` has for each pod the ranks of the other one that
    message j of each of its ranks goes to, or comes from."""

    values: Mapping[PartWay, PartCrossing]
    peers: Mapping[str, Sequence[Ints]]


def ends_of(module: Module) -> Iterator[tuple[PartWay, Operation]]:
    """The ends of what crosses that a pod has."""
    for func in module.functions:
        for op in func.body.walk():
            if isinstance(op.definition, Depart | Arrive):
                yield PartWay(op.text("value"), op.text("source"), op.text("to")), op


def pod_of(module: Module) -> str:
    """The part that a pod has. Raises `DiagnosticError` for a module that is not cut."""
    for way, op in ends_of(module):
        return way.source if isinstance(op.definition, Depart) else way.to
    raise error(
        "nothing crosses to another part, or from it",
        module.root.loc,
        remedy="run 'cut-part' before",
    )


def crossed_type(op: Operation) -> TensorType:
    """The type of what crosses, at one end."""
    return (op.operands or op.results)[0].tensor


def part_crossings(one: Module, other: Module) -> PartCrossings:
    """What crosses between the pods of two placed modules.

    A scalar is not cut: it goes the way of another value, and each message is all of it, so that
    the messages of two ranks are in order. Raises `DiagnosticError` for ends that do not fit
    together, different numbers of microbatches, sequences in zigzag order, and placements whose
    parts do not fall together.
    """
    pods = {pod_of(module): module for module in (one, other)}
    ends = {pod: _ends_between(module, pods) for pod, module in pods.items()}
    _check_alike(ends, pods)
    meshes = {pod: pod_mesh(module) for pod, module in pods.items()}
    (a, b), found = pods, dict[PartWay, PartCrossing]()
    numbers = {a: Numbers(meshes[a], meshes[b]), b: Numbers(meshes[b], meshes[a])}
    ways = sorted(ends[a])
    tensors = [way for way in ways if crossed_type(ends[a][way]).rank]
    for stream, way in enumerate(ways):
        like = way if way in tensors else (*tensors, way)[0]
        held = {pod: _held(meshes[pod], each[like]) for pod, each in ends.items()}
        met = _met(way, held, ends[way.source][way])
        sent, got = held[way.source], held[way.to]
        first = {
            way.source: numbers[way.source].end(sent, got, met.to, 1).first[0],
            way.to: numbers[way.to].end(got, sent, met.of, 1).first[0],
        }
        found[way] = PartCrossing(met, first, stream, whole=way not in tensors)
    return PartCrossings(found, {pod: each.peers for pod, each in numbers.items()})


def _ends_between(module: Module, pods: Mapping[str, Module]) -> dict[PartWay, Operation]:
    return {way: op for way, op in ends_of(module) if way.source in pods and way.to in pods}


def _held(mesh: PodMesh, op: Operation) -> HeldCache:
    type_ = crossed_type(op)
    value = (op.operands or op.results)[0]
    return HeldCache(
        Layouts(mesh.inner, tuple(d.axes for d in type_.dims)), (LayerShare(0),), 1, value
    )


def _met(way: PartWay, held: Mapping[str, HeldCache], op: Operation) -> Handover:
    try:
        return handover(held[way.source].layouts, held[way.to].layouts)
    except NoHandoverError as what:
        raise error(
            f"{way} cannot cross: {what}, neither of which divides the other",
            op.loc,
            remedy="choose degrees of the two parts that are multiples of each other",
        ) from None


def _check_alike(
    ends: Mapping[str, Mapping[PartWay, Operation]], pods: Mapping[str, Module]
) -> None:
    """Raises `DiagnosticError` for ends of one pod that the other one does not have, and
    for microbatches and orders of positions that differ."""
    (a, mine), (b, theirs) = ends.items()
    if mine.keys() != theirs.keys():
        lost = min(mine.keys() ^ theirs.keys())
        op = mine[lost] if lost in mine else theirs[lost]
        raise error(
            f"{lost} has one end, expected two",
            op.loc,
            remedy="cut both pods from the same step: the same model, dtypes and --part",
        )
    counts = {pod: microbatches(module) for pod, module in pods.items()}
    if counts[a] != counts[b]:
        raise error(
            f"the part '{a}' has {counts[a]} microbatches and '{b}' has {counts[b]}, expected as "
            "many",
            pods[a].root.loc,
            remedy=f"give both the same: microbatches={max(counts.values())}",
        )
    for pod, module in pods.items():
        for way, op in ends[pod].items():
            _check_order(module, pod, way, op)


def _check_order(module: Module, pod: str, way: PartWay, op: Operation) -> None:
    """Raises `DiagnosticError` for a dimension whose positions lie in zigzag order."""
    for dim in crossed_type(op).dims:
        for name, over in module.zigzag.items():
            if name in dim.size.symbols and set(over) & set(dim.axes):
                raise error(
                    f"{way} cannot cross: '{pod}' has {name} in zigzag order over "
                    f"{', '.join(over)}",
                    op.loc,
                    remedy="choose --cp-order plain for that part",
                )
