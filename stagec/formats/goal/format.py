"""The format of LogGOPSim and ATLAHS: one schedule of messages and computations of all ranks.

An encoder writes operations as GOAL text and GOAL binary: the bytes of a class, in which ranks
differ at known positions.

Source of both: spcl/atlahs, sim/LogGOPSim (txt2bin.re, Goal.hpp, Parser.hpp). In text, numbers that
differ between ranks are padded with zeros to the same width; the reader parses them as decimal
numbers. Binary is little endian, and an edge is stored with the operation that is waited for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from stagec.formats.base import (
    Bytes,
    Durations,
    JobFile,
    JobFormat,
    Layout,
    Need,
    TraceJob,
    Variant,
    all_ranks,
    check_choice,
    nanoseconds,
)
from stagec.formats.goal.ops import (
    CALC,
    LOADS,
    SEND,
    BufferShare,
    Expander,
    Key,
    OpCounts,
    Ops,
    Place,
)
from stagec.formats.messages import ALGORITHMS, Shape
from stagec.machines import Machine
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Node, Program
from stagec.support.diagnostics import error

MAGIC = 4223
#: An operation in binary: Parser.hpp, `serialize_mmap`.
NODE = np.dtype(
    [
        ("dependencies", "<u4"),
        ("type", "u1"),
        ("peer", "<u4"),
        ("size", "<u8"),
        ("tag", "<u4"),
        ("cpu", "u1"),
        ("nic", "u1"),
        ("dependants", "<u4"),
        ("first", "<u4"),
        ("start_dependants", "<u4"),
        ("start_first", "<u4"),
    ]
)


class Patched:
    """The bytes of ranks that differ only at the positions that end at `ends`. `written` encodes
    the value of a key, in the same number of bytes for every rank."""

    def __init__(
        self, data: Bytes, ends: Mapping[Key, Ints], written: Callable[[Key, int], bytes]
    ) -> None:
        self._variant, self._ends, self._written = Variant(data, {}, {}), ends, written

    def rank(self, place: Place) -> memoryview:
        """The bytes of a rank, valid until the next call."""
        for key, ends in self._ends.items():
            self._variant.put(key, ends, self._written(key, place.value(key)))
        return self._variant.data.data


def text_of(ops: Ops, ranks: int) -> Patched:
    """The text of a rank: `l3: send 64b to 07 tag 1 cpu 2`, `l3 requires l1`."""
    widths = [_width(key, ranks) for key in ops.keys]
    lines: list[str] = []
    ends: dict[Key, list[int]] = {key: [] for key in ops.keys}
    bounds: list[int] = np.searchsorted(ops.source, np.arange(len(ops) + 1)).tolist()
    targets: list[int] = ops.target.tolist()
    rows: list[list[int]] = np.stack(
        [ops.type, ops.size, ops.cpu, ops.tag, ops.peer, ops.share], axis=1
    ).tolist()
    at = 0
    for number, (type_, size, cpu, tag, peer, share) in enumerate(rows):
        line = f"l{number + 1}: "
        if type_ == CALC:
            line += f"calc {size} cpu {cpu}\n"
        else:
            line += "send " if type_ == SEND else "recv "
            if share < 0:
                line += f"{size}b "
            else:
                line += "0" * widths[share]
                ends[ops.keys[share]].append(at + len(line) - 1)
                line += "b "
            line += ("to " if type_ == SEND else "from ") + "0" * widths[peer]
            ends[ops.keys[peer]].append(at + len(line) - 1)
            line += f" tag {tag} cpu {cpu}\n"
        for target in targets[bounds[number] : bounds[number + 1]]:
            line += f"l{number + 1} requires l{target + 1}\n"
        at += len(line)
        lines.append(line)
    data = np.frombuffer("".join(lines).encode(), dtype=np.uint8).copy()
    wide = dict(zip(ops.keys, widths, strict=True))
    return Patched(data, _arrays(ends), lambda key, value: str(value).zfill(wide[key]).encode())


def _width(key: Key, ranks: int) -> int:
    """The number of digits of the largest value of a key."""
    return len(str(key.size if isinstance(key, BufferShare) else ranks - 1))


def binary_of(ops: Ops) -> Patched:
    """The binary of a rank: the indices of operations without dependencies, then a table of all
    operations."""
    count = len(ops)
    nodes = np.zeros(count, dtype=NODE)
    nodes["dependencies"] = np.bincount(ops.source, minlength=count)
    nodes["dependants"] = np.bincount(ops.target, minlength=count)
    after = np.cumsum(nodes["dependants"])
    nodes["first"], nodes["start_first"] = after - nodes["dependants"], after
    nodes["type"], nodes["size"], nodes["cpu"], nodes["tag"] = ops.type, ops.size, ops.cpu, ops.tag
    roots = np.flatnonzero(nodes["dependencies"] == 0)
    appendix = ops.source[np.lexsort((ops.source, ops.target))]
    head = np.array([count, len(roots), *roots.tolist()], dtype="<u4")
    parts = head.tobytes(), nodes.tobytes(), appendix.astype("<u4").tobytes()
    data = np.frombuffer(b"".join(parts), dtype=np.uint8).copy()
    ends: dict[Key, Ints] = {}
    size, peer = _end("size"), _end("peer")
    for number, key in enumerate(ops.keys):
        of_size = isinstance(key, BufferShare)
        column = ops.share if of_size else ops.peer
        last = len(parts[0]) + (size if of_size else peer) - 1
        ends[key] = last + NODE.itemsize * np.flatnonzero(column == number)
    return Patched(
        data,
        ends,
        lambda key, value: value.to_bytes(8 if isinstance(key, BufferShare) else 4, "little"),
    )


def _end(name: Literal["size", "peer"]) -> int:
    """The end of a field in an operation, in bytes."""
    assert NODE.fields is not None
    type_, offset = NODE.fields[name][:2]
    return int(offset) + type_.itemsize


def binary_bytes(counts: OpCounts) -> int:
    """The number of bytes of the binary of a rank."""
    return 4 * (2 + counts.roots + counts.edges) + NODE.itemsize * counts.ops


def binary_head(sizes: list[int], cpus: int) -> bytes:
    """The header of a binary: the number of ranks, the last cpu and nic, and the start and end of
    each rank, counted from after the magic number."""
    start = 6 + 16 * len(sizes)
    ends = start + np.cumsum(np.array(sizes, dtype=np.int64))
    places = np.stack([ends - sizes, ends], axis=1).astype("<u8")
    head = MAGIC.to_bytes(8, "little") + len(sizes).to_bytes(4, "little")
    return head + bytes([cpus - 1, 0]) + places.tobytes()


def _arrays(ends: Mapping[Key, list[int]]) -> dict[Key, Ints]:
    return {key: np.array(places, dtype=np.int64) for key, places in ends.items() if places}


#: A rank class, and the shapes of a rank's groups, by which the operations of its members differ.
_Kind = tuple[int, tuple[tuple[GroupAxes, Shape], ...]]


@dataclass(frozen=True)
class GoalFormat(JobFormat):
    """A GOAL file, `NAME.goal`, or with `binary` the form that LogGOPSim reads, `NAME.bin`.

    `collectives` is the algorithm by which collectives become messages: `ring`, `tree` or
    `pairwise`. Streams are cpus: 0 for computations, 1 for collectives, 2 for sends, 3 for
    receives, 4 and 5 for copies to and from the host.
    """

    collectives: str = "ring"
    binary: bool = False
    name: ClassVar[str] = "goal"
    needs: ClassVar[frozenset[Need]] = frozenset({"durations"})
    pods: ClassVar[bool] = True

    def check(self, job: TraceJob) -> None:
        """Raises `DiagnosticError` for an unknown algorithm."""
        check_choice(self, "collectives", ALGORITHMS)

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        losses = [
            "what nodes are: names, FLOPs, bytes of memory, which messages are a collective",
            "the levels of a network: LogGOPSim has one latency and one bandwidth for all ranks",
        ]
        nodes = [n for n in program.prototypes if n.is_collective]
        if any(n.kind in ("all_reduce", "reduce_scatter") for n in nodes):
            losses.append("the time of additions inside reductions")
        if any(n.size < n.group.size(layout.mesh) for n in nodes):
            losses.append("collectives of fewer bytes than members get as many")
        return losses

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        all_ranks(self, ranks)
        schedule = GoalSchedule(job, self.collectives)
        if self.binary:
            yield f"{job.name}.bin", schedule.binary()
        else:
            yield f"{job.name}.goal", schedule.text()


class GoalSchedule:
    """The parts of a job's file, rank by rank. The bytes of a class are kept until its last
    rank."""

    def __init__(self, job: TraceJob, algorithm: str) -> None:
        self._job, self._algorithm = job, algorithm
        self._ranks = job.layout.groups.ranks
        self._axes: dict[int, list[GroupAxes]] = {}
        self._class = np.zeros(self._ranks, dtype=np.int64)
        for number, members in enumerate(job.members):
            self._class[members] = number

    def text(self) -> Iterator[bytes | memoryview]:
        """`num_ranks N`, and the statements of each rank."""
        yield f"num_ranks {self._ranks}\n".encode()
        for place, encoded in self._encoded(lambda e: text_of(e.ops(), self._ranks)):
            yield f"rank {place.rank} {{\n".encode()
            yield encoded.rank(place)
            yield b"}\n"

    def binary(self) -> Iterator[bytes | memoryview]:
        """The table of ranks, and the operations of each."""
        yield binary_head(self._sizes(), LOADS + 1)
        for place, encoded in self._encoded(lambda e: binary_of(e.ops())):
            yield encoded.rank(place)

    def _encoded(self, encode: Callable[[Expander], Patched]) -> Iterator[tuple[Place, Patched]]:
        known: dict[_Kind, Patched] = {}
        last = [int(members[-1]) for members in self._job.members]
        for rank, number in enumerate(self._class.tolist()):
            place = Place(self._job.layout_of(number), rank)
            kind = self._kind(number, place)
            if kind not in known:
                known[kind] = encode(self._expander(kind))
            yield place, known[kind]
            if rank == last[number]:
                known = {k: v for k, v in known.items() if k[0] != number}

    def _sizes(self) -> list[int]:
        """The bytes of the binary of every rank."""
        sizes = np.zeros(self._ranks, dtype=np.int64)
        for number, members in enumerate(self._job.members):
            known: dict[_Kind, int] = {}
            layout = self._job.layout_of(number)
            for rank in members.tolist():
                kind = self._kind(number, Place(layout, rank))
                if kind not in known:
                    known[kind] = binary_bytes(self._expander(kind).counts())
                sizes[rank] = known[kind]
        return sizes.tolist()

    def _kind(self, number: int, place: Place) -> _Kind:
        if self._algorithm != "tree":
            return number, ()
        if number not in self._axes:
            self._axes[number] = self._job.program(number).groups
        return number, tuple(place.shapes(self._axes[number], self._algorithm).items())

    def _expander(self, kind: _Kind) -> Expander:
        program, layout = self._job.program(kind[0]), self._job.layout_of(kind[0])
        time = partial(self._nanoseconds, self._job.durations_of(kind[0]))
        return Expander(program, layout, time, self._algorithm, dict(kind[1]))

    def _nanoseconds(self, durations: Durations | None, node: Node) -> int:
        if node.is_copy:
            return _copied(node, self._job.machine)
        return nanoseconds(durations)(node) if durations is not None else 0


def _copied(node: Node, machine: Machine | None) -> int:
    """The nanoseconds of a copy between device and host. Raises `DiagnosticError` without a
    machine."""
    if machine is None:
        raise error(
            f"'{node.name}' copies between device and host, which takes a machine's time",
            remedy="add --machine h100-sxm, for example",
        )
    seconds = machine.host.latency.value + node.size / machine.host.bandwidth.value
    return round(1e9 * seconds)


GOAL = GoalFormat()
