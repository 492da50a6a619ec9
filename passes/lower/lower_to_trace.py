"""lower-to-trace: the partitioned function becomes an et.graph whose ops are the nodes of a trace.

Only this pass divides sizes by the sizes of axes: FLOPs and bytes become those of one rank, as
expressions.
"""

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial

from stagec.api import (
    Builder,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Rule,
    Value,
    axis_size,
    is_parameter,
    read_strategy,
    total,
)
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ONE, ZERO
from stagec.ir.kernel import CONTINUES, EXPANDING, EXPERTS, INDEXER
from stagec.ir.layers import kind_of
from stagec.ir.memo import MemoByType
from stagec.ir.own_gathers import OwnGather, names_of_nodes, own_gathers
from stagec.ir.rewrite import carried
from stagec.ir.serving_step import DECODE
from stagec.ir.traits import CopiesMemory, Free, Recalls, Repeats, Terminates
from stagec.ir.types import NODE
from stagec.ir_spec.ops.comm import (
    AllToAll,
    Collective,
    CollectivePermute,
    ReduceScatter,
    operand_dim,
)
from stagec.ir_spec.ops.pipeline import ActionOp, RecvOp, SendOp
from stagec.ir_spec.ops.pod_crossings import BY_LAYER, PodOp, TakeOver, end_type, message_bytes
from stagec.ir_spec.strategy.moe import DEEPEP, MoeRule
from stagec.ir_spec.strategy.tp_inputs import TpInputsRule
from stagec.ir_spec.strategy.tp_outputs import TpOutputsRule
from stagec.passes.lower.beside_gathers import Attrs, KernelsBesideGathers, Parts
from stagec.passes.lower.graphs import graph_attributes
from stagec.passes.lower.kernels import KernelForms, attributes, fused_attributes, fused_operations
from stagec.passes.lower.shared_actions import SharedActions, nodes_of, taken_by
from stagec.passes.lower.shared_work import SharedWork
from stagec.passes.lower.steps import (
    ACTIVATIONS,
    common_axes,
    dealt,
    decoding,
    gathered_for,
    is_repeated,
    one_axis,
    reduces,
    shared_out,
    sum_of,
)
from stagec.passes.lower.turned import TurnedOperands
from stagec.sharding.gathers import ahead_of
from stagec.sharding.stages import stage_functions
from stagec.sharding.work import viewed


class LowerToTrace(Pass):
    """Replace the function by an `et.graph`: computations and collectives of one rank, sizes still
    symbolic.

    With `share-actions`, actions of a pipeline that are equal except for names have one region,
    which takes captured nodes as arguments. This suffices for times.

    Before:
        %y = stg.einsum["bd,df->bf"](%x, %w) : bf16[B@dp, F@tp]
        %z = stg.all_gather[dim = 1, over = tp](%y) : bf16[B@dp, F]
    After:
        %y = et.comp[einsum, flops = 2*B*D*F/(dp*tp), ..., out = 2*B*F/(dp*tp)](%x, %w) : node
        %z = et.coll[all_gather, group = tp, bytes = 2*B*F/dp, dtype = bf16](%y) : node
    """

    needs = Phase.PARTITIONED
    until = Phase.PLANNED
    gives = Phase.LOWERED
    share_actions: bool = field(
        default=False,
        metadata={"help": "lower actions that are alike once, with the names of the first"},
    )

    def run(self, module: Module) -> None:
        lower_to_trace(module, share_actions=self.share_actions)


def lower_to_trace(module: Module, *, share_actions: bool = False) -> None:
    """Replace the main function, or those of pipeline stages, by et.graphs, in place. With
    `share_actions`, equal actions have one region."""
    staged = stage_functions(module)
    forms = KernelForms.of(read_strategy(module))

    def said(op: Operation, eager: str) -> dict[str, RawAttr]:
        work = forms.work(op)
        return attributes(op.name, work, op.results, forms.of_op(op, work.kernel, eager))

    known_costs, facts = MemoByType(said), module.facts

    def costs(op: Operation) -> dict[str, RawAttr]:
        return known_costs(op, forms.eager(op))

    def part(op: Operation, factor: str, steps: Expr) -> tuple[Attrs, Attrs]:
        return shared_out(costs(op), {op: factor}, steps, facts)

    parts = MemoByType(part)
    known = SharedActions() if share_actions else None
    for func in staged or [module.main]:
        _lower(module, func, costs, parts, known)


def _lower(
    module: Module,
    func: Operation,
    costs: Callable[[Operation], Attrs],
    parts: Parts,
    known: SharedActions | None,
) -> None:
    b = Builder(module.registry, module.root.body, func.position(), loc=func.loc)
    attrs = graph_attributes(module, func)
    graph = b.op("et.graph", (), attrs, types=(), symbol=func.symbol)
    graph.origin = func
    _Lowering(module, costs, parts, known).function(func.body, graph.make_region())
    module.root.body.ops.remove(func)  # it is not erased: nodes refer to its ops


class _Lowering:
    """Lowers a function. `known` are the lowered actions, if actions are shared."""

    def __init__(
        self,
        module: Module,
        costs: Callable[[Operation], Attrs],
        parts: Parts,
        known: SharedActions | None,
    ) -> None:
        self._costs, self._parts, self._known = costs, parts, known
        self._registry, self._facts = module.registry, module.facts
        strategy = read_strategy(module)
        self._blocking = frozenset(strategy.blocking)
        self._sums_in_steps = strategy.one(TpOutputsRule).policy == "in_steps"
        self._gathers_in_steps = strategy.one(TpInputsRule).gathers == "in_steps"
        self._direct = strategy.one(MoeRule).dispatch == DEEPEP
        self._decodes = module.serving == DECODE
        self._shared = SharedWork.of(module)
        self._begun: dict[Value, Value] = {}  # first by last node of products in steps
        self._early = KernelsBesideGathers(parts, self._facts)
        self._nodes: dict[Value, Value] = {}
        self._more: dict[Value, list[Value]] = {}  # further nodes for which users wait
        self._turned = TurnedOperands()
        self._channels: dict[Operation, int] = {}
        self._idle = False  # inside iterations in which the rank does not work

    def function(self, body: Region, new: Region) -> None:
        for arg in body.args:
            self._nodes[arg] = new.add_arg(arg.name, NODE, arg.loc)
        new.returns = tuple(NODE for _ in body.terminator.operands)
        self._region(body, new, "et.return")

    def _region(self, old: Region, new: Region, end: str) -> None:
        fused = fused_operations(old)
        for op in old.ops[:-1]:
            kernel = fused.get(op, [op])
            if op is kernel[0] and not self._sits_out(op):
                builder = Builder(self._registry, new, loc=op.loc, phase=op.phase)
                builder.finish = partial(self._shared.finish, kernel[-1])
                if len(kernel) > 1:
                    self._kernel(kernel, builder)
                else:
                    self._op(op, builder)
        last = old.terminator
        b = Builder(self._registry, new, loc=last.loc, phase=last.phase)
        b.op(end, self._made(last.operands), types=())

    def _made(self, values: Sequence[Value]) -> list[Value]:
        """The node of each value that has one."""
        return [self._nodes[v] for v in values if v in self._nodes]

    def _deps(self, values: Sequence[Value]) -> list[Value]:
        there = [v for v in values if v in self._nodes]
        return [n for v in there for n in (*self._more.get(v, ()), self._nodes[v])]

    def _op(self, op: Operation, b: Builder) -> None:
        if op.region is not None:
            self._repeated(op, op.region, b)
        elif isinstance(op.definition, (SendOp, RecvOp)):
            self._message(op, b)
        elif isinstance(op.definition, PodOp):
            self._cross(op, b)
        elif op.has(Recalls):
            again, stashed = self._deps(op.operands)
            self._nodes[op.result] = b.value("et.recall", [again, stashed], hint=op.result.name)
        elif op.has(Free) or (op.has(CopiesMemory) and not op.flag("node")):
            self._view(op)
        elif op.results:
            node = self._node(op, b)
            for result in op.results:
                self._nodes[result] = node

    def _view(self, op: Operation) -> None:
        """A user of a view depends on the node of the viewed value."""
        for result in op.results if op.operands else ():
            viewed = op.operands[min(result.index, len(op.operands) - 1)]
            self._nodes.pop(result, None)  # from an iteration in which the rank works
            if viewed in self._nodes:
                self._nodes[result] = self._nodes[viewed]

    def _node(self, op: Operation, b: Builder) -> Value:
        if isinstance(op.definition, CollectivePermute):
            return self._shift(op, op.definition, b)
        if isinstance(op.definition, Collective):
            return self._collective(op, op.definition, b)
        if op.has(CopiesMemory):
            return self._copy(op, b)
        return self._computation(op, b)

    def _repeated(self, op: Operation, old: Region, b: Builder) -> None:
        """Lower a repeat, accumulation or action to one with the same structure. A value without a
        node (a constant) is not passed. A repeat becomes two if the rank is idle in the last
        iterations."""
        if self._known is not None and isinstance(op.definition, ActionOp):
            self._action(op, old, b, self._known)
            return
        busy = {o.definition.active(o): o for o in old.ops} if op.has(Repeats) else {}
        limits = {limit: o for limit, o in busy.items() if limit is not None}
        if not limits:
            self._loop(op, old, b, {}, op.operands)
            return
        (limit, culprit), *others = limits.items()
        if others or len(op.operands) != carried(op) or op.flag("reverse"):
            raise culprit.error(
                f"'{culprit.name}' in plain order stands in a repeat that does more than carry",
                remedy="put the steps of a ring into a repeat of their own, or use zigzag order",
            )
        self._loop(op, old, b, {"count": limit}, op.operands)
        self._idle = True
        self._loop(op, old, b, {"count": op.expr("count") - limit}, op.results)
        self._idle = False

    def _loop(
        self,
        op: Operation,
        old: Region,
        b: Builder,
        changed: dict[str, Expr],
        inputs: Sequence[Value],
    ) -> None:
        new = self._repeating(op, b, self._made(inputs), changed)
        region = new.make_region()
        for arg, value in zip(old.args, inputs, strict=True):
            if value in self._nodes:
                self._nodes[arg] = region.add_arg(arg.name, NODE, arg.loc)
        self._region(old, region, "et.yield")
        self._end(op, new)

    def _action(self, op: Operation, body: Region, b: Builder, known: SharedActions) -> None:
        """Lower an action to a region that takes captured nodes as arguments; equal actions share
        it."""
        if (shared := known.like(body, self._nodes, self._more)) is not None:
            region, nodes = shared
            new = self._repeating(op, b, nodes, {})
            new.region = region
            self._end(op, new)
            return
        taken = taken_by(body, self._nodes)
        nodes = nodes_of(taken)
        new = self._repeating(op, b, nodes, {})
        region = new.make_region()
        args = {node: region.add_arg(node.name, NODE, node.loc) for node in nodes}
        self._nodes |= {value: args[node] for value, node in taken.items() if node is not None}
        self._region(body, region, "et.yield")
        self._nodes |= {value: node for value, node in taken.items() if node is not None}
        self._end(op, new)
        if self._more.keys().isdisjoint(taken):
            known.add(body, region, taken)

    def _repeating(
        self, op: Operation, b: Builder, inputs: Sequence[Value], changed: dict[str, Expr]
    ) -> Operation:
        """A repeat, accumulation or action without its region."""
        name = "et." + op.name.partition(".")[2]
        known = b.registry[name].params_by_name
        attrs = {n: v for n, v in op.attrs.items() if n in known and n != "phase"}
        return b.op(name, inputs, {**attrs, **changed}, types=(), symbol=kind_of(op))

    def _end(self, op: Operation, new: Operation) -> None:
        for value in op.results:
            self._nodes[value] = new.add_result(value.name, NODE, value.loc)

    def _sits_out(self, op: Operation) -> bool:
        """Whether the op is left out because the rank is idle in these iterations. A sum to which
        it would add keeps its node."""
        if not self._idle or op.has(Free) or not op.results:
            return False
        lost = any(v not in self._nodes and v.region is op.parent for v in op.operands)
        if op.definition.active(op) is None and not lost:
            return False
        for result in op.results:
            slot = op.definition.reuses(op, result.index)
            self._nodes.pop(result, None)
            if slot is not None:
                self._nodes[result] = self._nodes[op.operands[slot]]
        return True

    def _computation(self, op: Operation, b: Builder) -> Value:
        rule = op.definition.rule(op)
        if rule is not None and (gathers := own_gathers(op, rule)):
            return self._in_steps(op, rule, gathers, b)
        beside = self._beside_gather([op], b)
        if beside is not None:
            return beside
        sums = sum_of(op) if self._sums_in_steps else None
        if rule is not None and sums is not None and self._runs_beside(sums):
            return self._before_sum(op, rule, sums, b)
        attrs, name, deps = self._costs(op), op.results[0].name, self._deps(op.operands)
        if op.flag("decoded"):
            (own, attrs), weight = decoding(op, attrs), self._deps(op.operands[1:])
            deps.append(b.value("et.comp", weight, own, hint=op.results[1].name))
        deps += self._turned.before([op], b, self._deps)
        return b.value("et.comp", deps, attrs, hint=name)

    def _kernel(self, ops: Sequence[Operation], b: Builder) -> None:
        """Lower several computations to one node, at the place of the first."""
        inside = {result for op in ops for result in op.results}
        given = [viewed(v) for op in ops for v in op.operands if viewed(v) not in inside]
        deps = list(dict.fromkeys(self._deps(given)))
        node = self._beside_gather(ops, b)
        if node is None:
            attrs = self._attributes(ops)
            deps += self._turned.before(ops, b, self._deps)
            node = b.value("et.comp", deps, attrs, hint=ops[-1].results[0].name)
        self._nodes.update(dict.fromkeys(inside, node))

    def _attributes(self, ops: Sequence[Operation]) -> dict[str, RawAttr]:
        """The attributes of the node for the computations of a kernel."""
        if len(ops) == 1:
            return self._costs(ops[0])
        forms = [str(self._costs(op).get("form", "")) for op in ops]
        product = next((form for form in forms if form in (*EXPANDING, EXPERTS, INDEXER)), "")
        form = product or (forms[0] if forms[0].startswith(CONTINUES) else "")
        return fused_attributes(ops, form)

    def _in_steps(
        self, op: Operation, rule: Rule, gathers: Sequence[OwnGather], b: Builder
    ) -> Value:
        """Lower an op that gathers an operand over n ranks itself, in n steps. The first n-1 steps
        overlap with the collective and use the parts that have arrived. The last step uses the part
        that arrives last."""
        deps, steps = self._deps(op.operands), axis_size(common_axes(op, gathers))
        *names, early, late = names_of_nodes(op, gathers)
        arrived = [self._own_gather(op, g, n, b) for g, n in zip(gathers, names, strict=True)]
        ((factor,), *_) = (rule.operands[g.operand][g.dim] for g in gathers)
        last, first = self._parts(op, factor, steps)
        begun = b.value("et.comp", deps, {**first, "out": ZERO}, hint=early)
        return b.value("et.comp", [begun, *arrived], last, hint=late)

    def _beside_gather(self, ops: Sequence[Operation], b: Builder) -> Value | None:
        """The node of a kernel that starts before its operand is gathered; None for others."""
        gathered = gathered_for(ops, ACTIVATIONS) if self._gathers_in_steps else None
        if gathered is None or not self._runs_beside(gathered.gather):
            return None
        return self._early.node(ops, gathered, b, self._deps, self._attributes)

    def _before_sum(self, op: Operation, rule: Rule, sums: Operation, b: Builder) -> Value:
        """Lower a product whose result is added up over n ranks, in n steps along the dimension
        that a reduce_scatter splits, else along that of the tokens. The sum overlaps with all steps
        but the first."""
        steps, shape = axis_size(sums.names("over")), rule.results[0]
        scatters = isinstance(sums.definition, ReduceScatter)
        along = shape[operand_dim(sums, 0) if scatters else min(1, len(shape) - 1)][0]
        first, rest = self._parts(op, along, steps)
        name, deps = op.results[0].name, self._deps(op.operands)
        begun = b.value("et.comp", deps, {**first, "out": ZERO}, hint=f"{name}_first")
        done = b.value("et.comp", [begun], rest, hint=name)
        self._begun[done] = begun
        return done

    def _own_gather(self, op: Operation, gather: OwnGather, name: str, b: Builder) -> Value:
        x = op.operands[gather.operand]
        attrs = _message("all_gather", gather.over, gather.whole(op), x)
        return b.value("et.coll", self._deps([x]), attrs, hint=name)

    def _copy(self, op: Operation, b: Builder) -> Value:
        moved = op.definition.bytes_touched(op)
        attrs: dict[str, RawAttr] = {"to": op.result.tensor.memory, "bytes": moved}
        if is_parameter(op.operands[0]) and is_repeated(op):
            attrs["ahead"] = ahead_of(op)
        return b.value("et.copy", self._deps(op.operands), attrs, hint=op.result.name)

    def _message(self, op: Operation, b: Builder) -> None:
        """Lower a send or a receive, with the bytes of one rank."""
        ends = op.results or op.operands
        of_plan = ("phase", "stays")
        attrs: dict[str, RawAttr] = {n: v for n, v in op.attrs.items() if n not in of_plan}
        attrs["bytes"] = total(v.tensor.local_bytes for v in ends)
        attrs["dtype"] = ends[0].tensor.dtype
        name = "et." + op.name.partition(".")[2]
        node = b.value(name, self._deps(op.operands), attrs, hint=ends[0].name)
        for result in op.results:
            self._nodes[result] = node

    def _cross(self, op: Operation, b: Builder) -> None:
        """Lower a transfer between pods: one message for each rank of the other pod that a rank
        meets. A value has arrived when all its messages have. Messages into a new buffer, or of a
        value that is yielded, are received one after the other, so that the node of the last one
        stands for the value. The second half of a cache does not wait for the first one."""
        sends = not op.results
        other = op.operands[0].producer if op.operands else None
        halved = other is not None and isinstance(other.definition, TakeOver)
        arrived = self._deps(op.operands) if halved else []
        attrs: dict[str, RawAttr] = {
            "pod": op.text("to" if sends else "source"),
            "bytes": message_bytes(op),
            "dtype": end_type(op).dtype,
            "channel": op.integer("stream"),
            "streams": op.integer("streams"),
        }
        attrs |= {p.name: op.attrs[p.name] for p in BY_LAYER if p.name in op.attrs}
        name = op.operands[0].name if sends else op.result.name
        deps = self._deps(other.operands if other is not None and halved else op.operands)
        end = "et.send" if sends else "et.recv"
        first, ways = op.integer("first", 0), op.integer("ways")
        if "shares" in op.attrs:
            attrs["ways"] = ways
        yielded = any(user.has(Terminates) for r in op.results for user, _ in r.uses)
        in_turn = not sends and (not op.operands or yielded)
        nodes: list[Value] = []
        turns = op.integer("turns", 1)
        for way in sorted(range(ways), key=lambda way: way % turns):
            turn = way % turns
            own: dict[str, RawAttr] = {"by": first + way, **({"turn": turn} if turn else {})}
            before = nodes[-1:] if in_turn else []
            nodes.append(b.value(end, [*deps, *before], {**attrs, **own}, hint=name))
        for result in op.results:
            self._nodes[result] = nodes[-1]
            self._more[result] = [] if in_turn else [*arrived, *nodes[:-1]]

    def _shift(self, op: Operation, definition: CollectivePermute, b: Builder) -> Value:
        """Lower a shift along a ring: send and receive are posted together and overlap with the
        computation on the current part, so two buffers suffice."""
        deps, name = self._deps(op.operands), op.results[0].name
        attrs: dict[str, RawAttr] = {
            "over": one_axis(op),
            "by": op.expr("by", ONE),
            "bytes": definition.buffer(op),
            "dtype": op.operands[0].tensor.dtype,
            "channel": self._channels.setdefault(op, len(self._channels)),
            "overlapped": True,
        }
        b.op("et.send", deps, attrs, names=[name])
        return b.value("et.recv", deps, attrs, hint=name)

    def _collective(self, op: Operation, definition: Collective, b: Builder) -> Value:
        kind, over = op.name.partition(".")[2], op.names("over")
        attrs = _message(kind, over, definition.buffer(op), op.results[0])
        if "pairs" in op.attrs:
            attrs["pairs"] = op.text("pairs")
        if "bucket" in op.attrs and all(v in self._nodes for v in op.operands):
            parts = tuple(v.tensor.local_bytes for v in op.operands)
            attrs |= {"bucket": op.expr("bucket"), "parts": parts}
        if all(map(is_parameter, op.operands)) and is_repeated(op):
            attrs["ahead"] = ahead_of(op)
            if op.integer("kept", 0):
                attrs["kept"] = op.expr("kept")
        if self._direct and isinstance(definition, AllToAll):
            attrs |= dealt(op, each=self._decodes)
        if op.phase in ACTIVATIONS and set(op.names("over")) <= self._blocking:
            attrs["blocking"] = True
        deps = self._deps(op.operands)
        if late := [node for node in deps if node in self._begun and reduces(op)]:
            self._more.update(dict.fromkeys(op.results, late))
            deps = [self._begun.get(node, node) for node in deps]
        return b.value("et.coll", deps, attrs, hint=op.results[0].name)

    def _runs_beside(self, op: Operation) -> bool:
        """Whether a collective of activations overlaps with computations."""
        return op.phase in ACTIVATIONS and not set(op.names("over")) <= self._blocking


def _message(kind: str, over: tuple[str, ...], whole: Expr, like: Value) -> dict[str, RawAttr]:
    return {"kind": kind, "group": over, "bytes": whole, "dtype": like.tensor.dtype}
