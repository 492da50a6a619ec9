"""The pipeline stages of a module: their functions, the accumulation that they cut, and the layers
and sections of each."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import ceil

from stagec.ir.core import Attr, Operation, Quoted, SymbolRef
from stagec.ir.expr import ZERO, Expr, UnboundError, const, evaluate
from stagec.ir.layers import stack_of
from stagec.ir.module import Module
from stagec.ir.order import LayerOrder, compact
from stagec.ir.traits import Accumulates
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.schedule.action import Placement, StageChunk
from stagec.schedule.attached import schedule_of, schedules_of
from stagec.schedule.base import Schedule
from stagec.schedule.validate import prove
from stagec.sharding.shard import may_divide
from stagec.support.diagnostics import error
from stagec.support.source import UNKNOWN, Loc, file_loc


@dataclass(frozen=True)
class StagePlan:
    """A schedule with its sizes."""

    rule: PipelineRule
    schedule: Schedule
    stages: int
    chunks: int

    @cached_property
    def placement(self) -> Placement:
        """The ranks and chunks of the parts of the model."""
        return self.schedule.placement(self.stages, self.chunks)

    @property
    def parts(self) -> int:
        """The number of parts into which one copy of the model is cut."""
        return self.placement.depth


def read_pipeline(module: Module, rule: PipelineRule, microbatches: int) -> StagePlan:
    """The pipeline of a strategy. Raises `DiagnosticError` for sizes that the schedule does not
    support."""
    if rule.layers and min(rule.layers) < 0:
        raise rule.error(f"a part has {min(rule.layers)} layers", remedy="give numbers from 0 on")
    schedule = schedule_of(module.registry, rule.schedule)
    stages = module.env.get(rule.over)
    if stages is None:
        raise rule.error(
            f"the axis '{rule.over}' of the pipeline stages has no size",
            remedy=f"give it one: --mesh {rule.over}=4",
        )
    chunks = rule.chunks or schedule.default_chunks
    if schedule in schedules_of(module.registry):
        prove(schedule, stages, microbatches, chunks)
    else:
        schedule.check(stages, microbatches, chunks)
    return StagePlan(rule, schedule, stages, chunks)


def stage_functions(module: Module) -> list[Operation]:
    """The functions of the pipeline stages; none before the model is cut."""
    return [func for func in module.functions if "stages" in func.attrs]


def accumulation(func: Operation) -> Operation | None:
    """The accumulation over microbatches in a function, or None."""
    return next((op for op in func.body.ops if op.has(Accumulates)), None)


def pipeline_attrs(rule: PipelineRule) -> dict[str, Attr]:
    """The attributes of a `stg.accumulate` for a pipeline."""
    attrs: dict[str, Attr] = {
        "pipeline": rule.over,
        "pipeline_schedule": Quoted(rule.schedule),
        "pipeline_chunks": const(rule.chunks),
        "pipeline_layers": tuple(const(n) for n in rule.layers),
        "pipeline_scatter": rule.scatter,
    }
    return {name: value for name, value in attrs.items() if value not in ((), const(0))}


def pipeline_rule(op: Operation | None) -> PipelineRule | None:
    """The pipeline of a `stg.accumulate`, None if it has none: the inverse of `pipeline_attrs`."""
    if op is None or "pipeline" not in op.attrs:
        return None
    return PipelineRule(
        over=op.text("pipeline"),
        schedule=op.text("pipeline_schedule", "1f1b"),
        chunks=op.integer("pipeline_chunks", 0),
        layers=op.integers("pipeline_layers"),
        scatter=op.names("pipeline_scatter"),
        loc=file_loc(op.loc) or op.loc,
    )


def take_pipeline(module: Module, op: Operation) -> StagePlan | None:
    """The pipeline of a `stg.accumulate` with its sizes, None if it has none; its attributes are
    removed. Raises `DiagnosticError` like `read_pipeline`."""
    rule = pipeline_rule(op)
    if rule is None:
        return None
    for name in [name for name in op.attrs if name.startswith("pipeline")]:
        del op.attrs[name]
    return read_pipeline(module, rule, op.integer("count"))


@dataclass(frozen=True)
class ModelPiece:
    """A part of the model: the iterations of each repeat, the straight sections, and the orders of
    its layers in stacks of several kinds."""

    counts: tuple[Expr, ...]
    sections: frozenset[int]
    orders: tuple[tuple[SymbolRef, LayerOrder], ...] = ()

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Positions along the chain, in forward order."""
        repeats = {2 * k + 1 for k, n in enumerate(self.counts) if n != ZERO}
        return tuple(sorted(self.sections | repeats))

    def order(self, name: Attr | None) -> LayerOrder | None:
        """The order of its layers of a stack; None if it has no layers, or layers of one kind."""
        return next((order for symbol, order in self.orders if symbol == name), None)


def cut(module: Module, pipeline: StagePlan, repeats: Sequence[Operation]) -> list[ModelPiece]:
    """The pieces of one copy of the model, first to last. Raises `DiagnosticError`."""
    if not repeats:
        raise pipeline.rule.error(
            "the model has no repeated layers to cut into pipeline stages",
            remedy="write the layers as an stg.repeat, or leave the pipeline out",
        )
    parts, whole = pipeline.parts, [op.expr("count") for op in repeats]
    alone = len(whole) == 1 and not pipeline.rule.layers
    if alone and may_divide(whole[0], const(parts), module.env):
        pieces = [ModelPiece((whole[0] / parts,), frozenset()) for _ in range(parts)]
    else:
        pieces = _numbered(module, pipeline, repeats)
    sections: list[set[int]] = [set() for _ in pieces]
    for number, op in enumerate(repeats):
        stack = stack_of(op)
        if number and op is stack.members[0]:
            mine = [k for k, other in enumerate(repeats) if other in stack.members]
            owners = (j for j, p in enumerate(pieces) if any(p.counts[k] != ZERO for k in mine))
            sections[next(owners, 0)].add(2 * number)
    sections[0].add(0)
    sections[-1].add(2 * len(whole))
    return [replace(p, sections=frozenset(s)) for p, s in zip(pieces, sections, strict=True)]


def _numbered(
    module: Module, pipeline: StagePlan, repeats: Sequence[Operation]
) -> list[ModelPiece]:
    """The pieces with numbers of iterations. Raises `DiagnosticError` for counts without values."""
    rule, parts, whole = pipeline.rule, pipeline.parts, [op.expr("count") for op in repeats]
    try:
        sizes = [evaluate(count, module.env) for count in whole]
    except UnboundError:
        raise rule.error(
            "layers of different kinds are cut into stages by number, but a count is open",
            remedy=module.how_to_set({s for count in whole for s in count.symbols}),
        ) from None
    shape = f"({pipeline.stages} stages of {pipeline.chunks})"
    layers = shared_out(sum(sizes), parts, rule.layers, rule.loc, shape)
    if len(set(layers)) > 1 and not rule.layers:
        module.diagnostics.remark(
            f"{sum(sizes)} layers in {parts} parts: {_text(layers)}", rule.loc
        )
    runs = list(_runs(repeats, sizes))
    return [_piece(repeats, _taken(runs, wanted)) for wanted in layers]


def _runs(repeats: Sequence[Operation], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The layers of the model in order, as indices of repeats with numbers of iterations."""
    numbers = {op: number for number, op in enumerate(repeats)}
    for op, size in zip(repeats, sizes, strict=True):
        stack = stack_of(op)
        if stack.order is None:
            yield numbers[op], size
        elif op is stack.members[0]:
            for member, turns in groupby(stack.turns(size), key=lambda turn: turn.member):
                yield numbers[stack.members[member]], len(list(turns))


def _taken(runs: list[tuple[int, int]], wanted: int) -> Iterator[tuple[int, int]]:
    """Remove the first `wanted` layers from the runs and yield them."""
    while wanted and runs:
        number, size = runs.pop(0)
        if size > wanted:
            runs.insert(0, (number, size - wanted))
        yield number, min(size, wanted)
        wanted -= min(size, wanted)


def _piece(repeats: Sequence[Operation], taken: Iterable[tuple[int, int]]) -> ModelPiece:
    counts = [0] * len(repeats)
    kinds: dict[SymbolRef, list[str]] = {}
    for number, size in taken:
        counts[number] += size
        op = repeats[number]
        if isinstance(name := op.attrs.get("order"), SymbolRef):
            kinds.setdefault(name, []).extend([op.symbol or ""] * size)
    orders = tuple((name, compact(k)) for name, k in kinds.items() if len(set(k)) > 1)
    return ModelPiece(tuple(map(const, counts)), frozenset(), orders)


def shared_out(
    total: int, parts: int, given: tuple[int, ...] = (), loc: Loc = UNKNOWN, shape: str = ""
) -> tuple[int, ...]:
    """The number of layers of each part of a model: the given ones, or those of `evenly`. Raises
    `DiagnosticError` if they do not match the model."""
    layers = given or evenly(total, parts, loc, shape)
    if len(layers) != parts or sum(layers) != total:
        raise error(
            f"'layers' gives {sum(layers)} layers in {len(layers)} parts, but the model has "
            f"{total} layers and the pipeline {parts} parts",
            loc,
            remedy=f"for example {_text(evenly(total, parts, loc, shape))}",
        )
    return layers


def evenly(total: int, parts: int, loc: Loc = UNKNOWN, shape: str = "") -> tuple[int, ...]:
    """The number of layers of each part of a model; `shape` describes the parts in an error.

    All parts except the last and the first have the same number. These two may have one layer
    fewer, since they have head and embedding. Any further difference is taken off the others, from
    the back. Raises `DiagnosticError` for too many parts."""
    most = ceil(total / parts)
    missing = most * parts - total
    if total + 2 < parts:
        raise error(
            f"{total} layers are too few for {parts} parts {shape}".rstrip(),
            loc,
            remedy=f"choose at most {total + 2} parts: fewer stages or chunks",
        )
    order = [parts - 1, 0, *range(parts - 2, 0, -1)]
    fewer = set(order[:missing])
    return tuple(most - (j in fewer) for j in range(parts))


def _text(layers: tuple[int, ...]) -> str:
    """`7,8*14,7`, the form of the option --stage-layers."""
    runs = [(n, len(list(same))) for n, same in groupby(layers)]
    return ",".join(f"{n}*{times}" if times > 1 else str(n) for n, times in runs)


@dataclass(frozen=True)
class PlacedPiece:
    """A piece of the model on a stage. `comes_from` and `goes_to` are the steps along the axis from
    the stage of the previous piece and to that of the next one: 0 on the same stage, None without
    such a piece. `cut_in` and `cut_out` are the positions of the cuts: the first of this piece or a
    later one, and the last of this piece or an earlier one. A piece without layers only passes
    values on."""

    home: StageChunk
    depth: int
    copy: int
    piece: ModelPiece
    comes_from: int | None
    goes_to: int | None
    cut_in: int
    cut_out: int


def placed_pieces(
    pipeline: StagePlan, pieces: Sequence[ModelPiece], stage: int
) -> list[PlacedPiece]:
    """The pieces of a stage in the order of the model."""
    placement, placed = pipeline.placement, list[PlacedPiece]()
    for number, home in enumerate(placement.homes):
        if home.rank != stage:
            continue
        before, behind = placement.previous(number), placement.following(number)
        copy, depth = divmod(number, placement.depth)
        comes_from = goes_to = None
        if before is not None:
            comes_from = neighbour(placement[before].rank, stage, pipeline.stages)
        if behind is not None:
            goes_to = neighbour(stage, placement[behind].rank, pipeline.stages)
        cut_in = next(p for piece in pieces[depth:] for p in piece.positions)
        cut_out = next(p for piece in pieces[depth::-1] for p in piece.positions[::-1])
        piece = pieces[depth]
        placed.append(PlacedPiece(home, depth, copy, piece, comes_from, goes_to, cut_in, cut_out))
    return sorted(placed, key=lambda h: h.depth)


def neighbour(source: int, target: int, stages: int) -> int:
    """The step between two stages along their axis, in the shorter direction."""
    by = target - source
    return by if abs(by) <= stages // 2 else by - stages if by > 0 else by + stages
