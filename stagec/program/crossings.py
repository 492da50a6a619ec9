"""The transfer of caches from one pod to another: which ranks of each pod store them, with pipeline
stages and microbatches, and the numbers of their messages.

Both pods identify a message by its layer and by the part of the batch. Example: six layers, on two
stages in the prefill pod and on three in the decode pod. The second stage of prefill has the layers
from 3 on and sends to two stages: layer 3 goes to the second one, 4 and 5 go to the third.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import numpy as np

from stagec.ir.core import Operation, Value
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir.rewrite import uses_inside
from stagec.ir.serving_step import PAST
from stagec.ir.traits import Accumulates, Terminates
from stagec.ir.types import CACHED
from stagec.program.groups import Ints
from stagec.program.pod_messages import Handover, Layouts, NoHandoverError, handover, ratio
from stagec.schedule.attached import placement_of, stages_of
from stagec.sharding.stages import stage_functions

#: The name of the token that prefill samples, which is transferred like a cache.
TOKEN = "token sampled"


@dataclass(frozen=True, slots=True)
class LayerShare:
    """The layers of a cache that one chunk of a pipeline stage stores, from layer `start` on.
    `depth` is the position of the chunk in the model. A cache that no repeat slices counts as one
    layer; without a pipeline, the stage is 0."""

    start: int
    depth: int = 0
    stage: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class PodCache:
    """How a pod stores a cache: its placement on the ranks of a stage, its shares on stages, and
    the total number of `layers`. `value` is one of the arguments that are parts of it. `halves` is
    the number of parts of the batch that are transferred separately: 2 if the other pod has two
    half batches."""

    layouts: Layouts
    shares: tuple[LayerShare, ...]
    layers: int
    value: Value = field(compare=False)
    halves: int = 1


@dataclass(frozen=True, slots=True)
class PodMesh:
    """The axes of a pod with their sizes. `over` is the axis of its pipeline stages, '' without
    any. `chunks` are the stages of the parts of the model, in model order."""

    axes: tuple[tuple[str, int], ...]
    over: str = ""
    chunks: tuple[int, ...] = (0,)

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """The axes within a stage, with their sizes."""
        return tuple((a, n) for a, n in self.axes if a != self.over)

    def stages(self) -> Ints:
        """The ranks of each stage: a row per stage."""
        grid = np.arange(prod(n for _, n in self.axes), dtype=np.int64)
        if not self.over:
            return grid[None]
        along = [a for a, _ in self.axes].index(self.over)
        rows = np.moveaxis(grid.reshape([n for _, n in self.axes]), along, 0)
        return rows.reshape(rows.shape[0], -1)

    def places(self) -> Ints:
        """For each rank, its index among the ranks of its stage."""
        stages = self.stages()
        places = np.empty(stages.size, dtype=np.int64)
        places[stages] = np.arange(stages.shape[1])
        return places


@dataclass(frozen=True, slots=True)
class PodEnd:
    """The messages of one pod for a cache.

    `first` has for each chunk of the pod the number of its first message, `starts` the first layer
    of each stage and chunk. `shares` are the first layers of the shares of the other pod. `ways` is
    the number of messages per share: one for each rank there, times `turns`, the number of
    microbatches there per microbatch here. `halves` is as in `PodCache`.
    """

    first: Mapping[int, int]
    starts: Mapping[tuple[int, int], int]
    shares: tuple[int, ...]
    ways: int
    turns: int
    halves: int

    @property
    def parts(self) -> int:
        """The number of parts of a batch of this pod that are sent separately."""
        return self.turns * self.halves


@dataclass(frozen=True, slots=True)
class Crossing:
    """The transfer of a cache: its senders and receivers within a stage (`way`), and both ends.
    Among the layers of all caches, its own begin with number `stream`."""

    way: Handover
    source: PodEnd
    target: PodEnd
    stream: int
    layers: int


@dataclass(frozen=True, slots=True)
class Crossings:
    """The transfers of all caches, by name, in order. `to[j]` has for each rank of the source the
    rank that its message j goes to, `of[j]` for each rank of the target the rank that its message j
    comes from."""

    caches: Mapping[str, Crossing]
    to: Sequence[Ints]
    of: Sequence[Ints]

    @property
    def layers(self) -> int:
        """The number of layers of all caches."""
        return sum(c.layers for c in self.caches.values())

    def of_cache(self, name: str) -> Sequence[tuple[str, Crossing]]:
        """The transfers of a cache of either pod, with their names: one, or two for its halves.
        Empty for a token that the other pod does not take."""
        names = (name,) if name in self.caches else _halves(name)
        return [(n, self.caches[n]) for n in names if n in self.caches]


def crossings(source: Module, target: Module) -> Crossings:
    """The transfers of caches between two placed modules, with or without pipeline stages.

    If both have microbatches, a sequence may have another index in the batch of the target: a rank
    sends a part of every microbatch to each of its receivers. All caches of a sequence go to the
    same index. Raises `DiagnosticError` if the modules have different caches, if an axis has no
    size, and for placements whose numbers of parts do not divide each other.
    """
    try:
        return _crossings(source, target)
    except NoHandoverError as what:
        raise source.functions[0].error(
            f"caches cannot be transferred between the pods: {what}, neither of which divides the "
            "other",
            remedy="choose degrees of the two pods that are multiples of each other",
        ) from None


def _crossings(source: Module, target: Module) -> Crossings:
    mine, theirs = caches_by_name(source), caches_by_name(target)
    mine, theirs = _in_halves(mine, theirs), _in_halves(theirs, mine)
    for name in filter(_is_of_token, mine.keys() ^ theirs.keys()):
        mine.pop(name, None)
        theirs.pop(name, None)
    _check_alike(source, mine, theirs)
    more, fewer = ratio(microbatches(source), microbatches(target), "microbatches")
    meshes = pod_mesh(source), pod_mesh(target)
    to, of = Numbers(meshes[0], meshes[1]), Numbers(meshes[1], meshes[0])
    crossings_by_cache: dict[str, Crossing] = {}
    stream = 0
    for name in sorted(mine, key=lambda name: (_is_of_token(name), name)):
        ends = mine[name], theirs[name]
        way = handover(ends[0].layouts, ends[1].layouts)
        sent, got = to.end(*ends, way.to, fewer), of.end(ends[1], ends[0], way.of, more)
        crossings_by_cache[name] = Crossing(way, sent, got, stream, mine[name].layers)
        stream += mine[name].layers
    return Crossings(crossings_by_cache, to.peers, of.peers)


def _halves(name: str) -> tuple[str, str]:
    """The names of the halves of a value, as `overlap-batches` gives them."""
    return f"{name}_a", f"{name}_b"


def _is_of_token(name: str) -> bool:
    return name in (TOKEN, *_halves(TOKEN))


def _in_halves(mine: Mapping[str, PodCache], theirs: Collection[str]) -> dict[str, PodCache]:
    """The caches of a pod by name. A cache of which the other pod has two halves is listed once per
    half."""
    caches: dict[str, PodCache] = {}
    for name, cache in mine.items():
        halved = name not in theirs and all(half in theirs for half in _halves(name))
        names = _halves(name) if halved else (name,)
        caches |= dict.fromkeys(names, replace(cache, halves=len(names)))
    return caches


class Numbers:
    """Numbers the messages of a pod: those of each of its chunks with each chunk of the other pod,
    in model order. Caches with the same placement share the numbers, so that the messages between
    two ranks stay in order."""

    def __init__(self, here: PodMesh, there: PodMesh) -> None:
        self._places, self._stages, self._chunks = here.places(), there.stages(), there.chunks
        self._first: dict[tuple[object, ...], int] = {}
        self.peers: list[Ints] = []

    def end(self, here: PodCache, there: PodCache, ways: Sequence[Ints], turns: int) -> PodEnd:
        """This pod's end of the transfer of a cache; `ways` are the receivers or senders within a
        stage."""
        shares, each = there.shares, len(ways) * turns
        stages, skipped = tuple(s.stage for s in shares), 0
        if shares[-1].depth - shares[0].depth == len(shares) - 1:  # consecutive parts
            stages, skipped = self._chunks, shares[0].depth
        first: dict[int, int] = {}
        for chunk in sorted({share.chunk for share in here.shares}):
            key = here.layouts, there.layouts, chunk, stages
            if key not in self._first:
                self._first[key] = len(self.peers)
                for stage, way in product(stages, ways):
                    self.peers += [self._stages[stage][way[self._places]]] * turns
            first[chunk] = self._first[key] + skipped * each
        starts = {(s.stage, s.chunk): s.start for s in here.shares}
        return PodEnd(first, starts, tuple(s.start for s in shares), each, turns, here.halves)


def _check_alike(
    source: Module, mine: Mapping[str, PodCache], theirs: Mapping[str, PodCache]
) -> None:
    """Raises `DiagnosticError` if a cache exists in one pod only, or differs in its rank or
    layers."""
    if mine.keys() != theirs.keys():
        lost = min(mine.keys() ^ theirs.keys())
        raise source.functions[0].error(
            f"the cache %{lost} exists in only one of the two pods",
            remedy="serve the same model in both pods, with the same element types",
        )
    for name, cache in mine.items():
        here, there = cache.value, theirs[name].value
        if here.tensor.rank != there.tensor.rank or cache.layers != theirs[name].layers:
            raise here.error(
                f"%{name} is {here.type} in one pod and {there.type} in the other",
                remedy="serve the same model in both pods",
            )


# -- the caches of a pod ---------------------------------------------------------------------------


def caches_of(module: Module) -> Iterator[tuple[Operation, Value, str, int]]:
    """The arguments that are caches: for each its function, the argument, the name of the whole
    cache, and the chunk that stores this part of it."""
    for func in _computed(module):
        for arg in func.body.args:
            if arg.tensor.role in CACHED:
                name, chunk = arg.tensor.part or (arg.name, 0)
                yield func, arg, name, chunk


def token_of(module: Module) -> Iterator[tuple[Operation, Value, str, int]]:
    """The tokens that a prefill step samples, one per sequence, or the argument by which a decode
    step takes them, in the form of `caches_of`: the function, the value, its name in the transfer,
    and its chunk. Each of two half batches has its own. Empty for a step without tokens, or with
    several such arguments."""
    funcs = _computed(module)
    made = [(f, _inside(v)) for f in funcs for v in f.body.terminator.operands if _is_token(v)]
    taken = [(f, a) for f in funcs for a in f.body.args if _is_token(a) and a.uses]
    # a step that prefills a chunk of a prompt has past tokens too; its module names the step
    step = module.serving or ("decode" if PAST in module.symbols else "prefill")
    if step == "prefill":
        names = _token_names({value.name for _, value in made})
        for func, value in made:
            if value.producer is not None:
                yield func, value, names.get(value.name, TOKEN), chunk_of(value.producer)
    elif names := _token_names({arg.name for _, arg in taken}):
        yield from ((f, arg, names[arg.name], chunk_of(used(arg)[0])) for f, arg in taken)


def _token_names(values: Collection[str]) -> dict[str, str]:
    """The names in the transfer of values with these names: one value is the token, two are its
    halves. Empty in other cases."""
    if len(values) == 1:
        return dict.fromkeys(values, TOKEN)
    halves = sorted(values)
    whole = halves[0].removesuffix("_a") if halves else ""
    return dict(zip(halves, _halves(TOKEN), strict=True)) if halves == [*_halves(whole)] else {}


def _computed(module: Module) -> Sequence[Operation]:
    """The functions of the pipeline stages, or the main function of a step without stages."""
    return stage_functions(module) or [module.main]


def _is_token(value: Value) -> bool:
    tensor = value.tensor
    return not tensor.role and tensor.rank == 2 and tensor.dtype[0] in "iu"


def _inside(value: Value) -> Value:
    """The value inside nested regions that a region yields as this one."""
    while value.producer is not None and value.producer.region is not None:
        value = value.producer.region.terminator.operands[value.index]
    return value


def chunk_of(op: Operation) -> int:
    """The chunk of a stage that an operation belongs to: that of the action around it."""
    while op.parent is not None:
        op = op.parent.owner
        if "chunk" in op.attrs:
            return op.integer("chunk")
    return 0


def caches_by_name(module: Module) -> dict[str, PodCache]:
    """The caches of a placed module by name. Raises `DiagnosticError` for axes without a size."""
    layouts = pod_mesh(module).inner
    ends = [(f, v, name, chunk, _layers(module, v)) for f, v, name, chunk in caches_of(module)]
    ends += [(func, value, name, chunk, 1) for func, value, name, chunk in token_of(module)]
    parts: dict[str, dict[int, tuple[LayerShare, int, Value]]] = {}
    for func, value, name, chunk, count in ends:
        for stage in stages_of(func) or (0,):
            place = _depth(module, func, stage, chunk)
            parts.setdefault(name, {})[place] = LayerShare(0, place, stage, chunk), count, value
    caches: dict[str, PodCache] = {}
    for name, by_depth in parts.items():
        shares: list[LayerShare] = []
        start = 0
        for _, (share, count, _) in sorted(by_depth.items(), key=lambda item: item[0]):
            shares.append(replace(share, start=start))
            start += count
        value = next(v for _, _, v in by_depth.values())
        splits = tuple(d.axes for d in value.tensor.dims)
        caches[name] = PodCache(Layouts(layouts, splits), tuple(shares), start, value)
    return caches


def used(cache: Value) -> tuple[Operation, int, int]:
    """The first operation of a step that uses a cache, the index of the operand, and how many
    repeats slice it. Raises `DiagnosticError` if nothing uses it."""
    for op, index, depth in uses_inside(cache):
        if not op.has(Terminates):
            return op, index, depth
    raise cache.error(
        f"the step does not use the cache %{cache.name}",
        remedy="transfer the caches that 'to-serving' adds",
    )


def _layers(module: Module, cache: Value) -> int:
    """The number of layers of an argument: the iterations of the repeats that slice it."""
    _, _, depth = used(cache)
    return prod(evaluate(d.size, module.env) for d in cache.tensor.dims[:depth])


def _depth(module: Module, func: Operation, stage: int, chunk: int) -> int:
    """The position of a chunk in the model."""
    placement = placement_of(module, func)
    return 0 if placement is None else placement.stage(stage, chunk)


def pod_mesh(module: Module) -> PodMesh:
    """The mesh of a pod. Raises `DiagnosticError` for an axis without a size."""
    sizes: Mapping[str, int | None] = module.mesh.sizes if module.mesh else {}
    known = [(axis, n) for axis, n in sizes.items() if n is not None]
    if open_ := sorted(sizes.keys() - dict(known).keys()):
        raise module.root.error(
            f"the size of axis {open_[0]} is open, but the senders and receivers of messages "
            "depend on it",
            remedy=module.how_to_set(open_),
        )
    func = module.functions[0]
    placement = placement_of(module, func)
    chunks = (0,) if placement is None else tuple(home.rank for home in placement.homes)
    return PodMesh(tuple(known), func.text("over"), chunks)


def microbatches(module: Module) -> int:
    """The number of microbatches of a step. Raises `DiagnosticError` if it is not known."""
    for op in module.functions[0].body.ops:
        if op.has(Accumulates):
            return evaluate(op.expr("count"), module.env)
    return 1
