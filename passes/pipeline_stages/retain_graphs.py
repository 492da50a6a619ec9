"""retain-graphs: computes gradients of weights from a graph that the first part of backward
keeps."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from stagec.api import Builder, Module, Operation, Pass, Phase, Value, made_by, read_strategy
from stagec.ir.clone import Copier
from stagec.ir.core import renumber
from stagec.ir.rewrite import bind, drop_unused_results, repeats_in, stacked
from stagec.ir.traits import Accumulates, EndsLifetime, Recalls, Repeats, Terminates
from stagec.ir_spec.ops.pipeline import ActionOp, RecvOp
from stagec.ir_spec.strategy.stage_buffers import WEIGHTS, StageBuffersRule
from stagec.passes.pipeline_stages.sections import ActionKind, yielded
from stagec.sharding.stages import stage_functions


class RetainGraphs(Pass):
    """Compute gradients of weights weight by weight, as `stg.stage_buffers[graph = weights]`
    states.

    Values that the first part of backward made for an operation are passed on, also to norms, whose
    backward runs again for the weight. Recomputed blocks are recomputed for each weight, and the
    values that this saves for other operations stay until the weights of the microbatch are done.
    Layers come before the ops that follow them in the model. The first chunk of the model has no
    gradient of its input, and a single backward.

    Before:
        stg.symbols[B, D, L]
        stg.assume[B % 2 == 0]
        stg.assume[L % 2 == 0]
        stg.mesh @pod[pp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.stage_buffers[graph = weights]
        }
        stg.func @f_stage0[over = pp, stages = 0, parameters = D^2*L] (
            %x: bf16[B, D | rep],
            %w_c0: bf16[L/2, D, D | rep param part(w=0)]) -> bf16[L/2, D, D | rep part(g=0)] {
          %g_c0 = stg.accumulate[count = 2, split = B, schedule = "zb-h1"] (
              %x_mb: bf16[B/2, D | rep] = %x) {
            %H = stg.action[forward, chunk = 0] {
              %y, %H = stg.repeat[count = L/2, carry = 1] (
                  %h: bf16[B/2, D | rep] = %x_mb, %w_i: bf16[D, D | rep] = %w_c0) {
                %u = stg.einsum["bd,de->be"](%h, %w_i) : bf16[B/2, D | rep]
                %a = stg.gelu(%u) : bf16[B/2, D | rep]
                stg.yield(%a, %h)
              } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
              stg.send[over = pp, by = 1](%y)
              stg.yield(%H)
            } : bf16[L/2, B/2, D | rep]
            %hand_d_u = stg.action[backward, chunk = 0, phase = backward] {
              %d_x = stg.recv[over = pp, by = -1, channel = 1] : bf16[B/2, D | rep]
              %d_x_2, %hand_d_u = stg.repeat[reverse, count = L/2, carry = 1, phase = backward] (
                  %d_a: bf16[B/2, D | rep] = %d_x, %w_i: bf16[D, D | rep] = %w_c0,
                  %h: bf16[B/2, D | rep] = %H) {
                %u = stg.einsum["bd,de->be", phase = recompute](%h, %w_i) : bf16[B/2, D | rep]
                %d_u = stg.gelu_grad(%d_a, %u) : bf16[B/2, D | rep]
                %d_h = stg.einsum["be,de->bd"](%d_u, %w_i) : bf16[B/2, D | rep]
                stg.yield(%d_h, %d_u)
              } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
              stg.yield(%hand_d_u)
            } : bf16[L/2, B/2, D | rep]
            %g_w = stg.action[weights, chunk = 0, phase = backward] {
              %g_w = stg.repeat[reverse, count = L/2, carry = 0, phase = backward] (
                  %h: bf16[B/2, D | rep] = %H, %d_u: bf16[B/2, D | rep] = %hand_d_u) {
                %d_w = stg.einsum["bd,be->de"](%h, %d_u) : bf16[D, D | rep]
                stg.yield(%d_w)
              } : bf16[L/2, D, D | rep]
              stg.yield(%g_w)
            } : bf16[L/2, D, D | rep]
            stg.yield(%g_w)
          } : bf16[L/2, D, D | rep]
          stg.return(%g_c0)
        }
        stg.func @f_stage1[over = pp, stages = 1, parameters = D^2*L] (
            %w_c0: bf16[L/2, D, D | rep param part(w=0)]) -> bf16[L/2, D, D | rep part(g=0)] {
          %g_c0 = stg.accumulate[count = 2, split = B, schedule = "zb-h1"] {
            %y, %H = stg.action[forward, chunk = 0] {
              %y = stg.recv[over = pp, by = 1] : bf16[B/2, D | rep]
              %y_2, %H = stg.repeat[count = L/2, carry = 1] (
                  %h: bf16[B/2, D | rep] = %y, %w_i: bf16[D, D | rep] = %w_c0) {
                %u = stg.einsum["bd,de->be"](%h, %w_i) : bf16[B/2, D | rep]
                %a = stg.gelu(%u) : bf16[B/2, D | rep]
                stg.yield(%a, %h)
              } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
              stg.yield(%y_2, %H)
            } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
            %hand_d_u = stg.action[backward, chunk = 0, phase = backward] {
              %d_x, %hand_d_u = stg.repeat[reverse, count = L/2, carry = 1, phase = backward] (
                  %d_a: bf16[B/2, D | rep] = %y, %w_i: bf16[D, D | rep] = %w_c0,
                  %h: bf16[B/2, D | rep] = %H) {
                %u = stg.einsum["bd,de->be", phase = recompute](%h, %w_i) : bf16[B/2, D | rep]
                %d_u = stg.gelu_grad(%d_a, %u) : bf16[B/2, D | rep]
                %d_h = stg.einsum["be,de->bd"](%d_u, %w_i) : bf16[B/2, D | rep]
                stg.yield(%d_h, %d_u)
              } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
              stg.send[over = pp, by = -1, channel = 1](%d_x)
              stg.yield(%hand_d_u)
            } : bf16[L/2, B/2, D | rep]
            %g_w = stg.action[weights, chunk = 0, phase = backward] {
              %g_w = stg.repeat[reverse, count = L/2, carry = 0, phase = backward] (
                  %h: bf16[B/2, D | rep] = %H, %d_u: bf16[B/2, D | rep] = %hand_d_u) {
                %d_w = stg.einsum["bd,be->de"](%h, %d_u) : bf16[D, D | rep]
                stg.yield(%d_w)
              } : bf16[L/2, D, D | rep]
              stg.yield(%g_w)
            } : bf16[L/2, D, D | rep]
            stg.yield(%g_w)
          } : bf16[L/2, D, D | rep]
          stg.return(%g_c0)
        }
    After:
        stg.symbols[B, D, L]
        stg.assume[B % 2 == 0]
        stg.assume[L % 2 == 0]
        stg.mesh @pod[pp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.stage_buffers[graph = weights]
        }
        stg.func @f_stage0[over = pp, stages = 0, parameters = D^2*L] (
            %x: bf16[B, D | rep],
            %w_c0: bf16[L/2, D, D | rep param part(w=0)]) -> bf16[L/2, D, D | rep part(g=0)] {
          %g_c0 = stg.accumulate[count = 2, split = B, schedule = "zb-h1"] (
              %x_mb: bf16[B/2, D | rep] = %x) {
            %H = stg.action[forward, chunk = 0] {
              %y, %H = stg.repeat[count = L/2, carry = 1] (
                  %h: bf16[B/2, D | rep] = %x_mb, %w_i: bf16[D, D | rep] = %w_c0) {
                %u = stg.einsum["bd,de->be"](%h, %w_i) : bf16[B/2, D | rep]
                %a = stg.gelu(%u) : bf16[B/2, D | rep]
                stg.yield(%a, %h)
              } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
              stg.send[over = pp, by = 1](%y)
              stg.yield(%H)
            } : bf16[L/2, B/2, D | rep]
            %d_x = stg.action[backward, chunk = 0, phase = backward] {
              %d_x = stg.recv[over = pp, by = -1, channel = 1] : bf16[B/2, D | rep]
              stg.yield(%d_x)
            } : bf16[B/2, D | rep]
            %g_w = stg.action[weights, chunk = 0, phase = backward] {
              %d_x_2, %g_w = stg.repeat[reverse, count = L/2, carry = 1, phase = backward] (
                  %d_a: bf16[B/2, D | rep] = %d_x, %w_i: bf16[D, D | rep] = %w_c0,
                  %h: bf16[B/2, D | rep] = %H) {
                %u = stg.einsum["bd,de->be", phase = recompute](%h, %w_i) : bf16[B/2, D | rep]
                %d_u = stg.gelu_grad(%d_a, %u) : bf16[B/2, D | rep]
                %d_w = stg.einsum["bd,be->de"](%h, %d_u) : bf16[D, D | rep]
                %d_h = stg.einsum["be,de->bd"](%d_u, %w_i) : bf16[B/2, D | rep]
                stg.yield(%d_h, %d_w)
              } : (bf16[B/2, D | rep], bf16[L/2, D, D | rep])
              stg.yield(%g_w)
            } : bf16[L/2, D, D | rep]
            stg.yield(%g_w)
          } : bf16[L/2, D, D | rep]
          stg.return(%g_c0)
        }
        stg.func @f_stage1[over = pp, stages = 1, parameters = D^2*L] (
            %w_c0: bf16[L/2, D, D | rep param part(w=0)]) -> bf16[L/2, D, D | rep part(g=0)] {
          %g_c0 = stg.accumulate[count = 2, split = B, schedule = "zb-h1"] {
            %y, %H = stg.action[forward, chunk = 0] {
              %y = stg.recv[over = pp, by = 1] : bf16[B/2, D | rep]
              %y_2, %H = stg.repeat[count = L/2, carry = 1] (
                  %h: bf16[B/2, D | rep] = %y, %w_i: bf16[D, D | rep] = %w_c0) {
                %u = stg.einsum["bd,de->be"](%h, %w_i) : bf16[B/2, D | rep]
                %a = stg.gelu(%u) : bf16[B/2, D | rep]
                stg.yield(%a, %h)
              } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
              stg.yield(%y_2, %H)
            } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
            %hand_d_u = stg.action[backward, chunk = 0, phase = backward] {
              %d_x, %hand_d_u = stg.repeat[reverse, count = L/2, carry = 1, phase = backward] (
                  %d_a: bf16[B/2, D | rep] = %y, %w_i: bf16[D, D | rep] = %w_c0,
                  %h: bf16[B/2, D | rep] = %H) {
                %u = stg.einsum["bd,de->be", phase = recompute](%h, %w_i) : bf16[B/2, D | rep]
                %d_u = stg.gelu_grad(%d_a, %u) : bf16[B/2, D | rep]
                %d_h = stg.einsum["be,de->bd"](%d_u, %w_i) : bf16[B/2, D | rep]
                stg.yield(%d_h, %d_u)
              } : (bf16[B/2, D | rep], bf16[L/2, B/2, D | rep])
              stg.send[over = pp, by = -1, channel = 1](%d_x)
              stg.yield(%hand_d_u)
            } : bf16[L/2, B/2, D | rep]
            %g_w = stg.action[weights, chunk = 0, phase = backward] {
              %g_w, %u = stg.repeat[reverse, count = L/2, carry = 0, phase = backward] (
                  %h: bf16[B/2, D | rep] = %H, %d_u: bf16[B/2, D | rep] = %hand_d_u,
                  %w_i: bf16[D, D | rep] = %w_c0) {
                %u = stg.einsum["bd,de->be", phase = recompute](%h, %w_i) : bf16[B/2, D | rep]
                %d_w = stg.einsum["bd,be->de"](%h, %d_u) : bf16[D, D | rep]
                stg.yield(%d_w, %u)
              } : (bf16[L/2, D, D | rep], bf16[L/2, B/2, D | rep])
              stg.discard(%u)
              stg.yield(%g_w)
            } : bf16[L/2, D, D | rep]
            stg.yield(%g_w)
          } : bf16[L/2, D, D | rep]
          stg.return(%g_c0)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        rule = read_strategy(module).one(StageBuffersRule)
        return rule.graph == WEIGHTS and bool(stage_functions(module))

    def run(self, module: Module) -> None:
        for func in module.functions:
            accumulate = next(op for op in func.body.ops if op.has(Accumulates))
            actions = [op for op in accumulate.body.ops if isinstance(op.definition, ActionOp)]
            for weights in actions:
                if weights.text("kind") == ActionKind.WEIGHTS.label:
                    _retain(module, weights)


def _retain(module: Module, weights: Operation) -> None:
    kept: list[Value] = []
    for second in repeats_in(weights.body):
        first = _first_part(second)
        if first is None:
            continue
        if _begins(weights):
            _move_backward(first, weights)
            _fuse(first, second)
        else:
            kept += _Graph(module, first, second).by_weight()
            _move_ahead(second)
    if kept:
        module.before(weights.body.terminator, phase="backward").op("stg.discard", kept)


def _move_ahead(second: Operation) -> None:
    """Run layers first, in the order of the parameters of a model. The values for the weights after
    them stay until then."""
    region, place = second.parent, second.position()
    if region is not None:
        needed = region.ancestors(second.operands)
        first = [op for op in region.ops[:place] if op in needed]
        behind = [op for op in region.ops[:place] if op not in needed]
        region.ops[: place + 1] = [*first, second, *behind]


def _first_part(second: Operation) -> Operation | None:
    """The repeat of the first part of backward whose values the second repeat takes."""
    for value in second.operands:
        inside = _inside(value).producer
        action = None if inside is None else inside.parent_op
        if inside is None or action is None or not inside.has(Repeats):
            continue
        if action.text("kind") == ActionKind.BACKWARD.label:
            return inside
    return None


def _begins(weights: Operation) -> bool:
    """Whether a chunk is the first one of the model: it takes no value of another chunk."""
    actions = [op for op in weights.home.ops if isinstance(op.definition, ActionOp)]
    mine = (op for op in actions if op.integer("chunk") == weights.integer("chunk"))
    forward = next(op for op in mine if op.text("kind") == ActionKind.FORWARD.label)
    inside = list(forward.body.walk())
    makers = (v.producer for op in inside for v in op.operands)
    others = any(made is not None and isinstance(made.definition, ActionOp) for made in makers)
    return not others and not any(isinstance(op.definition, RecvOp) for op in inside)


def _move_backward(first: Operation, weights: Operation) -> None:
    """Move all of backward except its receives into the action of the weights."""
    back = first.parent_op
    if back is None:
        return
    moved = [op for op in back.body.ops[:-1] if not isinstance(op.definition, RecvOp)]
    for number, op in enumerate(moved):
        back.body.ops.remove(op)
        weights.body.insert(number, op)
    for op in moved:
        for index, value in enumerate(op.operands):
            if value.region is back.body:
                op.set_operand(index, yielded(back, value))
    for result, value in zip(list(back.results), back.body.terminator.operands, strict=True):
        for user, index in list(result.uses) if value.region is weights.body else ():
            outside = user.parent is back.parent
            user.set_operand(index, yielded(weights, value) if outside else value)
    kept = [v for v in back.body.terminator.operands if v.region is back.body]
    back.results[:] = [yielded(back, value) for value in kept]
    back.body.terminator.set_operands(kept)
    renumber(back.results)


def _fuse(first: Operation, second: Operation) -> None:
    """Merge the second repeat into the first; each operation comes after its operands."""
    body, end = first.body, first.body.terminator
    taken = dict(zip(first.operands, body.args, strict=True))
    for arg, outer in zip(second.body.args, second.operands, strict=True):
        if outer.producer is first:
            value = end.operands[outer.index]
        elif outer in taken:
            value = taken[outer]
        else:
            value = bind(first, outer, arg)
        arg.replace_with(value)
    place = 0
    for op in second.body.ops[:-1]:
        needs = [o.position() + 1 for v in op.operands if (o := v.producer) and o.parent is body]
        place = max(needs, default=0) if not op.has(EndsLifetime) else max(place, *needs, 0)
        body.insert(place, op)
        place += 1
    for result, value in zip(second.results, second.body.terminator.operands, strict=True):
        end.add_operand(value)
        result.replace_with(first.add_result(result.name, result.tensor, result.loc))
    second.body.terminator.drop_operands()
    second.body.ops[:] = [second.body.terminator]
    second.erase()
    drop_unused_results(first)


class _Graph:
    """The layers of a chunk: the first part of their backward, and the second."""

    def __init__(self, module: Module, first: Operation, second: Operation) -> None:
        self._registry, self._first, self._second = module.registry, first, second
        #: Maps values of the second part to those of the first one; `_bound` is the inverse.
        self._origin = self._origins()
        self._bound = {value: arg for arg, value in self._origin.items()}
        self._again = [op for part in (first, second) for op in part.body.ops if _is_again(op)]
        self._weights = [self._operations(y) for y in second.body.terminator.operands]

    def by_weight(self) -> list[Value]:
        """Order the second part weight by weight. Returns the stacks that have to stay."""
        second, end = self._second, self._second.body.terminator
        saved, kept = self._saved(), defaultdict[int, list[Value]](list)
        old, gradients = second.body.ops[:-1], list(end.operands)
        second.body.ops[:] = [end]
        for number, operations in enumerate(self._weights):
            copier = Copier({}, {}, lambda name: name, partial(made_by, RetainGraphs.name))
            for op in (*self._again, *operations) if saved else operations:
                self._insert(copier, op)
            gradients[number] = copier.values[gradients[number]]
            for value, last in saved.items():
                if last > number:
                    kept[last].append(copier.values[value])
            if kept[number]:
                b = Builder.before(self._registry, end, phase="recompute")
                b.op("stg.discard", kept[number])
        for op in old:
            if op.has(EndsLifetime) and not any(self._is_again(v) for v in op.operands):
                second.body.insert(end.position(), op)
            else:
                op.drop_operands()
        stay = kept[len(self._weights)]
        end.set_operands([*gradients, *stay])
        count = second.expr("count")
        return [second.add_result(v.name, v.tensor.stacked(count), v.loc) for v in stay]

    def _origins(self) -> dict[Value, Value]:
        origin: dict[Value, Value] = {}
        args = dict(zip(self._first.operands, self._first.body.args, strict=True))
        for arg, value in zip(self._second.body.args, self._second.operands, strict=True):
            inside = _inside(value)
            if value in args:
                origin[arg] = args[value]
            elif inside.producer is self._first:
                origin[arg] = self._first.body.terminator.operands[inside.index]
        return origin

    def _is_again(self, value: Value) -> bool:
        made = self._origin.get(value, value).producer
        return made is not None and _is_again(made)

    def _operations(self, gradient: Value) -> list[Operation]:
        """The operations that compute the gradient of a weight, in both parts of backward."""
        body = self._second.body
        behind = body.ancestors([gradient])
        here = [op for op in body.ops if op in behind and not _is_again(op)]
        taken = {self._origin[v] for op in here for v in op.operands if v in self._origin}
        made = [v.producer for v in taken if v.tensor.dims == gradient.tensor.dims]
        return [*(op for op in made if op is not None), *here]

    def _saved(self) -> dict[Value, int]:
        """The recomputed values that operations use, each with the number of the last weight whose
        gradient needs it (the number of weights if another operation does)."""
        nodes = {op: i for i, every in enumerate(self._weights) for op in every}
        saved: dict[Value, int] = {}
        for value in (r for op in self._again if not op.has(Recalls) for r in op.results):
            users = [user for user in self._users(value) if not _is_again(user)]
            if users:
                saved[value] = max(nodes.get(user, len(self._weights)) for user in users)
        return saved

    def _users(self, value: Value) -> Iterator[Operation]:
        arg = self._bound.get(value)
        for user, _ in (*value.uses, *(arg.uses if arg is not None else ())):
            if user.has(Recalls):
                yield from self._users(user.result)
            elif not user.has(EndsLifetime) and not user.has(Terminates):
                yield user

    def _insert(self, copier: Copier, op: Operation) -> None:
        for value in op.operands:
            if value not in copier.values:
                origin = self._origin.get(value, value)
                made = copier.values.get(origin)
                copier.values[value] = self._taken(origin) if made is None else made
        end = self._second.body.terminator
        for copy in copier.copies(op):
            self._second.body.insert(end.position(), copy)

    def _taken(self, value: Value) -> Value:
        """The argument of the second part for a value of the first one."""
        if value.region is self._second.body:
            return value
        if value not in self._bound:
            first = self._first
            if value in first.body.args:
                outer = first.operands[value.index]
            else:
                outer = stacked(first, value, value.prefixed("hand_"))
            back = first.parent_op
            if back is not None and outer.region is back.body:
                outer = yielded(back, outer)
            self._bound[value] = bind(self._second, outer, value)
        return self._bound[value]


def _inside(value: Value) -> Value:
    """The value inside of an action that it yields as this one; other values themselves."""
    made = value.producer
    if made is None or not isinstance(made.definition, ActionOp):
        return value
    return made.body.terminator.operands[value.index]


def _is_again(op: Operation) -> bool:
    return op.has(Recalls) or (op.phase == "recompute" and not op.has(EndsLifetime))
