"""Tensors of a program with memory events: what ASTRA-sim's tracker of local memory reads.

The tracker counts a tensor from the start of the node that writes it to the end of the last node
that reads it (workload/LocalMemUsageTracker.cc). A name is written once. So what a node adds is a
tensor that it writes, and what it gives back are tensors that it reads, those written last first:

    alloc   4 2 2       node 1 writes a (4), node 2 writes b (2), node 3 writes c (2)
    free    0 4 0       node 2 reads a

A tensor that is given back in parts is several, `a.0` and `a.1`. What reads a tensor depends on the
node that writes it, or else a simulator could read it first; so bytes wait for the next node that
does, if a node gives back more than such tensors hold. Nor can a node read what it writes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagec.program.nodes import Events, Program
from stagec.support.diagnostics import error

#: Names and bytes.
Tensors = list[tuple[str, int]]
#: Nodes of a program: what each depends on is a set of as many bits.
MOST_NODES = 50_000
#: All that is there from start to end.
_STATIC = "static"


@dataclass(frozen=True)
class TensorLists:
    """What each node reads and writes, and the most bytes while the nodes run one after the
    other."""

    inputs: Sequence[Tensors]
    outputs: Sequence[Tensors]
    peak: int

    def attributes(self, node: int) -> dict[str, tuple[str, ...]]:
        """The attributes of the node with this identifier: names and bytes in turn."""
        lists = {"inputs": self.inputs[node - 1], "outputs": self.outputs[node - 1]}
        return {
            name: tuple(text for tensor, size in pairs for text in (tensor, str(size)))
            for name, pairs in lists.items()
        }


@dataclass(slots=True)
class _Piece:
    """What is left of a tensor, the node that writes it (from 0), and the parts so far."""

    name: str
    writer: int
    size: int
    parts: Tensors = field(default_factory=list[tuple[str, int]])

    def part(self, size: int) -> tuple[str, int]:
        """Cut off so many bytes."""
        self.parts.append((f"{self.name}.{len(self.parts)}", size))
        self.size -= size
        return self.parts[-1]


def tensors_of(program: Program) -> TensorLists:
    """The tensors of a program. Raises `DiagnosticError` for one without memory events, and for too
    many nodes."""
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
        if piece.size:  # what stays
            piece.part(piece.size)
        outputs[piece.writer] += piece.parts
    if events.static and count:
        for i in {0, count - 1}:
            inputs[i].append((_STATIC, events.static))
    return TensorLists(inputs, outputs, events.static + _peak(inputs, outputs))


def _pieces(program: Program, events: Events, inputs: Sequence[Tensors]) -> list[_Piece]:
    """What each node adds; what nodes give back is put into `inputs`."""
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
    """Read tensors of so many bytes, of writers that stand `before`; the bytes of those found."""
    left = owed
    for piece in reversed(alive):
        if not left:
            break
        if before >> piece.writer & 1:
            read.append(piece.part(min(left, piece.size)))
            left -= read[-1][1]
    return owed - left


def _before(program: Program) -> list[int]:
    """For each node the nodes that it depends on, in any number of steps, as bits."""
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
    """The most bytes of tensors but the static ones, node after node."""
    alive = most = 0
    for read, written in zip(inputs, outputs, strict=True):
        alive += sum(size for _, size in written)
        most = max(most, alive)
        alive -= sum(size for name, size in read if name != _STATIC)
    return most
