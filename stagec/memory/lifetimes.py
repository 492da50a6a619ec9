"""Lifetimes: one step of a rank in program order, with the buffers that each operation makes and
uses.

A buffer lives from the operation that allocates it to the last one that uses it. Views, slices of a
stack and in-place results share the buffer of their operand. In

    %a = stg.gelu(%x)                           step 0 makes a
    %b = stg.reshape["b(fg)->bfg"](%a)          no step: the buffer a
    %c = stg.einsum["bfg,fgd->bd"](%b, %w)      step 1 makes c, uses a for the last time
    stg.return(%c)                              step 2 uses c

a lives in steps 0 and 1, c in 1 and 2. Repeats run abstractly: the first and last iterations run by
themselves, and one iteration stands for all between them. Those differ from it only in the bytes
that they leave on the stacks, so memory grows or falls evenly there and never exceeds that of the
iterations around them. The body of a nested repeat that would run very often runs once for all
iterations, with an upper bound of their bytes. One microbatch stands for all; each of its actions
runs once.
"""

from collections.abc import Sequence

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ONE, Env, Expr, const
from stagec.ir.layers import LayerStack, in_order
from stagec.ir.recompute_window import replays
from stagec.ir.traits import EndsLifetime, PartOfBuffer, Recalls, View
from stagec.ir.types import DEVICE
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.memory.allocations import Allocations
from stagec.memory.buffers import (
    GRADIENTS,
    Buffer,
    Lifetimes,
    Ref,
    Shares,
    Together,
    buffers_of,
    each_buffer,
    is_stack,
    slice_of,
    together,
)
from stagec.memory.gathered import KeptGathers, ReceivedUnits
from stagec.memory.iterations import (
    IterationRun,
    RepeatOrders,
    SharedIteration,
    gathers_behind,
    is_ahead,
    is_backward,
    is_beside_loss,
    most_ahead,
    saved_first,
    stacked,
    turns_of,
)
from stagec.memory.liveness import (
    Roots,
    Sets,
    classify,
    is_gathered,
    is_sum,
    kept_when_sent,
    updated,
)
from stagec.memory.storage import OpStorage
from stagec.memory.sums import MicrobatchSums

#: The most executions of one body: 7 iterations in each of three nested repeats.
MOST_RUNS = 343
#: The layers of a stack of several kinds count as at most this number of iterations.
MOST_ALONE = 7
#: Gathers behind a stack of layers, and the stack behind it, whose first gathers are early, too.
_Issued = tuple[Sequence[Operation], LayerStack | None]


def lifetimes(
    body: Region, env: Env, *, whole: bool = False, known: tuple[Roots, Sets] | None = None
) -> Lifetimes:
    """Run a function once. Sizes without a value in `env` stay symbolic; a repeat with such a count
    is assumed to be long. `known` are the roots and sets of the values of this body, if the caller
    has them. With `whole` every iteration runs by itself. Raises `UnboundError` if the number of
    iterations has no value then, and `DiagnosticError` if there are too many."""
    runner = _Runner(body, env, whole, *(known or _classified(body)))
    runner.run(body)
    return runner.lives


class _Runner(Allocations):
    def __init__(self, body: Region, env: Env, whole: bool, roots: Roots, sets: Sets) -> None:
        super().__init__(body)
        self._whole, self._freed = whole, body.owner.flag("freed")
        self._consumed = body.owner.flag("consumed")  # updates run beside backward
        self._sums = MicrobatchSums(roots, sets)
        self._replays = True
        self._runs = 1  # how often the region at hand runs
        self._kept = KeptGathers()
        self._known: dict[Operation, OpStorage] = {}
        self._bodies: dict[Region, list[Operation | LayerStack]] = {}
        #: Gathered parameters of the first layer of a later stack.
        self._begun: dict[Operation, list[dict[Value, Ref]]] = {}
        self._behind: Sequence[Operation] = ()  # gathers behind a stack, issued in its last layer
        self._next: LayerStack | None = None  # the stack behind it, whose first gathers are, too
        self._received = ReceivedUnits()
        self._copied = False  # whether units are copied out of what calls receive
        self._last_read = 0  # the last step of forward in a module with gathered parameters
        self._staying: Sequence[Value] = ()  # buffers that stay until the next op of their kind
        self._orders = RepeatOrders(body, env, whole, self._budget)

    def run(self, body: Region) -> None:
        self._whole_region(in_order(body))
        end = self._step(body.terminator, (), counts=False)
        for value in body.terminator.operands:
            self._touch(self._refs.get(value), end)
        spent = self._consumed or body.owner.flag("spent")
        for buffer in () if spent else self.lives.buffers:
            is_updated = "optimizer" in buffer.phases  # other values of backward end with the step
            if is_updated and buffer.category == GRADIENTS:  # the next step frees them
                buffer.last[None] = end

    def _whole_region(self, order: Sequence[Operation | LayerStack]) -> None:
        """Run the body of a function or of an accumulation. The buffer from which the last unit was
        copied out lives until forward ends. If forward ends with the loss, the first gather of
        backward is issued when backward begins; else, if units are copied, where backward first
        reads gathered parameters. Gathers behind layers of backward are issued when the last of
        these layers begins, and so are those of other layers if units are copied."""
        begins = next((i for i, step in enumerate(order) if is_backward(step)), len(order))
        beside, self._copied = any(map(is_beside_loss, order)), False
        early_gather = any(map(is_beside_loss, order[begins:]))
        stacks = (s for s in order[begins:] if isinstance(s, LayerStack) and is_backward(s))
        back = next(stacks, None)
        early: Sequence[Operation] = ()
        for place, step in enumerate(order):
            if place == begins:
                self._copied = bool(self._received.last)
                self._receive((), len(self.lives.steps) - 1 if beside else self._last_read)
            values = step.operands if isinstance(step, Operation) and self._copied else ()
            reads = any(map(is_gathered, values))
            if back is not None and ((early_gather and place == begins) or reads):
                self._begin(back)
                back = None
            if isinstance(step, Operation) and isinstance(step.definition, ActionOp):
                self._action(step)
            elif step not in early:
                if isinstance(step, LayerStack) and is_backward(step):
                    early = self._behind = gathers_behind(order[place + 1 :])
                    later = filter(is_backward, order[place + 1 :])
                    stacks = (s for s in later if isinstance(s, LayerStack))
                    self._next = next(stacks, None) if self._copied and not early else None
                self._run(step)
        self._end_staying()

    def _begin(self, stack: LayerStack) -> None:
        """Gather the parameters of the first layer of a stack that comes later."""
        orders = [self._orders.of(op) for op in stack.members]
        m = turns_of(stack, orders)[0][0]
        op, gathers = stack.members[m], [o for o in stack.members[m].body.ops if is_ahead(o)]
        if any(arg.producer is not None for gather in gathers for arg in gather.operands):
            return
        for gather in gathers:
            for arg in gather.operands:
                outer = self._refs[op.operands[arg.index]]
                self._refs[arg] = slice_of(outer, 0, len(orders[m]))
        self._begun[stack.members[0]] = [self._gather(gathers, 0, 0)]

    def _run(self, step: Operation | LayerStack) -> None:
        if isinstance(step, LayerStack):
            self._budget.spend(sum(1 + len(op.operands) for op in step.members))
            self._stack(step)
        else:
            self._op(step)

    def _op(self, op: Operation) -> None:
        self._budget.spend(1 + len(op.operands), op.loc)
        if op.region is None and (known := self._known.get(op)) is not None:
            self._again(known)
        elif op.has(Recalls):
            self._refs[op.result] = self._refs[op.operands[0 if self._replays else 1]]
        elif op.region is not None:
            self._accumulate(op, op.region)
        elif op.has(PartOfBuffer):
            every = Shares(b for v in op.operands for b in buffers_of(self._refs[v]))
            self._refs.update(dict.fromkeys(op.results, every))
        elif op.has(View):
            for r in op.results:
                self._refs[r] = self._refs[op.operands[min(r.index, len(op.operands) - 1)]]
        elif not op.has(EndsLifetime):
            self._computation(op)

    def _computation(self, op: Operation) -> None:
        self._known[op] = known = OpStorage.of(op, self._sums)
        self._again(known)

    def _again(self, known: OpStorage) -> None:
        """Run an operation whose results have been sorted by their storage."""
        refs = self._refs
        for value, home in known.homes:
            refs[value] = self._sums.at_once.get(home) or self._fixed(home)
        for value, operand in known.reused:
            refs[value] = refs[operand]
        ended = known.phase == "optimizer" and not self._consumed
        if self._staying and (known.stays or ended):
            self._end_staying()
        number = self._step(known.op, known.made)
        for value in known.added:
            refs[value] = self._make(value, number, number, space=DEVICE, added=True)
        if known.stays:
            self._staying = known.made
        if known.copied_out:
            self._receive(known.made, number)
        elif known.reads_gathered:
            self._last_read = number
        for value in known.operands:
            self._touch(refs.get(value), number, known.phase, alone=known.alone)

    def _receive(self, made: Sequence[Value], number: int) -> None:
        """A call receives the data that is copied out to these values."""
        spaces = ((value, space) for value in made for space in value.tensor.memories)
        new = [self._make(v, number, number, space=s) for v, s in spaces]
        for buffer in self._received.call(new, number):
            self._touch(buffer, number)

    def _end_staying(self) -> None:
        """End the buffers that stayed: they live until the last step."""
        for value in self._staying:
            self._touch(self._refs.get(value), len(self.lives.steps) - 1)
        self._staying = ()

    # -- repeats -----------------------------------------------------------------------------------

    def _stack(self, stack: LayerStack) -> None:
        orders = [self._orders.of(op) for op in stack.members]
        turns = turns_of(stack, orders)
        outer = self._runs, self._replays
        inner = self._runs > 1 and not self._whole
        most = min(len(turns), MOST_ALONE) if stack.order is not None else len(turns)
        if inner and self._runs * most > MOST_RUNS:
            for op in stack.members:
                self._all_at_once(op, op.body)
        else:
            self._runs *= most
            self._one_by_one(stack, orders, turns)
        self._runs, self._replays = outer

    def _one_by_one(
        self,
        stack: LayerStack,
        orders: Sequence[Sequence[IterationRun]],
        turns: Sequence[tuple[int, int]],
    ) -> None:
        carry, members = stack.carried, stack.members
        issued, self._behind, self._next = (self._behind, self._next), (), None
        carried = [self._refs[v] for v in stack.inputs]
        inputs = [[self._refs[v] for v in op.operands[carry:]] for op in members]
        gathers = [[o for o in op.body.ops if is_ahead(o)] for op in members]
        ahead = max(map(most_ahead, gathers))
        made: list[dict[int, list[Ref]]] = [{} for _ in members]
        ready = self._begun.pop(members[0], [])
        begun = [int(bool(ready) and m == turns[0][0]) for m in range(len(members))]
        pending: list[SharedIteration] = []
        for op, refs, order in zip(members, inputs, orders, strict=True):
            first = (slice_of(ref, 0, len(order)) for ref in refs)  # gathers are issued early
            self._refs.update(zip(op.body.args[carry:], first, strict=True))
        for turn, (m, position) in enumerate(turns):
            op, order, start = members[m], orders[m], len(self.lives.steps)
            taken = (slice_of(ref, position, len(order)) for ref in inputs[m])
            self._refs.update(zip(op.body.args, [*carried, *taken], strict=True))
            while len(ready) < min(turn + ahead + 1, len(turns)):
                later = turns[len(ready)][0]
                ready.append(self._gather(gathers[later], len(ready), begun[later]))
                begun[later] += 1
            self._refs.update(ready[turn])
            if turn + 1 == len(turns):
                self._before_last(gathers[m], turn, issued)
            self._replays = replays(op, order[position].index)
            self._region(op.body, gathers[m])
            self._kept.keep(gathers[m], len(turns) - turn, self._refs)
            yielded = [self._refs[v] for v in op.body.terminator.operands]
            carried, left = yielded[:carry], yielded[carry:]
            made[m][position] = left if turn else saved_first(op, left)
            if order[position].copies != 1:
                slots = [r[position] for r in inputs[m] if is_stack(r, len(order))]
                others = order[position].copies - 1
                pending.append(SharedIteration(made[m], position, start, others, slots))
            elif pending:
                self._others(op, pending)
                pending = []
        if pending:
            self._others(members[-1], pending)
        for op, by_place in zip(members, made, strict=True):
            stacks = (tuple(by_place[p][k] for p in sorted(by_place)) for k in stacked(op))
            self._refs.update(zip(op.results, [*carried, *stacks], strict=True))

    def _region(self, region: Region, skip: Sequence[Operation]) -> None:
        if region not in self._bodies:
            self._bodies[region] = in_order(region)
        for step in self._bodies[region]:
            op = step.members[0] if isinstance(step, LayerStack) else step
            if op in skip:
                continue
            if self._replays or op.phase != "recompute":
                self._run(step)
            else:
                self._refs.update(dict.fromkeys(op.results))

    def _gather(self, gathers: Sequence[Operation], turn: int, before: int) -> dict[Value, Ref]:
        """Gather the parameters of the layer of a later turn, unless forward kept them; `before`
        layers of the same repeat run before it."""
        for op in gathers:
            if turn < op.integer("kept", 0):
                self._refs.update(self._kept.of(op, before, self._refs))
            else:
                self._computation(op)
        return {r: self._refs[r] for op in gathers for r in op.results}

    def _before_last(self, own: Sequence[Operation], turn: int, issued: _Issued) -> None:
        """Before the last layer: copy its parameters out of what their call received (in other
        layers the next call receives as much), and run the gathers behind these layers, and those
        for the first layer of the next stack."""
        copied = (o for o in own if self._copied and turn >= o.integer("kept", 0))
        if results := [v for op in copied for v in op.results]:
            number = self._step(own[0], ())
            for buffer in (b for v in results for b in buffers_of(self._refs[v])):
                self._more(buffer, number, number, ONE)
        for op in issued[0]:
            self._computation(op)
        if (stack := issued[1]) is not None:
            self._begin(stack)

    def _others(self, op: Operation, turns: Sequence[SharedIteration]) -> None:
        """Account for the iterations that those of `turns` stand for: the slices that they take
        from the stacks and those that they leave there."""
        number = self._step(op, (), counts=False)
        for turn in turns:
            twins: dict[Buffer, Buffer] = {}
            for slot in turn.slots:
                if isinstance(slot, Together):
                    twins.update(zip(buffers_of(slot[0]), buffers_of(slot[1:]), strict=True))
            for buffer, twin in twins.items():
                if buffer.last.get(self._part, -1) >= turn.start:
                    twin.last[self._part] = number
                    twin.phases |= buffer.phases
            turn.made[turn.position] = [
                self._with_twins(r, turn.others, number, twins) for r in turn.made[turn.position]
            ]

    def _with_twins(self, ref: Ref, copies: Expr, number: int, twins: dict[Buffer, Buffer]) -> Ref:
        """A slot with the buffers that one iteration left and those that the others left."""
        for buffer in buffers_of(ref):
            if buffer not in twins:
                twins[buffer] = self._more(buffer, number, number, copies)
        return Together((ref, *(twins[b] for b in buffers_of(ref))))

    # -- repeats inside of repeats -----------------------------------------------------------------

    def _all_at_once(self, op: Operation, region: Region) -> None:
        """Run one iteration for all of a repeat. The buffers that any of the others leaves exist
        before it; those that any of them takes live until its end."""
        carry, inputs = op.integer("carry", 1), [self._refs[v] for v in op.operands]
        start = self._step(op, (), counts=False)
        self._refs.update(zip(region.args, inputs[:carry], strict=False))
        for arg, ref in zip(region.args[carry:], inputs[carry:], strict=True):
            self._refs[arg] = together(ref)
        self._replays = True
        gathers = [o for o in region.ops if is_ahead(o)]
        ahead = list(self._gather(gathers, 0, 0).values())
        self._region(region, gathers)
        self._kept.keep(gathers, 1, self._refs)
        end = self._step(op, (), counts=False)
        for ref in inputs:
            self._touch(ref, end, op.phase)
        others = op.expr("count") - 1
        yielded = [self._refs[v] for v in region.terminator.operands]
        self._beside(yielded[:carry], start, end, ONE)
        self._beside(ahead, start, end, const(most_ahead(gathers)))
        twins = [self._beside([ref], start, end, others) for ref in yielded[carry:]]
        stacks = ((Together((r, *t)),) for r, t in zip(yielded[carry:], twins, strict=True))
        self._refs.update(zip(op.results, [*yielded[:carry], *stacks], strict=True))

    # -- microbatches ------------------------------------------------------------------------------

    def _accumulate(self, op: Operation, region: Region) -> None:
        """Run one microbatch, or each action of it. Sums exist from the start; sums that are freed
        between steps exist from the first action on that makes a summand."""
        old = {r: self._refs[v] for r in op.results if (v := updated(r)) in self._refs}
        late = "schedule" in op.attrs and self._freed
        made = [r for r in op.results if late and is_sum(r) and r not in old]
        self._sums.late.update(made)
        new = [r for r in op.results if not (r in old or r in made or self._sums.home(r))]
        number = self._step(op, new)
        sums = list(self.lives.steps[number].made)
        self._sums.at_once.update((b.value, b) for b in sums)
        for value in kept_when_sent(region):
            sums += [self._make(value, number, number, space=s) for s in value.tensor.memories]
        self._refs.update(old)
        for result in (r for r in op.results if not (r in old or r in made)):
            home = self._sums.home(result)
            self._refs[result] = self._refs[result] if home is None else self._fixed(home)
        for arg, value in zip(region.args, op.operands, strict=True):
            self._refs[arg] = self._refs[value]
        outer = list(self._budget.counted(self.lives.buffers))
        if "schedule" in op.attrs:
            self.lives.scheduled = number
        self._sums.several = op.expr("count") != ONE
        self._whole_region(in_order(region))
        self._sums.several = False
        end = self._step(op, (), counts=False)
        for buffer in outer:
            inside = any(part is not None for part in buffer.last) or buffer.last[None] > number
            if buffer in sums or inside:
                buffer.last = {None: end}
        for result in made:
            self._refs[result] = each_buffer(
                self._refs[region.terminator.operands[result.index]], self._sum_of
            )

    def _sum_of(self, ref: Buffer) -> Buffer:
        """Allocate the sum of a buffer of all microbatches, in the last step, which is behind
        them."""
        end = len(self.lives.steps) - 1
        total = self._make(ref.value, end, end, ref.copies, space=ref.space)
        total.phases |= ref.phases
        self.lives.sums[ref] = total
        return total

    def _action(self, op: Operation) -> None:
        self._part, order = op, in_order(op.body)
        early: Sequence[Operation] = ()
        for place, step in enumerate(order):
            if isinstance(step, LayerStack) and is_backward(step):
                early = self._behind = gathers_behind(order[place + 1 :])
            if step not in early:
                self._run(step)
        self._end_staying()
        for result, value in zip(op.results, op.body.terminator.operands, strict=True):
            self._refs[result] = self._refs[value]
        self._part = None


def _classified(body: Region) -> tuple[Roots, Sets]:
    """The roots of the values of a function, and the sets of those that are not transient."""
    roots = Roots()
    return roots, classify(body, roots)
