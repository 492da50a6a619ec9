"""split-stages: cuts a training step into the functions of pipeline stages.

Equal stages share one function. In it the accumulation over microbatches becomes a list of actions,
with sends and receives where the model is cut. Operations after the accumulation are kept for the
parameters of the stage.
"""

from collections.abc import Iterator, Mapping, Sequence

from stagec.api import (
    Attr,
    Builder,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Quoted,
    Region,
    SymbolRef,
    TensorType,
    Value,
    const,
    made_by,
    total,
)
from stagec.ir.builder import RawAttr
from stagec.ir.layers import declaration_of
from stagec.ir.rewrite import carried
from stagec.ir.types import WEIGHTS
from stagec.passes.pipeline_stages.layers import runs_layers
from stagec.passes.pipeline_stages.relayed_values import RelayedValues, critical_ops, relayed_values
from stagec.passes.pipeline_stages.sections import ActionKind, Sections, Slot, dissect
from stagec.passes.pipeline_stages.stage_messages import StageMessages
from stagec.passes.pipeline_stages.stage_step import StageStep
from stagec.passes.pipeline_stages.stage_values import StageValues
from stagec.sharding.stages import (
    ModelPiece,
    PlacedPiece,
    StagePlan,
    accumulation,
    cut,
    pipeline_rule,
    placed_pieces,
    take_pipeline,
)

PASS = "split-stages"


class SplitStages(Pass):
    """Cut the step into functions of pipeline stages, as its accumulation states (`pipeline`).

    Equal stages share a function. Its accumulation becomes a list of `stg.action`s, with `stg.send`
    and `stg.recv` where the model is cut; a schedule with split backward gets actions for the
    gradients of weights. Reductions between stages (the gradient norm, tied embeddings) are
    inserted. Unused parameters are on the first stage. Without `pipeline` nothing happens.

    Before:
        stg.symbols[B, D, L]
        stg.mesh @pod[pp = 2]
        stg.func @f(%x: bf16[B, D | rep], %W: bf16[L, D, D | rep param]) {
          %y = stg.accumulate[count = 4, split = B, pipeline = pp] (
              %x_mb: bf16[B/4, D | rep] = %x) {
            %y = stg.repeat[count = L, carry = 1] (
                %h: bf16[B/4, D | rep] = %x_mb, %w: bf16[D, D | rep] = %W) {
              %a = stg.einsum["bd,de->be"](%h, %w) : bf16[B/4, D | rep]
              stg.yield(%a)
            } : bf16[B/4, D | rep]
            stg.yield(%y)
          } : bf16[B, D | rep]
          stg.return(%y)
        }
    After:
        stg.symbols[B, D, L]
        stg.mesh @pod[pp = 2]
        stg.func @f_stage0[over = pp, stages = 0, parameters = D^2*L] (
            %x: bf16[B, D | rep], %W_c0: bf16[L/2, D, D | rep param part(W=0)]) ->
            bf16[B, D | rep] {
          %y = stg.accumulate[count = 4, split = B, schedule = "1f1b"] (
              %x_mb: bf16[B/4, D | rep] = %x) {
            %y = stg.action[forward, chunk = 0] {
              %y = stg.repeat[count = L/2, carry = 1] (
                  %h: bf16[B/4, D | rep] = %x_mb, %w: bf16[D, D | rep] = %W_c0) {
                %a = stg.einsum["bd,de->be"](%h, %w) : bf16[B/4, D | rep]
                stg.yield(%a)
              } : bf16[B/4, D | rep]
              stg.send[over = pp, by = 1](%y)
              stg.yield(%y)
            } : bf16[B/4, D | rep]
            stg.yield(%y)
          } : bf16[B, D | rep]
          stg.return(%y)
        }
        stg.func @f_stage1[over = pp, stages = 1, parameters = D^2*L] (
            %W_c0: bf16[L/2, D, D | rep param part(W=0)]) -> bf16[B, D | rep] {
          %y = stg.accumulate[count = 4, split = B, schedule = "1f1b"] {
            %y = stg.action[forward, chunk = 0] {
              %y = stg.recv[over = pp, by = 1] : bf16[B/4, D | rep]
              %y_2 = stg.repeat[count = L/2, carry = 1] (
                  %h: bf16[B/4, D | rep] = %y, %w: bf16[D, D | rep] = %W_c0) {
                %a = stg.einsum["bd,de->be"](%h, %w) : bf16[B/4, D | rep]
                stg.yield(%a)
              } : bf16[B/4, D | rep]
              stg.yield(%y_2)
            } : bf16[B/4, D | rep]
            stg.yield(%y)
          } : bf16[B, D | rep]
          stg.return(%y)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return pipeline_rule(accumulation(module.main)) is not None

    def run(self, module: Module) -> None:
        split_stages(module)


#: The parts of the work in which stages send.
_SENT = (ActionKind.FORWARD, ActionKind.BACKWARD)


def split_stages(module: Module) -> None:
    """Replace the main function by one function for each kind of pipeline stage, in place, if its
    accumulation asks for that.

    Raises `DiagnosticError` where the model cannot be cut.
    """
    func, accumulate = module.main, accumulation(module.main)
    pipeline = take_pipeline(module, accumulate) if accumulate is not None else None
    if accumulate is None or pipeline is None:
        return
    sections = dissect(accumulate.body)
    if pipeline.schedule.splits_weight_gradient:
        _mark_weights(sections, critical_ops(sections))
    forward = [op for op in sections.repeats[ActionKind.FORWARD] if op is not None]
    pieces = cut(module, pipeline, forward)
    counts = module.parameter_counts()
    relayed = relayed_values(sections, pieces)
    unused = [a for a in func.body.args if not a.uses and a.tensor.role in WEIGHTS]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for stage in range(pipeline.stages):
        kinds.setdefault(_kind(pipeline, pieces, relayed, stage), []).append(stage)
    messages = StageMessages(module, pipeline.rule)
    place = func.position()
    for stages in kinds.values():
        maker = _StageMaker(module, pipeline, sections, pieces, relayed, stages, messages)
        made = maker.make(func, accumulate, counts, unused if stages[0] == 0 else ())
        for op in (*maker.orders(), made):
            place += 1
            module.root.body.insert(place, op)
    whole = {declared for r in forward if (declared := _declared(r)) is not None}
    for op in (func, *whole):
        op.erase()


def _declared(repeat: Operation) -> Operation | None:
    """The declaration of the order of the whole stack, which is divided among stages."""
    name = repeat.attrs.get("order")
    return declaration_of(repeat, name) if isinstance(name, SymbolRef) else None


def _mark_weights(sections: Sections, critical: set[Operation]) -> None:
    """Also move straight operations for which no other stage waits to the weights part."""
    for op, slots in sections.slots.items():
        if not runs_layers(op) and op not in critical:
            sections.slots[op] = tuple(
                Slot(s.position, ActionKind.WEIGHTS) if s.part is ActionKind.BACKWARD else s
                for s in slots
            )


def _kind(
    pipeline: StagePlan, pieces: Sequence[ModelPiece], relayed: RelayedValues, stage: int
) -> tuple[object, ...]:
    """A key of all on which the function of a stage depends; equal stages share a function."""
    return tuple(
        (
            placed.home.chunk,
            placed.copy,
            placed.piece.counts,
            placed.piece.sections,
            placed.piece.orders,
            placed.comes_from,
            placed.goes_to,
            placed.cut_in,
            placed.cut_out,
            *(relayed.entering(part, placed.depth) for part in _SENT),
            *(relayed.leaving(part, placed.depth) for part in _SENT),
        )
        for placed in placed_pieces(pipeline, pieces, stage)
    )


class _StageMaker:
    """Builds the function of equal stages."""

    def __init__(
        self,
        module: Module,
        pipeline: StagePlan,
        sections: Sections,
        pieces: Sequence[ModelPiece],
        relayed: RelayedValues,
        stages: Sequence[int],
        messages: StageMessages,
    ) -> None:
        self._module, self._pipeline, self._sections = module, pipeline, sections
        self._stages, self._pieces = stages, pieces
        self._placed = placed_pieces(pipeline, pieces, stages[0])
        self._registry, self._loc = module.registry, made_by(PASS, sections.body.owner.loc)
        self._messages, self._relayed = messages, relayed
        repeats = (r for row in sections.repeats.values() for r in row if r is not None)
        self._first_relayed = max(map(carried, repeats))

    def make(
        self,
        old: Operation,
        accumulate: Operation,
        counts: Mapping[str, Expr],
        unused: Sequence[Value],
    ) -> Operation:
        """Build the function, without adding it to the module. `counts` are the parameter counts of
        the model, `unused` parameters that become arguments as well."""
        stages = tuple(const(s) for s in self._stages)
        attrs: dict[str, Attr] = {"over": self._pipeline.rule.over, "stages": stages, **counts}
        attrs |= {flag: True for flag in ("freed", "spent") if old.flag(flag)}
        symbol = f"{old.symbol}_stage{self._stages[0]}"
        func = Operation(old.definition, (), attrs, symbol=symbol, loc=old.loc)
        body = func.make_region()
        new = Operation(accumulate.definition, (), accumulate.attrs, loc=accumulate.loc)
        new.attrs |= _schedule_attrs(self._pipeline)
        region = new.make_region()
        sections, first = self._sections, self._first_layers
        values = StageValues(
            self._registry, func, new, sections, self._placed, first, self._order_name
        )
        body.append(new)
        self._actions(values, region)
        step = StageStep(
            self._module, self._pipeline, values, accumulate, new, self._pieces, self._stages
        )
        step.run()
        for value in unused:
            values.argument(value, self._placed[0])
        values.finish()
        return func

    def _first_layers(self, placed: PlacedPiece, repeat: int) -> tuple[Expr, ...]:
        """The number of the first layer of a repeat in this piece, for each of the stages."""
        place = self._placed.index(placed)
        pieces_by_stage = (placed_pieces(self._pipeline, self._pieces, s) for s in self._stages)
        return tuple(
            total(piece.counts[repeat] for piece in self._pieces[: mine[place].depth])
            for mine in pieces_by_stage
        )

    def orders(self) -> Iterator[Operation]:
        """The declarations of the orders of layers of several kinds on the stages."""
        definition = self._registry["stg.order"]
        for placed in self._placed:
            for name, order in placed.piece.orders:
                symbol = self._order_name(placed, name).name
                yield Operation(definition, (), {"layers": order}, symbol=symbol, loc=self._loc)

    def _order_name(self, placed: PlacedPiece, name: SymbolRef) -> SymbolRef:
        """The name of the order of a stack on a chunk of these stages."""
        chunk = f"_c{placed.home.chunk}" if len(self._placed) > 1 else ""
        return SymbolRef(f"{name.name}_stage{self._stages[0]}{chunk}")

    # -- actions -----------------------------------------------------------------------------------

    def _actions(self, values: StageValues, region: Region) -> None:
        parts = [ActionKind.FORWARD, ActionKind.BACKWARD]
        if self._pipeline.schedule.splits_weight_gradient:
            parts.append(ActionKind.WEIGHTS)
        for part in parts:
            ordered = self._placed if part is ActionKind.FORWARD else self._placed[::-1]
            for placed in ordered:
                self._action(values, region, part, placed)

    def _action(
        self, values: StageValues, region: Region, part: ActionKind, placed: PlacedPiece
    ) -> None:
        attrs: dict[str, Attr] = {"kind": part.label, "chunk": const(placed.home.chunk)}
        attrs |= {"phase": "backward"} if part is not ActionKind.FORWARD else {}
        action = Operation(self._registry["stg.action"], (), attrs, loc=self._loc)
        inner = action.make_region()
        region.append(action)
        values.enter(action, placed)
        got = self._receive(values, inner, part, placed)
        self._receive_relayed(values, inner, part, placed)
        for op in self._ordered(part, placed):
            values.clone(op, inner, frozenset(placed.piece.positions))
        self._send(values, inner, part, placed, got)
        inner.append(Operation(self._registry["stg.yield"], (), loc=action.loc))
        if len(inner.ops) == 1:
            region.ops.remove(action)
            action.parent = None

    def _ordered(self, part: ActionKind, placed: PlacedPiece) -> Iterator[Operation]:
        """The operations of a piece in execution order. A sum over several sections runs in the
        last of them."""
        slots = {Slot(position, part) for position in placed.piece.positions}
        when: dict[Slot, list[Operation]] = {}
        for op in self._sections.body.ops[:-1]:
            mine = slots & set(self._sections.slots[op])
            if mine:
                when.setdefault(max(mine, key=lambda s: s.time), []).append(op)
        for slot in sorted(when, key=lambda s: s.time):
            yield from when[slot]

    # -- messages ----------------------------------------------------------------------------------

    def _entry(self, part: ActionKind, placed: PlacedPiece) -> tuple[Operation | None, bool]:
        """The repeat at the cut between a piece and the previous one, and whether the piece
        continues this repeat (else it begins after it)."""
        first = placed.cut_in if part is ActionKind.FORWARD else placed.cut_out
        if first % 2:
            return self._sections.repeat(part, first), True
        at = first - 1 if part is ActionKind.FORWARD else first + 1
        inside = 0 < at < self._sections.last
        return (self._sections.repeat(part, at) if inside else None), False

    def _exit(self, part: ActionKind, placed: PlacedPiece) -> list[Value]:
        """The values of the whole step that leave a piece."""
        last = placed.piece.positions[-1 if part is ActionKind.FORWARD else 0]
        if last % 2:
            repeat = self._sections.repeat(part, last)
            return list(repeat.results[: carried(repeat)]) if repeat is not None else []
        at = last + 1 if part is ActionKind.FORWARD else last - 1
        if not 0 < at < self._sections.last:
            return []
        repeat = self._sections.repeat(part, at)
        return list(repeat.operands[: carried(repeat)]) if repeat is not None else []

    def _receive(
        self, values: StageValues, inner: Region, part: ActionKind, placed: PlacedPiece
    ) -> list[Value]:
        """The carried values that enter a piece, as inputs or as results of the repeat at the
        cut."""
        by = placed.comes_from if part is ActionKind.FORWARD else _reverse(placed.goes_to)
        (repeat, goes_on), entered = self._entry(part, placed), list[Value]()
        if by is None or part is ActionKind.WEIGHTS or repeat is None:
            return entered
        for index, value in enumerate(repeat.results[: carried(repeat)]):
            type_ = repeat.body.args[index].tensor
            got = self._got(values, inner, part, placed, by, index, value, type_)
            entered.append(got)
            if goes_on:
                values.feed(repeat, index, got)
            else:
                values.define(value, got)
        return entered

    def _receive_relayed(
        self, values: StageValues, inner: Region, part: ActionKind, placed: PlacedPiece
    ) -> None:
        """Receive relayed values. To a sum over layers the piece adds its own part."""
        by = placed.comes_from if part is ActionKind.FORWARD else _reverse(placed.goes_to)
        for value in self._relayed.entering(part, placed.depth) if by is not None else ():
            index = self._first_relayed + self._relayed.numbers[part, value]
            got = self._got(values, inner, part, placed, by or 0, index, value, value.tensor)
            ((position, made),) = self._sections.slots_of(value)
            if position % 2 and made is part and position in placed.piece.positions:
                values.add_to(value, got)
            else:
                values.define(value, got)

    def _got(
        self,
        values: StageValues,
        inner: Region,
        part: ActionKind,
        placed: PlacedPiece,
        by: int,
        index: int,
        value: Value,
        type_: TensorType,
    ) -> Value:
        """The value that the previous piece sends or, on the same stage, keeps."""
        if by == 0:
            return values.kept(placed, index, part)
        b = Builder(self._registry, inner, loc=made_by(PASS, value.loc), phase=_phase(part))
        return self._messages.receive(b, type_, self._message(by, index, part), value.name)

    def _send(
        self,
        values: StageValues,
        inner: Region,
        part: ActionKind,
        placed: PlacedPiece,
        entered: list[Value],
    ) -> None:
        """Send the values that leave a piece. A piece without layers sends the values that entered
        it."""
        by = placed.goes_to if part is ActionKind.FORWARD else _reverse(placed.comes_from)
        if by is None or part is ActionKind.WEIGHTS:
            return
        if placed.piece.positions:
            leaving = [values.get(value, inner) for value in self._exit(part, placed)]
        else:
            leaving = entered
        numbered = list(enumerate(leaving))
        for value in self._relayed.leaving(part, placed.depth):
            index = self._first_relayed + self._relayed.numbers[part, value]
            numbered.append((index, values.get(value, inner)))
        for index, there in numbered:
            if by == 0:
                values.keep_for_next(placed, there, index, part)
                continue
            b = Builder(self._registry, inner, loc=made_by(PASS, there.loc), phase=_phase(part))
            self._messages.send(b, there, self._message(by, index, part))

    def _message(self, by: int, index: int, part: ActionKind) -> dict[str, RawAttr]:
        attrs: dict[str, RawAttr] = {"over": self._pipeline.rule.over, "by": by}
        channel = 2 * index + (part is not ActionKind.FORWARD)
        return attrs | ({"channel": channel} if channel else {})


def _reverse(by: int | None) -> int | None:
    return None if by is None else -by


def _phase(part: ActionKind) -> str:
    return "forward" if part is ActionKind.FORWARD else "backward"


def _schedule_attrs(pipeline: StagePlan) -> dict[str, Attr]:
    attrs: dict[str, Attr] = {"schedule": Quoted(pipeline.schedule.name)}
    return attrs | ({"chunks": const(pipeline.chunks)} if pipeline.chunks > 1 else {})
