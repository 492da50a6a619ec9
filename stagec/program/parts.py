"""The values that two parts of a model exchange, in both directions: which ranks of each pod have
them, and the numbers of their messages.

Both pods identify a message by the number of its value among all that they exchange, and by the
microbatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagec.ir.core import Operation, Value
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir.traits import Accumulates, Repeats
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.program.crossings import (
    LayerShare,
    Numbers,
    PodCache,
    PodMesh,
    chunk_of,
    microbatches,
    pod_mesh,
)
from stagec.program.groups import Ints
from stagec.program.pod_messages import Handover, Layouts, NoHandoverError, handover
from stagec.schedule.attached import placement_of, stages_of


class PartWay(NamedTuple):
    """A value that is sent: its name, and the parts that it comes from and goes to."""

    value: str
    source: str
    to: str

    def __str__(self) -> str:
        return f"%{self.value} from '{self.source}' to '{self.to}'"


@dataclass(frozen=True, slots=True)
class PartCrossing:
    """The transfer of a value: its senders and receivers (`way`). For each pod, `first` has the
    number of each chunk's first message, `ways` the number of messages per rank. Among the layers
    of all values, its own begin with number `stream`. `whole` says whether each message is the
    entire value."""

    way: Handover
    first: Mapping[str, Mapping[int, int]]
    ways: Mapping[str, int]
    stream: int
    whole: bool


@dataclass(frozen=True, slots=True)
class PartCrossings:
    """The values that two pods exchange. For each pod, `peers[pod][j]` has the rank of the other
    pod that message j of each rank goes to, or comes from. A value of `layers` crosses in each."""

    values: Mapping[PartWay, PartCrossing]
    peers: Mapping[str, Sequence[Ints]]
    layers: int


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The operation that sends or receives a value in one pod, with its function and chunk."""

    way: PartWay
    op: Operation
    func: Operation
    chunk: int

    @property
    def value(self) -> Value:
        """The value at this end."""
        return (self.op.operands or self.op.results)[0]

    def layers(self, module: Module) -> int:
        """The number of layers in which the value crosses: 1 outside of repeats. Raises
        `UnboundError`."""
        outer, count = self.op.parent_op, 1
        while outer is not None and outer is not self.func:
            if outer.has(Repeats):
                count *= evaluate(outer.expr("count"), module.env)
            outer = outer.parent_op
        return count

    @property
    def shares(self) -> Iterator[tuple[int, int]]:
        """The stages that have it, each with the chunk."""
        return ((stage, self.chunk) for stage in stages_of(self.func) or (0,))


#: The ends of a pod by value: one each, or for a scalar one per function of stages.
Ends = Mapping[PartWay, Sequence[PartEnd]]


def ends_of(module: Module) -> Iterator[PartEnd]:
    """The ends in the module of a pod."""
    for func in module.functions:
        for op in func.body.walk():
            if isinstance(op.definition, Depart | Arrive):
                way = PartWay(op.text("value"), op.text("source"), op.text("to"))
                yield PartEnd(way, op, func, chunk_of(op))


def pod_of(module: Module) -> str:
    """The part of the model that a module is. Raises `DiagnosticError` for a module without
    ends."""
    for end in ends_of(module):
        return end.way.source if isinstance(end.op.definition, Depart) else end.way.to
    raise module.root.error(
        "the part exchanges no values with other parts", remedy="run the pass 'cut-part' first"
    )


def part_crossings(one: Module, other: Module) -> PartCrossings:
    """The values that two placed modules exchange, with or without pipeline stages.

    A scalar is not cut: it is sent between the same ranks as another value, and each message is all
    of it, so that the messages between two ranks stay in order. All stages receive it, and the
    first one sends it. Raises `DiagnosticError` for ends that do not match, different numbers of
    microbatches, sequences in zigzag order, stages with two copies of layers, which different
    microbatches enter, and placements whose numbers of parts do not divide each other.
    """
    pods = {pod_of(module): module for module in (one, other)}
    ends = matching_ends(pods)
    meshes = {pod: pod_mesh(module) for pod, module in pods.items()}
    (a, b), crossings = pods, dict[PartWay, PartCrossing]()
    numbers = {a: Numbers(meshes[a], meshes[b]), b: Numbers(meshes[b], meshes[a])}
    ways = sorted(ends[a])
    tensors = [way for way in ways if ends[a][way][0].value.tensor.rank]
    layers = 0
    for way in ways:
        like = way if way in tensors else (*tensors, way)[0]
        caches = {
            pod: _cache_of(module, meshes[pod], ends[pod][like][0].value, ends[pod][way])
            for pod, module in pods.items()
        }
        met = _met(way, caches, ends[way.source][way][0].op)
        sent, got = caches[way.source], caches[way.to]
        first = {
            way.source: numbers[way.source].end(sent, got, met.to, 1).first,
            way.to: numbers[way.to].end(got, sent, met.of, 1).first,
        }
        count = {way.source: len(met.to) * len(got.shares), way.to: len(met.of) * len(sent.shares)}
        crossings[way] = PartCrossing(met, first, count, layers, whole=way not in tensors)
        layers += ends[a][way][0].layers(pods[a])
    return PartCrossings(crossings, {pod: each.peers for pod, each in numbers.items()}, layers)


def matching_ends(pods: Mapping[str, Module]) -> Mapping[str, Ends]:
    """The ends of the values that two placed modules exchange, by pod. Raises `DiagnosticError` for
    ends that do not match, different numbers of microbatches and sequences in zigzag order."""
    ends = {pod: _ends_between(module, pods) for pod, module in pods.items()}
    _check_alike(ends, pods)
    return ends


def _ends_between(module: Module, pods: Mapping[str, Module]) -> dict[PartWay, list[PartEnd]]:
    ends: dict[PartWay, list[PartEnd]] = {}
    for end in ends_of(module):
        if end.way.source in pods and end.way.to in pods:
            ends.setdefault(end.way, []).append(end)
    return ends


def _cache_of(module: Module, mesh: PodMesh, like: Value, ends: Sequence[PartEnd]) -> PodCache:
    """How a pod stores a value with these ends, with the placement of `like`. Raises
    `DiagnosticError` for stages with two copies of layers."""
    shares: list[LayerShare] = []
    for end in ends:
        placement = placement_of(module, end.func)
        if placement is not None and placement.copies > 1:
            raise end.op.error(
                f"{end.way} would go to two stages: this schedule runs two copies of the layers "
                "from both ends of the pipeline, but messages of a part have the same peers for "
                "all microbatches",
                remedy="choose a schedule with one copy: dualpipev, or 1f1b",
            )
        for stage, chunk in end.shares:
            depth = 0 if placement is None else placement.stage(stage, chunk)
            shares.append(LayerShare(0, depth, stage, chunk))
    shares.sort(key=lambda share: share.depth)
    splits = tuple(d.axes for d in like.tensor.dims)
    return PodCache(Layouts(mesh.inner, splits), tuple(shares), 1, like)


def _met(way: PartWay, caches: Mapping[str, PodCache], op: Operation) -> Handover:
    try:
        return handover(caches[way.source].layouts, caches[way.to].layouts)
    except NoHandoverError as what:
        raise op.error(
            f"{way} cannot be sent between the parts: {what}, neither of which divides the other",
            remedy="choose degrees of the two parts that are multiples of each other, or tp in "
            "place of dp in one of them, whose ranks then take all of it",
        ) from None


def _check_alike(ends: Mapping[str, Ends], pods: Mapping[str, Module]) -> None:
    """Raises `DiagnosticError` for ends of one pod that the other one does not have, and for what
    `matching_ends` lists."""
    (a, mine), (b, theirs) = ends.items()
    if mine.keys() != theirs.keys():
        lost = min(mine.keys() ^ theirs.keys())
        (end, *_) = mine[lost] if lost in mine else theirs[lost]
        raise end.op.error(
            f"{lost} exists in only one pod, expected both",
            remedy="cut both pods from the same step: the same model, dtypes and --part",
        )
    counts = {pod: microbatches(module) for pod, module in pods.items()}
    if counts[a] != counts[b]:
        raise pods[a].root.error(
            f"the part '{a}' has {counts[a]} microbatches but '{b}' has {counts[b]}, expected the "
            "same number",
            remedy=f"set microbatches={max(counts.values())} for both",
        )
    _check_waits(a, pods)
    _check_waits(b, pods)
    _check_vocabularies(ends, pods)
    for pod, module in pods.items():
        for end in (end for each in ends[pod].values() for end in each):
            _check_order(module, pod, end)


def _check_waits(pod: str, pods: Mapping[str, Module]) -> None:
    """Raises `DiagnosticError` for a part that waits for the gradient of each microbatch, if the
    other pod has stages, which start several microbatches before the first gradient."""
    staged = any(stages_of(func) for module in pods.values() for func in module.functions)
    for op in pods[pod].main.body.ops if staged and len(pods[pod].functions) == 1 else ():
        if not op.has(Accumulates) or microbatches(pods[pod]) == 1:
            continue
        kinds = {(inner.phase, type(inner.definition)) for inner in op.body.ops}
        if {("forward", Depart), ("backward", Arrive)} <= kinds:
            raise op.error(
                f"the part '{pod}' waits for the gradient of each microbatch, but pipeline stages "
                "start several microbatches before the first gradient arrives",
                remedy="leave --pp out, or freeze the part",
            )


def _check_vocabularies(ends: Mapping[str, Ends], pods: Mapping[str, Module]) -> None:
    """Raises `DiagnosticError` for tokens whose vocabularies have different sizes in the two
    pods."""
    (a, mine), (b, theirs) = ends.items()
    for way, ((end, *_), (other, *_)) in ((w, (mine[w], theirs[w])) for w in mine):
        if "vocabulary" not in end.op.attrs:
            continue
        count = evaluate(end.op.expr("vocabulary"), pods[a].env)
        size = evaluate(other.op.expr("vocabulary"), pods[b].env)
        if size != count:
            raise other.op.error(
                f"{way} are tokens of a vocabulary of {size:,} in '{b}', expected the {count:,} "
                f"of '{a}'",
                remedy="choose a draft model with the tokenizer of the model that verifies",
            )


def _check_order(module: Module, pod: str, end: PartEnd) -> None:
    """Raises `DiagnosticError` for a dimension with positions in zigzag order."""
    for dim in end.value.tensor.dims:
        for name, over in module.zigzag.items():
            if name in dim.size.symbols and set(over) & set(dim.axes):
                raise end.op.error(
                    f"{end.way} cannot be sent: '{pod}' has {name} in zigzag order over "
                    f"{', '.join(over)}",
                    remedy="use --cp-order plain for that part",
                )
