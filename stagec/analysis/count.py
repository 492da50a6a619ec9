"""Counts of a lowered module: expressions per rank and step. Each op is visited once, however often
it is repeated."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from stagec.ir.core import Operation, Region
from stagec.ir.expr import ONE, ZERO, Expr, call, const, total
from stagec.ir.kernel import MEMORY as MEMORY_BOUND
from stagec.ir.layers import stack_of
from stagec.ir.module import Module
from stagec.ir.recompute_window import is_partial, replayed
from stagec.ir.types import axis_size
from stagec.ir_spec.ops.comm import ring_rounds
from stagec.ir_spec.ops.layout import Copy
from stagec.ir_spec.ops.trace import MessageOp
from stagec.memory.timeline import BUCKETS, CACHES
from stagec.program.buckets import calls
from stagec.program.groups import GroupAxes, channel_of, group_axes
from stagec.schedule.attached import placement_of

FLOP_PHASES = ("forward", "backward", "recompute", "optimizer")
MATMUL_PHASES = ("forward", "backward", "recompute")
MEMORY = (
    *("parameters", "gradients", "optimizer", CACHES, BUCKETS, "stash", "transient", "peak"),
    "host",
)
#: A function that reads a size from an attribute of an op.
Size: TypeAlias = Callable[[Operation, str], Expr]


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """The key of collectives that are counted together."""

    op: str
    over: GroupAxes
    phase: str
    dtype: str


def group_size(group: GroupAxes) -> Expr:
    """The number of ranks of a collective."""
    return const(2) if group.mirrored else axis_size(group.axes)


@dataclass(slots=True)
class CollectiveCount:
    """The number of calls, and the bytes of the full buffer over all calls."""

    count: Expr = ZERO
    bytes: Expr = ZERO

    def wire(self, key: CollectiveKey) -> Expr:
        """The bytes that a rank sends on a ring."""
        n = group_size(key.over)
        return self.bytes * (n - 1) * ring_rounds(key.op) / n


@dataclass(frozen=True, slots=True)
class MessageKey:
    """The key of messages that are counted together; `peer` is the coordinate of the other end
    along `over`, relative to that of the rank."""

    dir: str
    over: str
    peer: Expr
    phase: str
    dtype: str


#: The terms of each sum, by the name of a table and the key in it.
_Terms: TypeAlias = dict[tuple[str, "str | CollectiveKey | MessageKey"], list[Expr]]


@dataclass(slots=True)
class Counts:
    """All counts of a rank class."""

    parameters: Expr
    flops: dict[str, Expr] = field(default_factory=dict[str, Expr])
    matmul: dict[str, Expr] = field(default_factory=dict[str, Expr])
    matmul_executed: dict[str, Expr] = field(default_factory=dict[str, Expr])
    bytes: dict[str, Expr] = field(default_factory=dict[str, Expr])  # by kind of kernel
    collectives: dict[CollectiveKey, CollectiveCount] = field(
        default_factory=dict[CollectiveKey, CollectiveCount]
    )
    memory: dict[str, Expr] = field(default_factory=dict[str, Expr])
    messages: dict[MessageKey, CollectiveCount] = field(
        default_factory=dict[MessageKey, CollectiveCount]
    )
    computations: Expr = ZERO
    communications: Expr = ZERO
    copies: dict[str, Expr] = field(default_factory=dict[str, Expr])


def lowered_graphs(module: Module) -> list[Operation]:
    """The graphs of a lowered module. Raises `DiagnosticError` if it is not lowered."""
    graphs = module.graphs
    if not graphs:
        raise module.root.error(
            "only lowered modules can be counted", remedy="run 'lower-to-trace' first"
        )
    return graphs


def count_graph(module: Module, graph: Operation, size: Size = Operation.expr) -> Counts:
    """The counts of a rank that runs a graph; `size` reads the attributes of its ops."""
    counts = Counts(graph.expr("parameters") if "parameters" in graph.attrs else ZERO)
    terms: _Terms = {}
    for op, times in weighted(module, graph, graph.body, ONE):
        if op.name == "et.comp":
            _count_computation(terms, op, times, size)
        elif op.name == "et.copy":
            terms.setdefault(("copies", op.text("to")), []).append(times)
        elif op.name == "et.coll":
            axes = group_axes(op)
            key = CollectiveKey(op.text("kind"), axes, op.phase, op.text("dtype"))
            number = calls(op) * times if "bucket" in op.attrs else times
            _count(terms, key, number, size(op, "bytes") * times)
        elif isinstance(op.definition, MessageOp):
            _count_message(terms, op, times, size)
    _sum_up(counts, terms)
    for op in module.ops("stg.memory"):
        if op.attrs.get("stages") == graph.attrs.get("stages"):
            counts.memory = {n: op.expr(n) for n in MEMORY if n in op.attrs}
    return counts


def _sum_up(counts: Counts, terms: _Terms) -> None:
    """Compute all sums. Each is built from all its terms at once, since adding them one by one is
    slow."""
    sums = {where: total(values) for where, values in terms.items()}
    counts.computations = sums.pop(("computations", ""), ZERO)
    for (table, key), value in sums.items():
        if isinstance(key, CollectiveKey):
            counts.collectives[key] = CollectiveCount(sums["count", key], sums["sent", key])
        elif isinstance(key, MessageKey):
            counts.messages[key] = CollectiveCount(sums["count", key], sums["sent", key])
        else:
            getattr(counts, table)[key] = value
    counts.communications = total(c.count for c in counts.collectives.values())


def copied(module: Module, func: Operation) -> Expr:
    """The bytes that a rank copies between device and host in a step of a function."""
    if not any(isinstance(op.definition, Copy) for op in func.body.walk()):
        return ZERO
    return total(
        op.definition.bytes_touched(op) * times
        for op, times in weighted(module, func, func.body, ONE)
        if isinstance(op.definition, Copy)
    )


def ring_bytes(size: int, members: int, op: str) -> int:
    """The bytes that a rank sends on a ring, rounded up to a whole byte."""
    steps = ring_rounds(op) * (members - 1)
    return -(-size * steps // members)


def weighted(
    module: Module, graph: Operation, region: Region, times: Expr
) -> Iterator[tuple[Operation, Expr]]:
    """Every op with the number of its executions."""
    for op in region.ops:
        if op.region is None:
            yield op, times * _share(op)
            continue
        inner = times * op.expr("count") if "count" in op.attrs else times
        if "schedule" in op.attrs:  # each copy of the model runs its part of the microbatches
            placement = placement_of(module, graph)
            inner = inner / (placement.copies if placement is not None else 1)
        yield from weighted(module, graph, op.region, inner)


def _count_computation(terms: _Terms, op: Operation, times: Expr, size: Size) -> None:
    phase = "backward" if op.phase == "gradient" else op.phase
    terms.setdefault(("computations", ""), []).append(times)
    terms.setdefault(("flops", phase), []).append(size(op, "flops") * times)
    kernel = op.text("kernel", MEMORY_BOUND)
    if "bytes" in op.attrs:
        terms.setdefault(("bytes", kernel), []).append(size(op, "bytes") * times)
    if "matmul" in op.attrs:
        executed = "matmul" if kernel == "matmul" else "flops"  # a product has no mask
        terms.setdefault(("matmul", phase), []).append(size(op, "matmul") * times)
        terms.setdefault(("matmul_executed", phase), []).append(size(op, executed) * times)


def _count(terms: _Terms, key: CollectiveKey | MessageKey, number: Expr, sent: Expr) -> None:
    terms.setdefault(("count", key), []).append(number)
    terms.setdefault(("sent", key), []).append(sent)


def _count_message(terms: _Terms, op: Operation, times: Expr, size: Size) -> None:
    way, peer = ("send", op.expr("by")) if op.name == "et.send" else ("recv", -op.expr("by"))
    key = MessageKey(way, channel_of(op)[0], peer, op.phase, op.text("dtype"))
    _count(terms, key, times, size(op, "bytes") * times)


def _share(op: Operation) -> Expr:
    """The share of the iterations of the enclosing repeat that run an op."""
    owner = op.parent_op
    if owner is None:
        return ONE
    if "kept" in op.attrs:
        count, stack = owner.expr("count"), stack_of(owner)
        if stack.order is not None:
            first = stack.turns(0)[: op.integer("kept")]
            return (count - sum(stack.members[t.member] is owner for t in first)) / count
        return call("max", [count - op.expr("kept"), ZERO]) / count
    if is_partial(owner) and op.phase == "recompute":
        return replayed(owner) / owner.expr("count")
    return ONE
