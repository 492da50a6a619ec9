"""The values of the function of a stage that represent those of the whole step.

Each chunk has its own values; parameters that repeats slice are cut with the layers. An action
yields a value on demand, if another action uses it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from stagec.api import (
    Attr,
    Builder,
    Expr,
    Operation,
    Region,
    Registry,
    SymbolRef,
    TensorType,
    Type,
    Value,
)
from stagec.ir.core import renumber
from stagec.ir.layers import LayerStack, kind_of, stack_of
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.passes.pipeline_stages.layers import runs_layers
from stagec.passes.pipeline_stages.sections import ActionKind, Sections, too_far
from stagec.sharding.stages import PlacedPiece


def chunk_name(name: str, chunk: int) -> str:
    """The name of the part of a stacked value that belongs to a chunk."""
    return f"{name}_c{chunk}"


@lru_cache(1 << 12)
def _cut(type_: TensorType, dim: int, size: Expr) -> TensorType:
    """A type with another size of a dimension."""
    return type_.with_dim(dim, replace(type_.dims[dim], size=size))


class StageValues:
    """Looks up the values of a stage, and creates missing ones."""

    def __init__(
        self,
        registry: Registry,
        func: Operation,
        accumulate: Operation,
        sections: Sections,
        placed: Sequence[PlacedPiece],
        first_layers: Callable[[PlacedPiece, int], Attr],
        order_name: Callable[[PlacedPiece, SymbolRef], SymbolRef],
    ) -> None:
        self._registry, self._first_layers = registry, first_layers
        self._order_name = order_name
        self.func, self.accumulate, self.sections, self.placed = func, accumulate, sections, placed
        self._env: dict[int, dict[Value, Value]] = {h.home.chunk: {} for h in placed}
        self._args: dict[tuple[Value, int | None], Value] = {}
        self._data: dict[tuple[Value, int | None], Value] = {}
        self._exports: dict[Value, Value] = {}
        self._floating: dict[tuple[Operation, Operation], list[Value]] = {}
        self._kept: dict[tuple[int, int, ActionKind, int], Value] = {}
        self._fed: dict[tuple[int, Operation, int], Value] = {}
        self._arrived: dict[tuple[int, Value], Value] = {}
        self._action: Operation | None = None
        self._holding: PlacedPiece = placed[0]

    # -- the current action ------------------------------------------------------------------------

    def enter(self, action: Operation | None, holding: PlacedPiece) -> None:
        """Make an action of a chunk the current one."""
        self._action, self._holding = action, holding

    def define(self, original: Value, value: Value) -> None:
        """Define the value that represents one of the whole step on the current chunk."""
        self._env[self._holding.home.chunk][original] = value

    def keep_for_next(
        self, holding: PlacedPiece, value: Value, index: int, part: ActionKind
    ) -> None:
        """Keep a value for the next piece of the model, which is on the same stage."""
        depth = holding.depth + (1 if part is ActionKind.FORWARD else -1)
        self._kept[holding.copy, depth, part, index] = value

    def kept(self, holding: PlacedPiece, index: int, part: ActionKind) -> Value:
        """The value that the previous piece has kept for this one."""
        return self.reach(self._kept[holding.copy, holding.depth, part, index])

    def feed(self, repeat: Operation, index: int, value: Value) -> None:
        """Define a carried value with which a repeat of another stage continues on this chunk."""
        self._fed[self._holding.home.chunk, repeat, index] = value

    def add_to(self, original: Value, value: Value) -> None:
        """Define the received part of a sum over layers, to which this chunk adds its own."""
        self._arrived[self._holding.home.chunk, original] = value

    # -- looking up --------------------------------------------------------------------------------

    def get(self, original: Value, region: Region) -> Value:
        """The value that represents one of the whole step, usable in a region. Raises
        `DiagnosticError` if there is none."""
        value = self._env[self._holding.home.chunk].get(original)
        if value is not None:
            return self.reach(value)
        producer = original.producer
        if producer is None and original.region is self.sections.body:
            return self._data_argument(original)
        if producer is None:
            return self.argument(original, self._holding)
        if producer.parent is self.sections.body and not self.sections.slots[producer]:
            return self.reach(self._floating_value(original, producer))
        raise too_far(producer, original)

    def reach(self, value: Value) -> Value:
        """The value, or the result of the action that makes it if that is not the current one."""
        home = value.region.owner
        if home is self._action or not isinstance(home.definition, ActionOp):
            return value
        if value not in self._exports:
            home.body.terminator.add_operand(value)
            self._exports[value] = home.add_result(value.name, value.type, value.loc)
        return self._exports[value]

    def here(self, original: Value, holding: PlacedPiece) -> Value | None:
        """The value for one of the whole step on a chunk, as a result of its action, or None."""
        value = self._env[holding.home.chunk].get(original)
        self.enter(None, holding)
        return None if value is None else self.reach(value)

    def argument(self, original: Value, holding: PlacedPiece) -> Value:
        """The argument of the stage for one of the whole step; per chunk if repeats slice it."""
        is_cut = original in self.sections.layers
        key = original, holding.home.chunk if is_cut else None
        if key not in self._args:
            name, chunk = original.name, holding.home.chunk
            type_ = self.cut_type(original, holding)
            if is_cut and isinstance(type_, TensorType):
                name, type_ = chunk_name(name, chunk), type_.with_part((name, chunk))
            self._args[key] = self.func.body.add_arg(name, type_, original.loc)
        return self._args[key]

    def _data_argument(self, original: Value) -> Value:
        """The argument of the accumulation for one of the whole step: a microbatch of data."""
        chunk = self._holding.home.chunk if original in self.sections.layers else None
        if (original, chunk) not in self._data:
            outer = self.sections.body.owner.operands[original.index]
            self.accumulate.add_operand(self.argument(outer, self._holding))
            name = original.name if chunk is None else chunk_name(original.name, chunk)
            type_ = self.cut_type(original, self._holding)
            self._data[original, chunk] = self.accumulate.body.add_arg(name, type_, original.loc)
        return self._data[original, chunk]

    def _floating_value(self, original: Value, op: Operation) -> Value:
        """A value that is computed wherever it is used, once per action."""
        action = self._action
        if action is None:
            raise too_far(op, original)
        key = op, action
        if key not in self._floating:
            outer = dict(self._env[self._holding.home.chunk])
            self.clone(op, action.body)
            env = self._env[self._holding.home.chunk]
            self._floating[key] = [env[r] for r in op.results]
            self._env[self._holding.home.chunk] = outer
        return self._floating[key][original.index]

    # -- cloning -----------------------------------------------------------------------------------

    def clone(self, op: Operation, region: Region, within: frozenset[int] = frozenset()) -> None:
        """Copy an operation of the whole step to the end of a region.

        `within` are the positions of the piece: a sum over several sections adds up their share
        only.
        """
        operands = [v for v in op.operands if self._is_within(op, v, within)]
        if len(operands) == 1 and len(op.operands) > 1 and len(self.sections.slots[op]) > 1:
            self.define(op.results[0], self.get(operands[0], region))
            return
        chunk = self._holding.home.chunk
        stack = stack_of(op) if op.has(Repeats) else LayerStack((op,))
        inputs = [
            self._fed.get((chunk, op, i)) or self.get(self._carried(stack, op, i, v), region)
            for i, v in enumerate(operands)
        ]
        new = self._copy(op, inputs, {}, region)
        for old, value in zip(op.results, new.results, strict=True):
            self.define(old, self._added(chunk, old, value, region))
        if stack.order is not None:  # kinds without layers in the piece pass values on
            for other in stack.members:
                for old, value in zip(other.results[: stack.carried], new.results, strict=False):
                    self.define(old, value)

    def _carried(self, stack: LayerStack, op: Operation, index: int, value: Value) -> Value:
        """The input of a repeat; if the piece has no layer of the kinds before it, their input."""
        known = value in self._env[self._holding.home.chunk]
        first = stack.order is None or op is stack.members[0] or index >= stack.carried
        return value if known or first else stack.inputs[index]

    def _added(self, chunk: int, original: Value, own: Value, region: Region) -> Value:
        """The own part of a sum, plus the received part if there is one."""
        arrived = self._arrived.get((chunk, original))
        if arrived is None:
            return own
        phase = own.producer.phase if own.producer is not None else "backward"
        b = Builder(self._registry, region, loc=own.loc, phase=phase)
        return b.value("stg.add", [arrived, own], hint=own.name, type=own.tensor)

    def _is_within(self, op: Operation, value: Value, within: frozenset[int]) -> bool:
        slots = self.sections.slots_of(value)
        several = len(self.sections.slots[op]) > 1
        return not (several and slots) or any(s.position in within for s in slots)

    def _copy(
        self, op: Operation, operands: list[Value], inside: Mapping[Value, Value], region: Region
    ) -> Operation:
        """A copy of an operation at the end of a region; `inside` maps values of inner regions."""
        attrs, symbol = dict(op.attrs), kind_of(op)
        index = self._repeat_index(op)
        if index is not None:
            if isinstance(name := attrs.pop("order", None), SymbolRef):
                symbol = symbol if self._holding.piece.order(name) is not None else None
                attrs |= {"order": self._order_name(self._holding, name)} if symbol else {}
            attrs["count"] = self._holding.piece.counts[index]
            if "first" in attrs:
                attrs["first"] = self._first_layers(self._holding, index)
        new = Operation(op.definition, operands, attrs, symbol=symbol, loc=op.loc)
        for inner in op.region.walk() if op.region is not None else ():
            for value in inner.operands:  # computed before the region that uses it
                if value.producer is not None and value.producer.parent is self.sections.body:
                    self.get(value, region)
        region.append(new)
        is_placed = op.parent is self.sections.body and self.sections.slots[op]
        if is_placed and new.phase != op.phase:  # inner operations have the phase of the outer one
            new.attrs["phase"] = op.phase
        if op.region is not None:
            self._copy_region(op.region, new.make_region(), inside)
        for result in op.results:
            new.add_result(result.name, self.cut_type(result, self._holding))
        return new

    def _copy_region(self, old: Region, new: Region, around: Mapping[Value, Value]) -> None:
        inside = dict(around)
        for arg in old.args:
            inside[arg] = new.add_arg(arg.name, arg.type, arg.loc)
        for op in old.ops:
            operands = [inside[v] if v in inside else self.get(v, new) for v in op.operands]
            copy = self._copy(op, operands, inside, new)
            inside.update(zip(op.results, copy.results, strict=True))

    def _repeat_index(self, op: Operation) -> int | None:
        """The index of a repeat in the chain; None for other operations."""
        if op.parent is not self.sections.body or not runs_layers(op):
            return None
        return self.sections.slots[op][0].position // 2

    def cut_type(self, original: Value, holding: PlacedPiece) -> Type | None:
        """The type of a value of the whole step, cut to the layers of the piece."""
        type_, counts = original.type, self.sections.layers.get(original)
        if counts is None or not isinstance(type_, TensorType):
            return type_
        return _cut(type_, counts.dim, holding.piece.counts[counts.repeat])

    # -- at the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Put the arguments in the order of the whole step."""
        order = {value: key for key, value in self._args.items()}

        def place(arg: Value) -> tuple[int, int]:
            original, chunk = order[arg]
            return original.index, -1 if chunk is None else chunk

        self.func.body.args.sort(key=place)
        renumber(self.func.body.args)
