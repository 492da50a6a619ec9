"""Tensors of a program with memory events, for ASTRA-sim's tracker of local memory.

The tracker counts a tensor from the start of the node that writes it to the end of the last node
that reads it (workload/LocalMemUsageTracker.cc). A tensor is written once. So the bytes that a node
allocates become a tensor that it writes, and the bytes that it frees become tensors that it reads,
the most recently written ones first:

    alloc   4 2 2       node 1 writes a (4), node 2 writes b (2), node 3 writes c (2)
    free    0 4 0       node 2 reads a

A tensor that is freed in parts becomes several tensors, `a.0` and `a.1`. A node that reads a tensor
must depend on the node that writes it, since a simulator could run it first otherwise. If a node
frees more bytes than the tensors that it can read contain, the rest is freed by the next node that
can read more. A node cannot read a tensor that it writes itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagec.program.nodes import Events, Program
from stagec.support.diagnostics import error

#: Names of tensors, with their bytes.
Tensors = list[tuple[str, int]]
#: The most nodes of a program: the dependencies of each node are a set with a bit per node.
MOST_NODES = 50_000
#: The tensor for the static bytes, which exists from start to end.
_STATIC = "static"


@dataclass(frozen=True)
class TensorLists:
    """The tensors that each node reads and writes, and the most bytes in use while the nodes run
    one after the other."""

    inputs: Sequence[Tensors]
    outputs: Sequence[Tensors]
    peak: int

    def attributes(self, node: int) -> dict[str, tuple[str, ...]]:
        """The attributes of the node with this identifier: lists that alternate names and bytes."""
        lists = {"inputs": self.inputs[node - 1], "outputs": self.outputs[node - 1]}
        return {
            name: tuple(text for tensor, size in pairs for text in (tensor, str(size)))
            for name, pairs in lists.items()
        }


@dataclass(slots=True)
class _Piece:
    """The bytes of a tensor that are not yet freed, the index of the node that writes it, and the
    parts so far."""

    name: str
    writer: int
    size: int
    parts: Tensors = field(default_factory=list[tuple[str, int]])

    def part(self, size: int) -> tuple[str, int]:
        """Separate a part of `size` bytes."""
        self.parts.append((f"{self.name}.{len(self.parts)}", size))
        self.size -= size
        return self.parts[-1]


def tensors_of(program: Program) -> TensorLists:
    """The tensors of a program. Raises `DiagnosticError` for one without memory events, and for
    more than `MOST_NODES`."""
    events, count = program.events, len(program)
    if events is None:
        raise error("tensors need memory events", remedy="compile with --tensor-names")
    if count > MOST_NODES:
        raise error(
            f"a rank has {count:,} nodes; tensors can be named up to {MOST_NODES:,}",
            remedy="choose fewer layers, or --granularity layer",
        )
    inputs: list[Tensors] = [[] for _ in range(count)]
    outputs: list[Tensors] = [[] for _ in range(count)]
    for piece in _pieces(program, events, inputs):
        if piece.size:  # not freed
            piece.part(piece.size)
        outputs[piece.writer] += piece.parts
    if events.static and count:
        for i in {0, count - 1}:
            inputs[i].append((_STATIC, events.static))
    return TensorLists(inputs, outputs, events.static + _peak(inputs, outputs))


def _pieces(program: Program, events: Events, inputs: Sequence[Tensors]) -> list[_Piece]:
    """The tensors that nodes write. Those that they read are added to `inputs`."""
    before = _before(program)
    alive: list[_Piece] = []
    pieces: list[_Piece] = []
    owed = 0
    for i, node in enumerate(program.nodes):
        owed += int(events.free[i])
        owed -= _give_back(owed, alive, before[i], inputs[i])
        if inputs[i]:
            alive = [piece for piece in alive if piece.size]
        if events.alloc[i]:
            made = _Piece(f"{node.name or 'node'}#{node.id}", i, int(events.alloc[i]))
            alive.append(made)
            pieces.append(made)
    return pieces


def _give_back(owed: int, alive: Sequence[_Piece], before: int, read: Tensors) -> int:
    """Read tensors of up to `owed` bytes from writers in the bit set `before`. Returns the bytes
    that were read."""
    left = owed
    for piece in reversed(alive):
        if not left:
            break
        if before >> piece.writer & 1:
            read.append(piece.part(min(left, piece.size)))
            left -= read[-1][1]
    return owed - left


def _before(program: Program) -> list[int]:
    """For each node, a bit set of all nodes that it depends on, directly or indirectly."""
    sets: list[int] = []
    edges: list[int] = program.edges.tolist()
    starts: list[int] = program.starts.tolist()
    for i in range(len(program)):
        bits = 0
        for edge in edges[starts[i] : starts[i + 1]]:
            bits |= sets[edge - 1] | 1 << (edge - 1)
        sets.append(bits)
    return sets


def _peak(inputs: Sequence[Tensors], outputs: Sequence[Tensors]) -> int:
    """The most bytes of tensors, without the static ones, while the nodes run one after the
    other."""
    alive = most = 0
    for read, written in zip(inputs, outputs, strict=True):
        alive += sum(size for _, size in written)
        most = max(most, alive)
        alive -= sum(size for name, size in read if name != _STATIC)
    return most
