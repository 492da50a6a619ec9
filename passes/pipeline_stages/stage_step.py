"""The operations of a stage after its microbatches: reductions and updates of its parameters.

A stage keeps only the operations of the whole step on values that it has. A sum over parameters of
all stages, such as the gradient norm, is reduced over the stages where the complete sum is needed.
A gradient to which several stages contribute (tied embeddings, two copies of the model) is reduced
between them. With layers `%W` on all stages and an embedding `%e` that the first and the last stage
use, a stage keeps these operations of the step:

    %g_e, %g_W = stg.accumulate ...        %g_W is held; of %g_e two stages have a share each
    %sq_e = stg.squared_norm(%g_e)         a square needs the whole %g_e: all_reduce in the pair
    %sq_W = stg.squared_norm(%g_W)         a sum over layers: each stage has a part of it
    %norm = stg.add(%sq_e, %sq_W)          a part as well; %sq_e counts on the first stage only
    %clip = stg.clip_factor(%norm)         needs the whole %norm: all_reduce over all stages
    %W_new = stg.adamw(%W, %g_W, %clip)    held, as %W is
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from stagec.api import Builder, Module, Operation, Region, TensorType, Value, made_by
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import carried
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.comm import Movement
from stagec.ir_spec.ops.contraction import Add
from stagec.ir_spec.ops.parts import Depart
from stagec.ir_spec.ops.structure import joined
from stagec.passes.pipeline_stages.stage_values import StageValues, chunk_name
from stagec.sharding.stages import ModelPiece, PlacedPiece, StagePlan

PASS = "split-stages"
MIRRORED = "mirrored"


class SpreadState(Enum):
    """How a value of the step is distributed over the stages."""

    WHOLE = auto()  # whole, on the stages that hold what it belongs to
    SHARE = auto()  # the same, but to be summed with that of other stages that hold it
    SUM = auto()  # each stage has its part of a sum
    EVERYWHERE = auto()  # the same on all stages


class Owner(NamedTuple):
    """The owner of a value: the layers of a repeat, or straight sections."""

    repeat: int | None
    sections: frozenset[int] = frozenset()


@dataclass(slots=True)
class Spread:
    """A value of the whole step on this stage: one value per chunk, or one for all (key None)."""

    state: SpreadState
    owner: Owner | None
    here: dict[int | None, Value] = field(default_factory=dict["int | None", Value])


class StageStep:
    """Copies the operations after the accumulation that a stage needs."""

    def __init__(
        self,
        module: Module,
        pipeline: StagePlan,
        values: StageValues,
        old: Operation,
        new: Operation,
        pieces: Sequence[ModelPiece],
        stages: Sequence[int],
    ) -> None:
        self._module, self._pipeline, self._values = module, pipeline, values
        self._old, self._new, self._pieces, self._stages = old, new, pieces, stages
        self._sections, self._layers = values.sections, values.sections.layers
        self._spread: dict[Value, Spread] = {}
        self._floating: dict[tuple[Operation, int | None], list[Value]] = {}
        self._builder = Builder(module.registry, values.func.body)

    def run(self) -> None:
        """Yield the results of actions, and copy the operations after the accumulation."""
        end = Operation(self._module.registry["stg.yield"], (), loc=self._old.loc)
        self._new.body.append(end)
        yields = self._sections.body.terminator.operands
        for value, result in zip(yields, self._old.results, strict=True):
            self._spread[result] = self._yielded(value, result)
        body = self._old.home
        for op in body.ops[:-1]:
            if op is not self._old:
                self._op(op)
        self._return(body.terminator)

    # -- results of the accumulation ---------------------------------------------------------------

    def _yielded(self, value: Value, result: Value) -> Spread:
        slots = self._sections.slots_of(value)
        positions = frozenset(s.position for s in slots)
        odd = next((p for p in positions if p % 2), None)
        if value not in self._layers:
            odd = None  # a sum over the layers: of a parameter that all of them share
        owner = Owner(odd // 2) if odd is not None else Owner(None, positions)
        state = SpreadState.SHARE if self._pairs(owner) is not None else SpreadState.WHOLE
        spread = Spread(state, owner)
        gradients: list[Value] = []
        for holding in self._values.placed:
            inside = self._values.here(value, holding)
            if inside is None:
                continue
            self._new.body.terminator.add_operand(inside)
            key = holding.home.chunk if odd is not None else None
            name = result.name if key is None else chunk_name(result.name, key)
            made = self._new.add_result(name, joined(self._new, inside.tensor), result.loc)
            if key is not None:
                spread.here[key] = made
            else:
                gradients.append(made)
        if gradients:
            spread.here[None] = self._sum(gradients, result.name, "gradient")
        return spread

    def _pairs(self, owner: Owner) -> str | None:
        """The stages that contribute to a gradient: '' for all, MIRRORED for pairs, None for one.
        Raises `DiagnosticError` for other sets."""
        stages, placement = self._pipeline.stages, self._pipeline.placement
        if owner.repeat is not None:
            return MIRRORED if placement.copies > 1 else None
        ranks = set(self._homes(owner))
        if len(ranks) == 1:
            return None
        if len(ranks) == 2 and sum(ranks) == stages - 1:
            return MIRRORED
        if len(ranks) == stages:
            return ""
        raise self._old.error(
            f"a parameter is used on pipeline stages {', '.join(map(str, sorted(ranks)))}, "
            "expected two mirrored stages such as first and last, or all stages",
            remedy="cut the model so that its uses are on the first and the last stage",
        )

    def _homes(self, owner: Owner) -> list[int]:
        """The pipeline ranks that have these sections of the model, first copy first."""
        placement = self._pipeline.placement
        return [
            home.rank
            for number, home in enumerate(placement.homes)
            if owner.sections & set(self._pieces[number % placement.depth].positions)
        ]

    # -- operations --------------------------------------------------------------------------------

    def _op(self, op: Operation) -> None:
        self._builder.loc, self._builder.phase = op.loc, op.phase
        if op.region is not None:
            self._of_layers(op)
        tracked = [self._spread[v] for v in op.operands if v in self._spread]
        if isinstance(op.definition, Add) and _differ(tracked):
            self._add(op)
            return
        for slot, value in enumerate(op.operands):
            if value in self._spread and not _is_linear(op, slot):
                self._complete(value, op)
        tracked = [self._spread[v] for v in op.operands if v in self._spread]
        if not tracked and op.operands:
            return  # computed where it is used
        if isinstance(op.definition, Depart) and not self._is_first():
            return  # another part receives it once
        state, owner = _combined(tracked)
        keys = self._keys(op, tracked, state)
        made: dict[int | None, list[Value]] = {key: self._copy(op, key) for key in keys}
        for number, result in enumerate(op.results):
            here = {key: results[number] for key, results in made.items()}
            spread = Spread(state, owner, here)
            if owner is not None and owner.repeat is not None and result not in self._layers:
                spread = self._contracted(spread, result)
            self._spread[result] = spread

    def _of_layers(self, op: Operation) -> None:
        """Complete the values that a repeat over single layers captures. Raises `DiagnosticError`
        for an operation that carries values from layer to layer."""
        if not op.has(Repeats) or carried(op):
            raise op.error(
                f"'{op.name}' after the microbatches cannot be divided among pipeline stages",
                remedy="leave the pipeline out: --pp 1",
            )
        for value in dict.fromkeys(op.reads()):
            if value in self._spread and value not in op.operands:
                self._complete(value, op)

    def _is_first(self) -> bool:
        return self._pipeline.placement.homes[0].rank in self._stages

    def _keys(
        self, op: Operation, tracked: list[Spread], state: SpreadState
    ) -> Iterable[int | None]:
        """The chunks of this stage for which an operation is copied."""
        if state is SpreadState.EVERYWHERE or not tracked:
            return [None]
        owned = [s for s in tracked if s.state is not SpreadState.EVERYWHERE]
        return [k for k in owned[0].here if all(k in s.here for s in owned)]

    def _copy(self, op: Operation, key: int | None) -> list[Value]:
        operands = [self._operand(v, key) for v in op.operands]
        placed = self._holding(key)
        new = Operation(op.definition, operands, op.attrs, loc=op.loc)
        self._builder.insert(new)
        if op.region is not None:
            new.attrs["count"] = operands[0].tensor.dims[0].size
            self._copy_region(op.region, new.make_region(), key)
        for result in op.results:
            name = result.name if key is None else chunk_name(result.name, key)
            new.add_result(name, self._values.cut_type(result, placed), result.loc)
        return new.results

    def _copy_region(self, old: Region, new: Region, key: int | None) -> None:
        """Copy the body of a repeat over layers; captured values are those of the stage."""
        inside = {arg: new.add_arg(arg.name, arg.type, arg.loc) for arg in old.args}
        for op in old.ops:
            operands = [inside[v] if v in inside else self._operand(v, key) for v in op.operands]
            copy = new.append(Operation(op.definition, operands, op.attrs, loc=op.loc))
            for result in op.results:
                inside[result] = copy.add_result(result.name, result.type, result.loc)

    def _operand(self, value: Value, key: int | None) -> Value:
        spread = self._spread.get(value)
        if spread is not None:
            return spread.here[key] if key in spread.here else spread.here[None]
        if value.producer is not None:
            return self._lazy(value, value.producer, key)
        return self._values.argument(value, self._holding(key))

    def _lazy(self, value: Value, op: Operation, key: int | None) -> Value:
        """Copy an operation that depends on arguments only, once per chunk that uses it."""
        known = self._floating.get((op, key))
        if known is None:
            phase = self._builder.phase
            self._builder.phase = op.phase
            known = self._floating[op, key] = self._copy(op, key)
            self._builder.phase = phase
        return known[value.index]

    def _holding(self, key: int | None) -> PlacedPiece:
        placed = self._values.placed
        return next((h for h in placed if h.home.chunk == key), placed[0])

    # -- sums over stages --------------------------------------------------------------------------

    def _contracted(self, spread: Spread, result: Value) -> Spread:
        """A sum over layers: each stage has the part of its own layers."""
        parts = [v for key, v in spread.here.items() if self._counts(spread.owner, key)]
        made = Spread(SpreadState.SUM, None)
        if parts:
            made.here[None] = self._sum(parts, result.name, self._builder.phase)
        return made

    def _counts(self, owner: Owner | None, key: int | None) -> bool:
        """Whether sums count this copy of the model: they count the first one only."""
        if owner is None or owner.repeat is not None:
            return self._holding(key).copy == 0
        return self._homes(owner)[0] in self._stages

    def _add(self, op: Operation) -> None:
        """Copy a sum over values of different stages: each stage adds up its own."""
        parts: list[Value] = []
        for value in op.operands:
            spread = self._spread[value]
            if spread.state is SpreadState.SHARE:
                self._complete(value, op)
                spread = self._spread[value]
            if spread.state is SpreadState.EVERYWHERE:
                raise op.error(
                    f"%{value.name} is the same on all pipeline stages, but %{op.result.name} adds "
                    "it to values of single stages",
                    remedy="leave the pipeline out: --pp 1",
                )
            lifted = spread.state is SpreadState.SUM
            parts += [v for k, v in spread.here.items() if lifted or self._counts(spread.owner, k)]
        spread = Spread(SpreadState.SUM, None)
        if parts:
            spread.here[None] = self._sum(parts, op.result.name, op.phase)
        self._spread[op.result] = spread

    def _sum(self, values: list[Value], name: str, phase: str) -> Value:
        if len(values) == 1:
            return values[0]
        self._builder.phase = phase
        return self._builder.value("stg.add", values, hint=name, type=values[0].tensor)

    def _complete(self, value: Value, op: Operation) -> None:
        """Reduce a value over the stages, for an operation that needs the complete value."""
        spread = self._spread[value]
        if spread.state is SpreadState.SHARE and spread.owner is not None:
            pairs = self._pairs(spread.owner)
            here = {
                key: self._reduced(v, "gradient", pairs)
                for key, v in self._in_model_order(spread.here)
            }
            self._spread[value] = replace(spread, state=SpreadState.WHOLE, here=here)
        elif spread.state is SpreadState.SUM:
            part = spread.here.get(None)
            if part is None:
                zero, type_ = {"value": 0}, value.tensor
                part = self._builder.value("stg.constant", (), zero, type=type_, hint=value.name)
            whole = self._reduced(part, op.phase, None)
            self._spread[value] = Spread(SpreadState.EVERYWHERE, None, {None: whole})
        self._builder.phase = op.phase

    def _in_model_order(self, here: dict[int | None, Value]) -> list[tuple[int | None, Value]]:
        """Order chunks by their layers, so that mirrored stages reduce in the same order."""
        depth = {h.home.chunk: h.depth for h in self._values.placed}
        return sorted(here.items(), key=lambda item: depth.get(item[0] or 0, 0))

    def _reduced(self, value: Value, phase: str, pairs: str | None) -> Value:
        attrs: dict[str, RawAttr] = {"over": (self._pipeline.rule.over,), "stages": True}
        if pairs:
            attrs["pairs"] = pairs
        self._builder.phase = phase
        self._builder.loc = made_by(PASS, value.loc)
        return self._builder.value("stg.all_reduce", [value], attrs, hint=f"{value.name}_p")

    # -- the end -----------------------------------------------------------------------------------

    def _return(self, end: Operation) -> None:
        outputs: list[Value] = []
        types: list[TensorType] = []
        for value in end.operands:
            spread = self._spread.get(value)
            for chunk, kept in spread.here.items() if spread is not None else ():
                part = None if chunk is None else (value.name, chunk)
                outputs.append(kept)
                types.append(kept.tensor.inner.with_part(part))
        new = Operation(end.definition, outputs, end.attrs, loc=end.loc)
        self._values.func.body.append(new)
        self._values.func.body.returns = tuple(types)


def _differ(tracked: list[Spread]) -> bool:
    """Whether values belong to different stages, or are parts of sums over them."""
    return any(s.state is SpreadState.SUM for s in tracked) or len({s.owner for s in tracked}) > 1


def _combined(tracked: list[Spread]) -> tuple[SpreadState, Owner | None]:
    """The state and owner of a result that is computed from values in these states."""
    for state in (SpreadState.SHARE, SpreadState.WHOLE, SpreadState.SUM):
        for spread in tracked:
            if spread.state is state:
                return state, spread.owner
    return SpreadState.EVERYWHERE, None


def _is_linear(op: Operation, index: int) -> bool:
    """Whether an operation is linear in an operand."""
    if isinstance(op.definition, Movement):
        return op.text("kind", "sum") == "sum"
    rule = op.definition.rule(op)
    scales = len(op.operands) > 1 and not isinstance(op.definition, Add)
    return rule is not None and index in rule.linear and not scales
