"""The program of a rank class: the nodes of one rank, in order, from a lowered and bound module.

Repeats and accumulations are unrolled here and only here. Nodes refer to each other as objects;
identifiers and the control order of the two streams come last, when the order is final.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import Expr, evaluate
from stagec.ir.module import Module
from stagec.ir.replay import replays
from stagec.support.diagnostics import error

#: More calls than this in one reduction are a mistake: no consumer takes them.
MOST_BUCKETS = 100_000
#: More nodes per rank than this are a mistake: no consumer takes them.
MOST_NODES = 20_000_000


@dataclass(slots=True, eq=False)
class Node:
    """One node: a computation (`flops`, `size` bytes touched) or a collective (`size` bytes of the
    full buffer)."""

    kind: str
    name: str
    phase: str
    size: int
    flops: int = 0
    matmul: int = 0
    out: int = 0
    group: tuple[str, ...] = ()
    blocking: bool = False
    deps: list[Node] = field(default_factory=list["Node"])
    after: list[Node] = field(default_factory=list["Node"])
    id: int = 0

    @property
    def is_collective(self) -> bool:
        """Whether it communicates."""
        return bool(self.group)


@dataclass(slots=True)
class Stack:
    """The nodes of a stacked value, one for each iteration, and the one that is done last."""

    items: list[Ref]
    last: int


Ref = Node | Stack | None


@dataclass(slots=True)
class Program:
    """The nodes of a class in issue order, identified from 1."""

    name: str
    nodes: list[Node]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The axes over which its collectives go, in order of first use."""
        return list(dict.fromkeys(n.group for n in self.nodes if n.is_collective))


def build_program(module: Module) -> Program:
    """Unroll the module's et.graph with the known sizes. Raises `DiagnosticError` if a size is
    open."""
    graphs = module.ops("et.graph")
    if len(graphs) != 1:
        raise error(
            f"module @{module.name} has {len(graphs)} et.graphs, expected one",
            module.root.loc,
            remedy="run 'lower-to-trace' first",
        )
    env = module.env
    missing = sorted(
        {
            s
            for op in graphs[0].body.walk()
            for v in op.attrs.values()
            if isinstance(v, Expr)
            for s in v.symbols
        }
        - env.keys()
    )
    if missing:
        raise error(
            f"no value for {', '.join(missing)}",
            graphs[0].loc,
            remedy=module.how_to_set(missing),
        )
    count = _count(graphs[0].body, env)
    if count > MOST_NODES:
        raise error(
            f"the program has {count:,} nodes per rank, expected at most {MOST_NODES:,}",
            graphs[0].loc,
            remedy="choose fewer layers or microbatches",
        )
    unroller = _Unroller(env)
    unroller.region(graphs[0].body)
    nodes = unroller.finish()
    if not nodes:
        raise error(
            "the program has no nodes", graphs[0].loc, remedy="compute something in the function"
        )
    return Program("stage0", nodes)


def _count(region: Region, env: dict[str, int]) -> int:
    """Nodes of a region, buckets not cut."""
    return sum(
        evaluate(op.expr("count"), env) * _count(op.region, env) if op.region is not None else 1
        for op in region.ops[:-1]
    )


@dataclass(slots=True)
class _Bucketed:
    """A collective cut into buckets; its place is where its pieces become ready."""

    nodes: list[Node]
    ready: list[Node | None]


class _Unroller:
    def __init__(self, env: dict[str, int]) -> None:
        self._env = env
        self._refs: dict[Value, Ref] = {}
        self._order: list[Node] = []
        self._bucketed: list[_Bucketed] = []
        self._prefix = ""
        self._replays = True
        self._costs: dict[Operation, dict[str, int]] = {}

    # -- order -------------------------------------------------------------------------------------

    def finish(self) -> list[Node]:
        """All nodes in their final order, with identifiers and control dependencies."""
        order = self._with_buckets()
        previous: dict[bool, Node] = {}
        waiting: Node | None = None  # a blocking collective that no computation follows yet
        for number, node in enumerate(order, 1):
            node.id = number
            if node.blocking:
                node.after += [previous[False]] if False in previous else []
                waiting = node
            elif waiting is not None and not node.is_collective:
                node.after.append(waiting)
                waiting = None
            before = previous.get(node.is_collective)
            if before is not None:
                node.after.append(before)
            previous[node.is_collective] = node
        for node in order:
            node.deps = list(dict.fromkeys(node.deps))
            node.after = [a for a in dict.fromkeys(node.after) if a not in node.deps]
        return order

    def _with_buckets(self) -> list[Node]:
        """Each bucket stands right after the node that completes it."""
        waiting: dict[Node | None, list[Node]] = {}
        for bucketed in self._bucketed:
            for node, ready in zip(bucketed.nodes, bucketed.ready, strict=True):
                waiting.setdefault(ready, []).append(node)
        order: list[Node] = []
        pending = [*reversed(self._order), *reversed(waiting.get(None, []))]
        while pending:  # a bucket may in turn complete another one
            node = pending.pop()
            order.append(node)
            pending += reversed(waiting.get(node, []))
        return order

    # -- regions -----------------------------------------------------------------------------------

    def region(self, region: Region, skip: frozenset[Operation] = frozenset()) -> list[Ref]:
        """Emit the nodes of a region; what it yields."""
        for op in region.ops[:-1]:
            if op not in skip:
                self._op(op)
        return [self._refs.get(v) for v in region.terminator.operands]

    def _op(self, op: Operation) -> None:
        if op.name == "et.recall":
            self._refs[op.result] = self._refs.get(op.operands[0 if self._replays else 1])
            return
        if op.region is None:
            node = self._collective(op) if op.name == "et.coll" else self._computation(op)
            self._refs[op.result] = node
            return
        run: Callable[[Operation, Region], list[Ref]] = (
            self._repeat if op.name == "et.repeat" else self._accumulate
        )
        self._refs.update(zip(op.results, run(op, op.region), strict=True))

    def _number(self, op: Operation, name: str) -> int:
        known = self._costs.setdefault(op, {})
        if name not in known:
            known[name] = evaluate(op.expr(name), self._env) if name in op.attrs else 0
        return known[name]

    def _repeat(self, op: Operation, region: Region) -> list[Ref]:
        count, carry = self._number(op, "count"), op.integer("carry", 1)
        early = frozenset(o for o in region.ops if "ahead" in o.attrs)
        ahead = max((self._number(o, "ahead") for o in early), default=0)
        inputs = [self._refs.get(v) for v in op.operands]
        carried, prefix, outer = inputs[:carry], self._prefix, self._replays
        order = range(count - 1, -1, -1) if op.flag("reverse") else range(count)
        stacks: list[list[Ref]] = [[None] * count for _ in range(len(op.results) - carry)]
        ready: list[dict[Value, Ref]] = []
        for step, i in enumerate(order):
            while len(ready) < min(step + ahead + 1, count):
                ready.append(self._prefetch(early, prefix, order[len(ready)], len(ready)))
            self._prefix = f"{prefix}L{i}/"
            self._refs.update(
                zip(region.args, carried + [_item(r, i) for r in inputs[carry:]], strict=True)
            )
            self._refs.update(ready[step])
            self._replays = replays(op, i)
            again = frozenset(o for o in region.ops if o.phase == "recompute")
            yielded = self.region(region, early if self._replays else early | again)
            carried = yielded[:carry]
            for stack, ref in zip(stacks, yielded[carry:], strict=True):
                stack[i] = ref
        self._prefix, self._replays = prefix, outer
        last = order[-1] if count else 0
        return carried + [Stack(s, last) if any(r is not None for r in s) else None for s in stacks]

    def _prefetch(
        self, early: frozenset[Operation], prefix: str, i: int, step: int
    ) -> dict[Value, Ref]:
        """Issue the parameter gathers of iteration i, the `step`th that runs, now: iterations
        early, not at the start of the step."""
        found: dict[Value, Ref] = {}
        last = next((n for n in reversed(self._order) if not n.is_collective), None)
        self._prefix = f"{prefix}L{i}/"
        for op in sorted(early, key=lambda o: o.position()):
            if step < self._number(op, "kept"):
                found[op.result] = None  # still there from forward, for whose end all waits
                continue
            node = self._collective(op)
            if isinstance(node, Node) and last is not None:
                node.after.append(last)
            found[op.result] = node
        return found

    def _accumulate(self, op: Operation, region: Region) -> list[Ref]:
        prefix, yielded = self._prefix, list[Ref]()
        inputs = [self._refs.get(v) for v in op.operands]
        for i in range(self._number(op, "count")):
            self._prefix = f"{prefix}mb{i}/"
            self._refs.update(zip(region.args, inputs, strict=True))
            yielded = self.region(region)
        self._prefix = prefix
        return yielded  # sums are complete with the last microbatch

    # -- nodes -------------------------------------------------------------------------------------

    def _deps(self, op: Operation) -> list[Node]:
        return [n for v in op.operands if (n := _last(self._refs.get(v))) is not None]

    def _name(self, op: Operation) -> str:
        return f"{op.phase}/{self._prefix}{op.result.name}"

    def _computation(self, op: Operation) -> Node:
        node = Node(
            op.text("kind"),
            self._name(op),
            op.phase,
            self._number(op, "bytes"),
            self._number(op, "flops"),
            self._number(op, "matmul"),
            self._number(op, "out"),
            deps=self._deps(op),
        )
        self._order.append(node)
        return node

    def _collective(self, op: Operation) -> Ref:
        size, bucket = self._number(op, "bytes"), self._number(op, "bucket")
        if bucket and size > bucket:
            return self._buckets(op, bucket)
        node = Node(
            op.text("kind"),
            self._name(op),
            op.phase,
            size,
            group=op.names("group"),
            blocking=op.flag("blocking"),
            deps=self._deps(op),
        )
        self._order.append(node)
        return node

    def _buckets(self, op: Operation, bucket: int) -> Ref:
        """Cut a reduction into calls of `bucket` bytes, in the order of their readiness."""
        count = -(-self._number(op, "bytes") // bucket)
        if count > MOST_BUCKETS:
            raise error(
                f"buckets of {bucket:,} bytes cut a reduction into {count:,} calls",
                op.loc,
                remedy=f"choose larger ones: at most {MOST_BUCKETS:,} calls are written",
            )
        pieces: list[tuple[int, Node | None]] = []
        parts = op.attrs.get("parts")
        sizes = (
            [evaluate(p, self._env) for p in parts if isinstance(p, Expr)]
            if isinstance(parts, tuple)
            else []
        )
        for value, size in zip(op.operands, sizes, strict=True):
            pieces += _pieces(self._refs.get(value), size)
        rank = {node: i for i, node in enumerate(self._order)}
        pieces.sort(key=lambda p: rank.get(p[1], -1) if p[1] is not None else -1)
        cut = _Bucketed([], [])
        for number, (size, ready) in enumerate(_cut(pieces, bucket)):
            deps = [ready] if ready is not None else []
            cut.nodes.append(
                Node(
                    op.text("kind"),
                    f"{self._name(op)}.{number}",
                    op.phase,
                    size,
                    group=op.names("group"),
                    deps=deps,
                )
            )
            cut.ready.append(ready)
        self._bucketed.append(cut)
        return cut.nodes[-1]


def _item(ref: Ref, i: int) -> Ref:
    return ref.items[i] if isinstance(ref, Stack) else ref


def _last(ref: Ref) -> Node | None:
    while isinstance(ref, Stack):
        ref = ref.items[ref.last]
    return ref


def _pieces(ref: Ref, size: int) -> list[tuple[int, Node | None]]:
    """The bytes of a value with the node that completes each part."""
    if not isinstance(ref, Stack):
        return [(size, ref)]
    return [(size // len(ref.items), _last(item)) for item in ref.items]


def _cut(pieces: Sequence[tuple[int, Node | None]], bucket: int) -> list[tuple[int, Node | None]]:
    """Buckets filled in order; each is ready with its last piece."""
    found: list[tuple[int, Node | None]] = []
    filled, ready = 0, None
    for size, node in pieces:
        ready = node
        filled += size
        while filled >= bucket:
            found.append((bucket, ready))
            filled -= bucket
    return [*found, (filled, ready)] if filled else found
