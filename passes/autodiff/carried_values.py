"""The values that backward takes from the forward of a repeat: slices, the stash, and recomputed
values.

A slice of a parameter is bound again. A value that the policy keeps comes through the stash, a
stacked result of the forward repeat. Any other value is recomputed in the backward region from the
kept ones. Of a layer `%u = einsum(%h, %w); %g = gelu(%u)`, whose backward uses %h, %w and %u:

| `recompute` | stacked | backward begins with                                         |
|-------------|---------|--------------------------------------------------------------|
| none        | %h, %u  | its own ops                                                  |
| full        | %h      | `%u = stg.einsum[phase = recompute](%h, %w)`                 |
| full_replay | %h      | the same, and `%g = stg.gelu[phase = recompute](%u)`         |

The result of a sharding constraint with `again` is never stashed: backward applies the constraint
to its operand once more (`pin_again`), and so does recomputation.

With `recompute_modules` a module is recomputed at once, where its backward begins, and values that
other operations take from it are kept, or copied from what was recomputed
(`stagec.sharding.checkpoints`).

With `recompute_every = 2` backward has both values: `stg.recall(%u_again, %u_stashed)` takes the
first one in every second layer and the second one in the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stagec.api import Builder, Operation, Region, Registry, Value, const, factor_sizes, made_by
from stagec.ir.expr import is_quadratic
from stagec.ir.recompute_window import EVERY, FIRST
from stagec.ir.rewrite import carried, enclosing
from stagec.ir.traits import Recasts, Stays
from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.ops.contraction import Einsum, attributes_again
from stagec.ir_spec.ops.route import Route
from stagec.ir_spec.strategy.recompute import RecomputeRule
from stagec.sharding.checkpoints import Checkpoint, checkpoints
from stagec.sharding.gathers import is_of_parameter
from stagec.sharding.recompute import take_recompute

PASS = "recompute"


def hand_over(
    registry: Registry,
    forward: Operation,
    back: Operation,
    *,
    keep_inputs: bool = False,
    keep_idle: bool = True,
    blocks: str = "needed",
    origins: Mapping[Operation, Operation] | None = None,
    sums: Mapping[Value, Value] | None = None,
) -> None:
    """Give the backward region all values of the forward region that it uses, in place. With
    `keep_inputs` a recomputed block keeps its inputs until its backward ends, and is recomputed at
    once, as `blocks` of `stg.saved_tensors` states. With `keep_idle` values that the recompute list
    names are kept even if backward does not use them. `origins` maps operations of backward to
    those of forward of which they compute gradients, `sums` values of forward to their gradients,
    which checkpoints with routers then keep."""
    run = _HandOver(
        registry, forward, back, origins or {}, sums or {}, replays=blocks == "replayed"
    ).run
    run(keep_inputs=keep_inputs, keep_idle=keep_idle, whole=blocks == "whole")


def pin_again(region: Region, origins: dict[Operation, Operation]) -> None:
    """Where backward in a region uses the result of a sharding constraint with `again`, give it a
    copy of that constraint, and of those whose results it takes, in place. `origins` maps each copy
    to its constraint."""
    pins: dict[Value, Value] = {}
    for op in [op for op in region.ops if op.phase == "backward"]:
        for user in op.walk():
            for index, value in enumerate(user.operands):
                if (again := _pinned(value, op, pins, origins)) is not value:
                    user.set_operand(index, again)


def _pinned(
    value: Value, place: Operation, pins: dict[Value, Value], origins: dict[Operation, Operation]
) -> Value:
    """The copy, before `place`, of a constraint with `again`; other values are their own."""
    pin = value.producer
    if pin is None or not pin.flag("again") or pin.phase != "forward":
        return value
    if value not in pins:
        copy = _clone(pin, [_pinned(v, place, pins, origins) for v in pin.operands], "backward")
        place.home.insert(place.position(), copy)
        pins[value], origins[copy] = copy.result, pin
    return pins[value]


def _clone(op: Operation, operands: Sequence[Value], phase: str) -> Operation:
    """A copy of an operation in another phase, on other operands."""
    copy = Operation(op.definition, operands, op.attrs, loc=made_by(PASS, op.loc))
    copy.attrs["phase"] = phase
    for result in op.results:
        copy.add_result(result.name, result.type, result.loc)
    return copy


class _HandOver:
    def __init__(
        self,
        registry: Registry,
        forward: Operation,
        back: Operation,
        origins: Mapping[Operation, Operation],
        sums: Mapping[Value, Value],
        *,
        replays: bool,
    ) -> None:
        self._registry, self._forward, self._back = registry, forward, back
        what = take_recompute(forward)
        if replays and what.policy == "full" and not what.keep:
            what = replace(what, policy="full_replay")
        self._what = replace(what, policy="none") if what.modules else what
        self._recalled: dict[Value, Value] = {}
        self._origins, self._sums = origins, sums
        self._carry = carried(forward)
        self._inside: dict[Value, Value] = {}
        self._place = back.body.terminator  # recomputed operations go before this one
        self._listed = _listed(forward.body, self._what)
        #: Recomputed operations, with their places in forward.
        self._again: dict[Operation, int] = {}
        self._modules = [
            _Module(c, self._back.body, origins)
            for c in checkpoints(forward.body, self._what.modules)
        ]
        self._modules.sort(key=lambda module: not module.checkpoint.users)  # others may take these

    def run(self, *, keep_inputs: bool, keep_idle: bool, whole: bool) -> None:
        for op in list(self._back.body.walk()):
            for module in self._modules:
                if module.first is op:
                    self._compute_again(module)
            self._take_operands(op)
        if self._what.policy == "full_replay":
            self._replay_rest()
        if keep_inputs and self._what.policy in ("full", "full_replay"):
            self._recompute_first(whole=whole)
        if self._what.keep and keep_idle:
            self._keep_rest()
        if keep_inputs and self._what.policy in ("full", "full_replay"):
            self._keep_inputs()
        for name, number in ((FIRST, self._what.layers), (EVERY, self._what.every)):
            if number and any(op.phase == "recompute" for op in self._back.body.ops):
                self._back.attrs[name] = const(number)

    def _take_operands(self, op: Operation) -> None:
        """Give an operation of backward its operands of forward; a discard of what is only saved
        ends where that is computed again."""
        self._place = enclosing(op, self._back.body)
        saved = [v for v in op.operands if v.region is self._forward.body and op.flag("saved")]
        if any(self._get(v).producer is not None for v in saved):
            op.erase()
            return
        for index, value in enumerate(op.operands):
            if value.region is self._forward.body:
                op.set_operand(index, self._use(value, self._origins.get(op)))

    def _use(self, value: Value, origin: Operation | None) -> Value:
        """The value that backward uses for a forward value, for the gradient of an operation. Where
        only some iterations recompute it, the others take it from the stash."""
        again = self._of_module(value, origin) or self._get(value)
        if again.producer is None or not (self._what.layers or self._what.every):
            return again
        if again not in self._recalled:
            b = Builder.before(self._registry, self._place, phase="backward")
            stashed = self._bind(value, self._stash(value))
            self._recalled[again] = b.value("stg.recall", [again, stashed], hint=value.name)
        return self._recalled[again]

    def _of_module(self, value: Value, origin: Operation | None) -> Value | None:
        """The value in backward for one that a module with a checkpoint makes: inside of its
        backward what was computed again, elsewhere the copy of that; None if it is kept."""
        for module in self._modules:
            if value.producer in module.ops:
                known = module.again if origin in module.ops else module.copies
                return known.get(value)
        return None

    def _compute_again(self, module: _Module) -> None:
        """Compute a module again, before the first operation that `first` names, and keep what it
        takes and returns until its backward ends."""
        self._place = module.first
        inputs = {v: self._use(v, None) for v in module.checkpoint.inputs()}
        known = inputs | module.again
        for op in module.checkpoint.ops:
            operands = [known.get(v, v) for v in op.operands]
            copy = _clone(op, operands, "recompute")
            copy.attrs = attributes_again(copy)
            known |= zip(op.results, copy.results, strict=True)
            self._back.body.insert(self._place.position(), copy)
        results = module.checkpoint.results()
        if module.checkpoint.users:
            b = Builder.before(self._registry, self._place, phase="recompute")
            module.copies |= {v: b.value("stg.reorder", [known[v]], hint=v.name) for v in results}
        module.again |= known
        read = {v for v in module.last.operands if v in inputs}
        kept = [known[v] for v in (*inputs, *results) if v not in read and not is_of_parameter(v)]
        end = Builder.after(self._registry, module.last, phase="recompute")
        end.op("stg.discard", list(dict.fromkeys(kept)), types=())
        self._keep_graph(module.checkpoint.ops, inputs)

    def _get(self, value: Value) -> Value:
        """The value in the backward region that stands for one of the forward region."""
        if value not in self._inside:
            if isinstance(value.owner, Region):
                sliced = value.index >= self._carry
                outer = self._forward.operands[value.index] if sliced else self._stash(value)
                self._inside[value] = self._bind(value, outer)
            elif self._keeps(value):
                self._inside[value] = self._bind(value, self._stash(value))
            else:
                self._recompute(value.owner)
        return self._inside[value]

    def _keeps(self, value: Value) -> bool:
        """Whether the policy stashes a value. Results of ops with regions are never recomputed. A
        cast is recomputed if the policy names the op whose result it casts."""
        op, what = value.producer, self._what
        if op is None or op.region is not None:
            return True
        if op.flag("again"):
            return False
        if what.ops:
            if op.has(Recasts) and op.operands[0].region is self._forward.body:
                op = op.operands[0].producer or op
            return op.name.partition(".")[2] not in what.ops
        if op in self._listed:
            return True
        if what.policy == "selective":
            return not is_quadratic(value.tensor.elements)
        return what.policy == "none"

    def _bind(self, value: Value, outer: Value) -> Value:
        self._back.add_operand(outer)
        return self._back.body.add_arg(value.name, value.tensor.unplaced(), value.loc)

    def _stash(self, value: Value) -> Value:
        """The stacked result that carries a forward value to backward, made on demand."""
        end = self._forward.body.terminator
        for index, yielded in enumerate(end.operands[self._carry :], self._carry):
            if yielded is value:
                return self._forward.results[index]
        end.add_operand(value)
        stacked = value.tensor.unplaced().stacked(self._forward.expr("count"))
        return self._forward.add_result(value.prefixed("stash_"), stacked, value.loc)

    def _recompute(self, op: Operation) -> None:
        """Copy a forward operation and those that it needs to the current place of backward."""
        operands = [self._get(v) if v.region is self._forward.body else v for v in op.operands]
        copy = _clone(op, operands, "recompute")
        copy.attrs = attributes_again(copy)
        self._inside |= zip(op.results, copy.results, strict=True)
        self._again[copy] = op.position()
        self._back.body.insert(self._place.position(), copy)

    def _recompute_first(self, *, whole: bool) -> None:
        """Recompute all of a checkpoint in the order of forward, before the first operation of
        backward that reads a saved tensor or a parameter, which is one (`_checkpoint_hook.
        unpack_hook` of torch/utils/checkpoint.py), up to the last that it needs
        (`_StopRecomputationError`), or to the end of the block: also operations that it does not
        need. What forward keeps beyond the last (`stg.discard`) is there then."""
        body, first = self._back.body, self._first_unpacked()
        last = len(self._forward.body.ops) - 1 if whole else max(self._again.values(), default=0)
        idle = [op for op in self._forward.body.ops[:last] if self._is_idle(op)]
        for op in idle:
            self._recompute(op)
        for op in [op for op in self._forward.body.ops[:last] if op.has(Stays)]:
            self._name_again(op)
        for place, op in enumerate(sorted(self._again, key=self._again.__getitem__), first):
            body.ops.remove(op)
            body.insert(place, op)
        made = [again for op in idle for r in op.results if not (again := self._inside[r]).uses]
        copies = {self._inside[r].producer for op in idle for r in op.results}
        kept = (self._inside.get(r) for op in self._forward.body.ops[:last] for r in op.results)
        made += [v for v in kept if v and v.producer is None and {u for u, _ in v.uses} <= copies]
        rest = self._forward.body.ops[last:-1]
        named = [v for op in rest if op.has(Stays) for v in op.operands]
        inside = (self._inside[v] for v in named if v in self._inside)
        made += [again for again in inside if again.producer is not None]
        if made:
            ends = Operation(self._registry["stg.discard"], made, {"phase": "recompute"})
            body.insert(first + len(self._again), ends)

    def _name_again(self, discard: Operation) -> None:
        """Keep recomputed values as long as forward does, which is the same code."""
        values = [self._inside[v] for v in discard.operands if v in self._inside]
        values = [v for v in values if v.producer in self._again]
        if values:
            copy = Operation(discard.definition, values, {"phase": "recompute"}, loc=discard.loc)
            self._again[copy] = discard.position()
            self._back.body.insert(self._place.position(), copy)

    def _first_unpacked(self) -> int:
        """The position of the first operation of backward that reads more than gradients."""
        given = {*self._back.body.args[carried(self._back) :]}
        reads = (op for op in self._back.body.ops if not given.isdisjoint(op.operands))
        return min(map(Operation.position, (*reads, *self._again)), default=0)

    def _is_idle(self, op: Operation) -> bool:
        """Whether backward needs no result of an operation, and none is kept."""
        unused = op.region is None and not any(r in self._inside for r in op.results)
        return unused and bool(op.results) and not any(map(self._keeps, op.results))

    def _keep_rest(self) -> None:
        """Keep values that the list names and backward does not use, as such a checkpoint does."""
        kept = [v for op in self._forward.body.ops if op in self._listed for v in op.results]
        stashed = [self._bind(v, self._stash(v)) for v in kept if v not in self._inside]
        if stashed:
            self._discard(stashed)

    def _keep_inputs(self) -> None:
        """Keep the inputs of a checkpoint until its last gradient is complete."""
        args = self._forward.body.args[: self._carry]
        if inputs := {a: self._inside[a] for a in args if a in self._inside}:
            self._discard([*inputs.values()], "recompute")  # in iterations that compute again
            self._keep_graph(self._forward.body.ops, inputs)

    def _keep_graph(self, ops: Sequence[Operation], inputs: Mapping[Value, Value]) -> None:
        """Keep the inputs of a checkpoint with a router and their gradients, if that is asked
        for."""
        if self._sums and any(isinstance(op.definition, Route) for op in ops):
            given = {v: again for v, again in inputs.items() if not is_of_parameter(again)}
            kept = [*given.values(), *filter(None, map(self._sums.get, given))]
            end = Builder.before(self._registry, self._back.body.terminator, phase="recompute")
            end.op("stg.discard", kept, {"graph": True}, types=())

    def _replay_rest(self) -> None:
        """Recompute the whole block, including ops that backward does not need."""
        self._place = self._back.body.terminator
        for op in self._forward.body.ops[:-1]:
            if op.region is None and not all(r in self._inside for r in op.results):
                self._recompute(op)
        outputs = [self._get(v) for v in self._forward.body.terminator.operands[: self._carry]]
        self._discard(outputs)

    def _discard(self, values: Sequence[Value], phase: str = "backward") -> None:
        """Keep values to the end of backward of a layer."""
        end, loc = self._back.body.terminator, self._back.loc
        Builder.before(self._registry, end, loc=loc, phase=phase).op("stg.discard", values)


class _Module:
    """A module with a checkpoint, and where its backward begins and ends."""

    def __init__(
        self, checkpoint: Checkpoint, back: Region, origins: Mapping[Operation, Operation]
    ) -> None:
        self.checkpoint, self.ops = checkpoint, frozenset(checkpoint.ops)
        own = [op for op in back.ops if origins.get(op) in self.ops]
        users = [op for op in back.ops if origins.get(op) in checkpoint.users]
        self.first, self.last = min((*users, *own), key=Operation.position), own[-1]
        #: Values of forward with those that are computed again, and with the copies of these.
        self.again: dict[Value, Value] = {}
        self.copies: dict[Value, Value] = {}


def _listed(region: Region, what: RecomputeRule) -> frozenset[Operation]:
    """The ops of a region whose results the list of a rule keeps: those that it names, except
    einsums that are not matrix products of 16 bits or more, and except every n-th of these (n =
    `products`). Products in 8 bits are another op of PyTorch, `aten._scaled_mm`."""
    names = (op for op in region.ops if op.name.partition(".")[2] in what.keep)
    products = [op for op in region.ops if _is_product(op)]
    again = products[what.products - 1 :: what.products] if what.products else []
    plain = (op for op in names if _is_product(op) or not isinstance(op.definition, Einsum))
    return frozenset(op for op in plain if op not in again)


def _is_product(op: Operation) -> bool:
    """Whether an op runs as one matrix product in 16 bits or more; products of all experts are
    another op of PyTorch, `aten._grouped_mm`."""
    if any(dim.routed for value in op.operands for dim in value.tensor.dims):
        return False
    rule = op.definition.rule(op)
    if rule is None:
        return False
    kernel = op.definition.kernel(op, factor_sizes(op, rule))
    return kernel is not None and kernel.kind == "matmul" and DTYPE_BYTES[kernel.dtype] > 1
