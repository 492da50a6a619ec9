"""SimAI's workload text: the computations and collectives of a rank of each class, as layers with
columns for forward, gradients of inputs (`ig`) and gradients of weights (`wg`).

Source of the grammar: aliyun/SimAI, astra-sim-alibabacloud/astra-sim/workload/{Workload,Layer}.cc,
policy HYBRID_TRANSFORMER_FWD_IN_BCKWD. SimAI runs the records forwards (compute, then a blocking
collective), then backwards (`ig` likewise, then `wg`, whose collective is asynchronous). So the
forward pass of a rank is split into records after each collective; so is the rest of its step,
whose last record is put first:

    in the program        the records     forward          ig             wg
    f f AG  f RS          1               f f AG           b              -
    b AR(dp)  b RS  b     2               f RS             b RS           -
                          3               -                b              AR(dp)

Records are paired within a layer of a microbatch. The text repeats a layer for each microbatch, so
its lines are made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from stagec.formats.base import JobFile, JobFormat, Layout, Need, TraceJob, all_ranks, nanoseconds
from stagec.program.classes import RankClass
from stagec.program.nodes import Ints, Node, Program, marker_of, numbered
from stagec.schedule.attached import accumulation_of
from stagec.support.diagnostics import error

POLICY = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
#: SimAI's names of collectives: Workload.cc, `initialize_workload`.
WORDS: Mapping[str, str] = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "ALLGATHER",
    "reduce_scatter": "REDUCESCATTER",
    "all_to_all": "ALLTOALL",
}
#: The minimum size in bytes to which SimAI raises collectives of forward: Layer.cc.
_SMALLEST = 4096
Column = Literal["fwd", "ig", "wg"]


class ColumnWork(NamedTuple):
    """A column of a record: nanoseconds of computation, then a collective of `size` bytes of the
    full buffer."""

    time: int = 0
    comm: str = "NONE"
    size: int = 0


@dataclass(slots=True)
class SimaiRecord:
    """A record: its work by column."""

    name: str
    parts: dict[Column, ColumnWork] = field(default_factory=dict[Column, ColumnWork])

    def add(self, column: Column, time: int, comm: str = "NONE", size: int = 0) -> None:
        """Add work to a column that has no collective yet."""
        self.parts[column] = ColumnWork(
            self.parts.get(column, ColumnWork()).time + time, comm, size
        )


@dataclass(frozen=True, slots=True)
class SimaiGroups:
    """SimAI's groups as axes of a mesh: TP, PP, EP, and all other axes as DP."""

    mesh: Mapping[str, int]
    tp: str
    pp: str
    ep: str

    def size(self, axis: str) -> int:
        """The ranks along an axis, 1 if the mesh does not have it."""
        return self.mesh.get(axis, 1)

    def place(self, node: Node, *, forward: bool) -> tuple[Column, str] | None:
        """The column and the name of a collective; None if SimAI has no group or name for it.
        Collectives over TP and EP are blocking, those over DP are not: they are in the column `wg`,
        even in forward."""
        over = self._open(node.group.axes)
        word = WORDS.get(node.kind)
        if word is None or node.group.mirrored:
            return None
        blocking: Column = "fwd" if forward else "ig"
        data = self._open(a for a in self.mesh if a not in (self.tp, self.pp))
        experts = self._open((self.ep,))
        if over == self._open((self.tp,)):
            return blocking, word
        if over == data and not (over == experts and node.kind == "all_to_all"):
            return "wg", word
        if over == experts:
            return blocking, f"{word}_EP"
        return ("wg", f"{word}_DP_EP") if over == data - experts else None

    def _open(self, axes: Iterable[str]) -> frozenset[str]:
        return frozenset(a for a in axes if self.size(a) > 1)


@dataclass(frozen=True)
class SimAiFormat(JobFormat):
    """A workload of SimAI for each rank class, `NAME.stage0.txt`, or with several pods
    `NAME.encoder.stage0.txt`; each is a separate simulation. `tp`, `pp` and `ep` are the names of
    the axes that are SimAI's groups; all other axes of the pod are DP."""

    tp: str = "tp"
    pp: str = "pp"
    ep: str = "ep"
    name: ClassVar[str] = "simai"
    pods: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"durations", "model"})

    def check(self, job: TraceJob) -> None:
        """Raises `DiagnosticError` for an option that does not name an axis."""
        axes = dict.fromkeys(a for n in range(len(job.members)) for a in job.layout_of(n).mesh)
        for option, axis in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)):
            if axis != option and axis not in axes:
                raise error(
                    f"option '{option}' of format 'simai' names the axis '{axis}', and the mesh "
                    f"has {', '.join(axes)}",
                    remedy="name one of these",
                )

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        groups = self._groups(layout)
        losses = [
            "the order of microbatches, the waiting for other stages: the bubble is a formula",
            "what overlaps: collectives over TP and EP block, those over DP start in backward",
        ]
        other = dict.fromkeys(
            f"{node.kind} over {'+'.join(node.group.words)}"
            for node in program.prototypes
            if node.is_collective and groups.place(node, forward=_forward(node)) is None
        )
        if other:
            losses.append(f"{', '.join(other)}: SimAI's groups are TP, DP, EP and DP_EP")
        ways = {n.over for n in program.prototypes if n.is_message and n.over != self.pp}
        if ways:
            losses.append(f"messages over {', '.join(sorted(ways))}: SimAI knows those of stages")
        if any(n.is_copy for n in program.prototypes):
            losses.append("copies between device and host")
        short = (n for n in program.prototypes if n.is_collective and _forward(n))
        if any(n.size < _SMALLEST for n in short):
            losses.append(f"collectives of forward below {_SMALLEST} bytes, which SimAI raises")
        axes = [a for a, size in layout.mesh.items() if size > 1]
        rest = [a for a in axes if a not in (self.tp, self.pp, self.ep)]
        if axes != [a for a in (self.pp, *rest, self.ep, self.tp) if a in axes]:
            losses.append("the numbering of ranks: SimAI has TP innermost, then EP, PP outermost")
        return losses

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        all_ranks(self, ranks)
        every = ((model.pod, each) for model in job.models for each in model.classes)
        for number, (pod, each) in enumerate(every):
            groups, durations = self._groups(job.layout_of(number)), job.durations_of(number)
            if durations is None:
                return
            workload = Workload(job.program(number), groups, nanoseconds(durations))
            name = ".".join(part for part in (job.name, pod, each.name) if part)
            yield f"{name}.txt", self._text(each, workload)

    def _groups(self, layout: Layout) -> SimaiGroups:
        return SimaiGroups(layout.mesh, self.tp, self.pp, self.ep)

    def _text(self, each: RankClass, workload: Workload) -> Iterator[bytes]:
        groups, accumulation = workload.groups, accumulation_of(each.graph)
        pairs = {
            "model_parallel_NPU_group": groups.size(self.tp),
            "ep": groups.size(self.ep),
            "pp": groups.size(self.pp),
            "vpp": 1 if accumulation is None else accumulation.integer("chunks", 1),
            "ga": workload.microbatches,
            "all_gpus": prod(groups.mesh.values()),
            "checkpoints": 0,
            "checkpoint_initiates": 0,
        }
        message = workload.message
        if message:
            pairs["pp_comm"] = message
        yield " ".join([POLICY, *(f"{key}: {value}" for key, value in pairs.items())]).encode()
        lines = workload.lines()
        yield f"\n{sum(len(block) for block in lines)}\n".encode()
        for block in lines:
            yield "".join(block).encode()


@dataclass
class Workload:
    """The records of a program. `nanoseconds` returns the duration of a computation."""

    program: Program
    groups: SimaiGroups
    nanoseconds: Callable[[Node], int]
    _known: dict[tuple[bool, bytes], list[SimaiRecord]] = field(
        default_factory=dict[tuple[bool, bytes], list[SimaiRecord]]
    )

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a rank."""
        marked = any(marker_of(n.name) for n in self.program.prototypes)
        return 1 + int(self.program.microbatch.max(initial=0)) if marked else 1

    @property
    def message(self) -> int:
        """The bytes of the largest message between stages, 0 without any."""
        sends = (n for n in self.program.prototypes if n.is_message and n.over == self.groups.pp)
        return max((n.size for n in sends), default=0)

    def lines(self) -> list[list[str]]:
        """The lines of all records in the order of the file, block by block."""
        shown: dict[tuple[int, int], list[str]] = {}
        lines: list[list[str]] = []
        for forward, backward, microbatch in self._blocks():
            key = id(forward), id(backward)
            if key not in shown:
                pairs = zip_longest(forward, backward)
                shown[key] = [line for pair in pairs for line in _rows(*pair)]
            lines.append([numbered(line, microbatch) for line in shown[key]])
        return lines

    def _blocks(self) -> Iterator[tuple[list[SimaiRecord], list[SimaiRecord], int]]:
        """Blocks of paired records: those of forward, those of backward, and the microbatch.
        Records of one layer are paired as long as both passes have layers in the same order."""
        forward, backward = self._runs(True), self._runs(False)[::-1]
        ahead = Counter(key for key, _, _ in backward)
        i, j = 0, 0
        while i < len(forward) or j < len(backward):
            ours = forward[i] if i < len(forward) else None
            theirs = backward[j] if j < len(backward) else None
            if ours is not None and (theirs is None or not ahead[ours[0]]):
                yield ours[1], [], ours[2]
                i += 1
                continue
            if theirs is None:
                return
            ahead[theirs[0]] -= 1
            j += 1
            if ours is not None and ours[0] == theirs[0]:
                yield ours[1], theirs[1], ours[2]
                i += 1
            else:
                yield [], theirs[1], theirs[2]

    def _runs(self, forward: bool) -> list[tuple[tuple[int, str], list[SimaiRecord], int]]:
        """The records of successive nodes in one microbatch and layer, with a key and the
        microbatch. The key is the layer, and how many microbatches and chunks have begun before (in
        backward: will begin later). Buckets belong to the layer of the node after which they are
        issued."""
        program = self.program
        mine = np.array([_forward(n) == forward for n in program.prototypes], dtype=bool)
        prototype = program.prototype[mine[program.prototype]]
        buckets = np.array([n.bucket for n in program.prototypes], dtype=bool)[prototype]
        with_ = np.maximum.accumulate(np.where(buckets, 0, np.arange(len(prototype))))
        microbatch = program.microbatch[mine[program.prototype]][with_]
        tails = [_tail(n) for n in program.prototypes]
        names = {tail: number for number, tail in enumerate(dict.fromkeys(tails))}
        tail = np.array([names[t] for t in tails], dtype=np.int64)[prototype[with_]]
        changes = (np.diff(tail) != 0) | (np.diff(microbatch) != 0)
        starts: list[int] = [0, *(1 + np.flatnonzero(changes)).tolist()][: len(prototype)]
        ends = [*starts[1:], len(prototype)][: len(starts)]
        units: dict[tuple[int, str], int] = {}
        runs: list[tuple[int, str, list[SimaiRecord], int]] = []
        for start, end in zip(starts, ends, strict=True):
            chunk, layer = tails[prototype[with_[start]]]
            number = int(microbatch[start])
            unit = units.setdefault((number, chunk), len(units))
            runs.append((unit, layer, self._records(prototype[start:end], forward), number))
        last = 0 if forward else len(units) - 1
        return [((abs(last - unit), layer), records, n) for unit, layer, records, n in runs]

    def _records(self, prototypes: Ints, forward: bool) -> list[SimaiRecord]:
        """The records of some nodes, in the order of the file, cached."""
        key = forward, prototypes.tobytes()
        if key not in self._known:
            places: list[int] = prototypes.tolist()
            nodes = [self.program.prototypes[i] for i in places]
            records = self._cut(nodes, forward)
            self._known[key] = records if forward else records[::-1]
        return self._known[key]

    def _cut(self, nodes: Iterable[Node], forward: bool) -> list[SimaiRecord]:
        records: list[SimaiRecord] = []
        own: Column = "fwd" if forward else "ig"
        for node in nodes:
            if node.is_message or node.is_copy:
                continue
            place = self.groups.place(node, forward=forward) if node.is_collective else (own, "")
            if place is None:
                continue
            column, word = place
            ended = column == own and records and _ends(records[-1], own)
            if not records or ended or "wg" in records[-1].parts:
                records.append(SimaiRecord(node.name))
            if word:
                records[-1].add(column, 0, word, node.size)
                records[-1].name = node.name
            else:
                records[-1].add(column, self.nanoseconds(node))
        return records


def _ends(record: SimaiRecord, column: Column) -> bool:
    """Whether a column has a collective."""
    return record.parts.get(column, ColumnWork()).comm != "NONE"


def _forward(node: Node) -> bool:
    return node.phase == "forward"


def _tail(node: Node) -> tuple[str, str]:
    """The chunk and the layer of a node: `c1/` and `L0/` of `forward/mb0/c1/L0/`."""
    parts = node.scope.split("/")[1:-1]
    inner = [p for p in parts if not p.startswith("mb")]
    chunk = inner[0] if inner and inner[0][0] == "c" and inner[0][1:].isdigit() else ""
    return chunk, "/".join(inner[1:] if chunk else inner)


def _rows(forward: SimaiRecord | None, backward: SimaiRecord | None) -> list[str]:
    """The line of two paired records; two lines if both have work in `wg`."""
    given = [r for r in (forward, backward) if r is not None]
    if len(given) > 1 and all("wg" in r.parts for r in given):
        return _rows(forward, None) + _rows(None, backward)
    parts: dict[Column, ColumnWork] = {}
    for record in given:
        parts |= record.parts
    shown = [parts.get(column, ColumnWork()) for column in ("fwd", "ig", "wg")]
    fields = [str(value) for part in shown for value in part]
    return ["\t".join([given[0].name.replace(" ", "_") or "layer", "-1", *fields, "0\n"])]


SIMAI = SimAiFormat()
