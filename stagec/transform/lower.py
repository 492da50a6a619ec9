"""Lowering: the partitioned function becomes an et.graph whose ops are the nodes of a trace.

Only here are sizes divided by axis sizes: FLOPs and bytes become those of one rank, as expressions.
"""

from __future__ import annotations

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import const, total
from stagec.ir.module import Module, is_parameter
from stagec.ir.opdef import factor_sizes
from stagec.ir.types import NODE, axis_size
from stagec.ir_spec.ops.comm import Collective
from stagec.sharding.strategy import read_strategy


def lower_to_trace(module: Module) -> None:
    """Replace the main function by an et.graph, in place."""
    func = module.main
    root = module.root.body
    mesh = module.mesh
    parameters = total(p.tensor.elements for p in module.parameters())
    b = Builder(module.registry, root, func.position(), loc=func.loc)
    graph = b.op(
        "et.graph",
        (),
        {"ranks": axis_size(mesh.axes) if mesh else const(1), "parameters": parameters},
        types=(),
        symbol=func.symbol,
    )
    _Lowering(module).function(func.body, graph.make_region())
    func.erase()


#: Phases whose collectives move activations and their gradients.
_ACTIVATIONS = ("forward", "backward", "recompute")


class _Lowering:
    def __init__(self, module: Module) -> None:
        self._registry = module.registry
        strategy = read_strategy(module)
        self._prefetch, self._copy_nodes = strategy.prefetch, strategy.copy_nodes
        self._blocking = frozenset(strategy.blocking)
        self._nodes: dict[Value, Value] = {}

    def function(self, body: Region, new: Region) -> None:
        for arg in body.args:
            self._nodes[arg] = new.add_arg(arg.name, NODE, arg.loc)
        new.returns = tuple(NODE for _ in body.terminator.operands)
        self._region(body, new, "et.return")

    def _region(self, old: Region, new: Region, end: str) -> None:
        for op in old.ops[:-1]:
            self._op(op, Builder(self._registry, new, loc=op.loc, phase=op.phase))
        last = old.terminator
        Builder(self._registry, new, loc=last.loc, phase=last.phase).op(
            end, self._deps(last.operands), types=()
        )

    def _deps(self, values: tuple[Value, ...]) -> list[Value]:
        return [self._nodes[v] for v in values if v in self._nodes]

    def _op(self, op: Operation, b: Builder) -> None:
        if op.region is not None:
            self._repeated(op, op.region, b)
        elif op.definition.recalls:
            again, stashed = self._deps(op.operands)
            self._nodes[op.result] = b.value("et.recall", [again, stashed], hint=op.result.name)
        elif op.definition.free or not (op.definition.computes or self._copy_nodes):
            for result in op.results:  # a view: whoever uses it depends on what it views
                if (
                    op.operands
                    and op.operands[min(result.index, len(op.operands) - 1)] in self._nodes
                ):
                    self._nodes[result] = self._nodes[
                        op.operands[min(result.index, len(op.operands) - 1)]
                    ]
        elif op.results:
            if isinstance(op.definition, Collective):
                node = self._collective(op, op.definition, b)
            else:
                node = self._computation(op, b)
            for result in op.results:
                self._nodes[result] = node

    def _repeated(self, op: Operation, old: Region, b: Builder) -> None:
        """Repeat and accumulate keep their shape; what is no node (a constant) is not handed
        over."""
        name = "et.repeat" if op.definition.carries else "et.accumulate"
        attrs: dict[str, RawAttr] = {
            n: v
            for n, v in op.attrs.items()
            if n in ("count", "carry", "reverse", "replay_first", "replay_every")
        }
        new = b.op(name, self._deps(op.operands), attrs, types=())
        region = new.make_region()
        for arg, value in zip(old.args, op.operands, strict=True):
            if value in self._nodes:
                self._nodes[arg] = region.add_arg(arg.name, NODE, arg.loc)
        self._region(old, region, "et.yield")
        for value in op.results:
            self._nodes[value] = new.add_result(value.name, NODE, value.loc)

    def _computation(self, op: Operation, b: Builder) -> Value:
        rule = op.definition.rule(op)
        sizes = factor_sizes(op, rule, local=True) if rule is not None else {}
        matmul = op.definition.matmul_flops(op, sizes)
        attrs: dict[str, RawAttr] = {
            "kind": op.name.partition(".")[2],
            "flops": op.definition.flops(op, sizes),
        }
        if matmul != 0:
            attrs["matmul"] = matmul
        attrs["bytes"] = op.definition.bytes_touched(op)
        attrs["out"] = total(r.tensor.local_bytes for r in op.results)
        return b.value("et.comp", self._deps(op.operands), attrs, hint=op.results[0].name)

    def _collective(self, op: Operation, definition: Collective, b: Builder) -> Value:
        attrs: dict[str, RawAttr] = {
            "kind": op.name.partition(".")[2],
            "group": op.names("over"),
            "bytes": definition.buffer(op),
            "dtype": op.operands[0].tensor.dtype,
        }
        if "bucket" in op.attrs:
            attrs["bucket"] = op.expr("bucket")
            attrs["parts"] = tuple(v.tensor.local_bytes for v in op.operands)
        if all(map(is_parameter, op.operands)) and _is_repeated(op):
            attrs["ahead"] = self._prefetch
            if op.integer("kept", 0):
                attrs["kept"] = op.expr("kept")
        if op.phase in _ACTIVATIONS and set(op.names("over")) <= self._blocking:
            attrs["blocking"] = True
        return b.value("et.coll", self._deps(op.operands), attrs, hint=op.results[0].name)


def _is_repeated(op: Operation) -> bool:
    """Whether the op is in the region of a repeat itself."""
    owner = op.parent_op
    return owner is not None and owner.definition.carries
