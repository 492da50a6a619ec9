"""The differences between two jobs: in sums over their nodes, and in the nodes themselves.

Nodes are matched by name; nodes with equal names in file order. The attributes of matched nodes are
compared; other nodes are in one of the two jobs only. Programs are compared per pair of rank
classes, so a thousand ranks cost one comparison. Groups are compared by their members, not by their
numbers; groups and peers are compared rank by rank.

    A   forward/q   forward/r       backward/q        forward/q is in both, forward/r only in A,
    B   forward/q   backward/q      optimizer/q       optimizer/q only in B
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from stagec.check.agreement import CheckedJob
from stagec.check.archive import read_archive
from stagec.check.findings import CheckReport
from stagec.check.program import Analysis, TraceProgram
from stagec.check.ranks import LINKS, RankReader, RankTrace
from stagec.check.table import RankTable
from stagec.check.trace_files import ALL_RANKS, group_id, job_of, read_groups
from stagec.check.traces import read_directory
from stagec.formats.chakra.nodes import TraceError, TraceNode
from stagec.formats.chakra.show import row_of
from stagec.support.diagnostics import error
from stagec.traces.archive import is_archive

Kind = Literal["only in A", "only in B", "different", "moved", "other dependencies", "other ranks"]
#: A phase, a kind of node, and the shape of its group, such as `8 ranks, step 8`.
Key = tuple[str, str, str]
_NUMBERED = re.compile(r"(?:^|/)(?:mb|L)\d+(?=/|$)")


class Sums(NamedTuple):
    """The number of nodes, their FLOPs, and their bytes: those communicated by collectives and
    messages, those read and written by others."""

    nodes: int = 0
    flops: int = 0
    bytes: int = 0

    def more(self, other: Sums, times: int = 1) -> Sums:
        """These sums plus `times` the others."""
        return Sums(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Difference:
    """One kind of difference between two programs: the number of nodes, their number by operation
    (`ops`), and descriptions of the first ones (`examples`). All of `ranks` have it."""

    kind: Kind
    ranks: Sequence[int]
    count: int
    ops: Mapping[str, int]
    examples: Sequence[str]


@dataclass
class Comparison:
    """The result of comparing two jobs: the numbers of ranks and of nodes of each, the sums of each
    by key, and the differences. `notes` say what was not compared."""

    ranks: tuple[int, int]
    nodes: tuple[int, int]
    sums: tuple[Mapping[Key, Sums], Mapping[Key, Sums]]
    notes: Sequence[str] = ()
    differences: list[Difference] = field(default_factory=list[Difference])

    @property
    def same(self) -> bool:
        """Whether there are no differences."""
        return self.ranks[0] == self.ranks[1] and not self.differences


def compare(a: Path, b: Path, examples: int = 3) -> Comparison:
    """Compare two traces, folders or archives, with up to `examples` examples per difference. The
    trace of one rank is compared with that rank of a job. Raises `DiagnosticError` for a file that
    cannot be read."""
    jobs, notes = _paired(_job(a), _job(b), (a, b))
    result = Comparison(
        (len(jobs[0].ranks), len(jobs[1].ranks)),
        (_count(jobs[0]), _count(jobs[1])),
        (_sums(jobs[0]), _sums(jobs[1])),
        [*notes, *_unnamed(jobs)],
    )
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in sorted(set(jobs[0].ranks) & set(jobs[1].ranks)):
        pairs[jobs[0].traces[rank].class_id, jobs[1].traces[rank].class_id].append(rank)
    for ranks in pairs.values():
        one, two = (job.traces[ranks[0]] for job in jobs)
        match = _Match(one.analysis.program, two.analysis.program, examples)
        result.differences += match.differences(ranks)
        result.differences += _other_ranks(jobs, ranks, match, examples)
    return result


# -- reading ---------------------------------------------------------------------------------------


def _job(path: Path) -> CheckedJob:
    """Read a job. Raises `DiagnosticError` if it cannot be read."""
    report, reader = CheckReport(), RankReader(_unanalysed, times=True)
    if path.is_dir():
        job = read_directory(path, report, reader)
    elif path.is_file():
        job = read_archive(path, report, reader) if is_archive(path) else _trace(path, reader)
    else:
        raise error(
            f"there is no file or folder '{path}', expected a trace, a folder of traces or an "
            "archive",
            remedy="give what stagec compile wrote, or a trace of another tool",
        )
    if job is None or report.errors:
        raise report.as_error()
    return job


def _paired(
    one: CheckedJob, two: CheckedJob, paths: tuple[Path, Path]
) -> tuple[list[CheckedJob], list[str]]:
    """The jobs, restricted to the ranks that are compared, and notes about the others. Raises
    `DiagnosticError` if a single trace belongs to a rank that the other job does not have."""
    alone = [path.is_file() and not is_archive(path) for path in paths]
    if all(alone):
        return [_as_rank(job, next(iter(job.ranks)), 0) for job in (one, two)], []
    if not any(alone):
        return [one, two], []
    whole, side = (two, "B") if alone[0] else (one, "A")
    (rank,) = (one if alone[0] else two).ranks
    if rank not in whole.ranks:
        raise error(
            f"'{paths[alone.index(True)]}' is the trace of rank {rank}, which {side} does not have",
            remedy="compare it with a job that has this rank, or with one trace",
        )
    left = len(whole.ranks) - 1
    notes = [f"compared with rank {rank} of {side}: {left} more are not compared"] if left else []
    part = _as_rank(whole, rank, rank)
    return [one, part] if alone[0] else [part, two], notes


def _as_rank(job: CheckedJob, rank: int, number: int) -> CheckedJob:
    """A job of one rank of another, with a new number."""
    table = RankTable.of([replace(job.traces[rank], rank=number)])
    return CheckedJob(job.directory, table, frozenset({number}), job.groups)


def _unnamed(jobs: Sequence[CheckedJob]) -> Iterator[str]:
    """Notes about jobs without a groups file."""
    for side, job in zip("AB", jobs, strict=True):
        if job.groups is None and any(each.groups for each in job.traces.classes):
            yield f"groups are compared by their numbers: {side} has no groups file NAME.json"


def _trace(path: Path, reader: RankReader) -> CheckedJob:
    name, number = job_of(path)
    rank = number or 0
    try:
        groups = read_groups(path.parent, name, CheckReport())
        table = RankTable.of([reader.read(path, rank)])
        return CheckedJob(path.parent, table, frozenset({rank}), groups)
    except TraceError as problem:
        raise error(str(problem), remedy="give a complete trace, protobuf or JSON") from None


def _unanalysed(program: TraceProgram) -> Analysis:
    return Analysis(program, (), True, (), {}, {}, {}, {})


def _count(job: CheckedJob) -> int:
    return sum(len(each.analysis.program.nodes) * len(each.ranks) for each in job.traces.classes)


# -- sums ------------------------------------------------------------------------------------------


def _sums(job: CheckedJob) -> dict[Key, Sums]:
    """Sums over all ranks of a job."""
    of_class: dict[int, Mapping[tuple[str, str, int], Sums]] = {}
    result: defaultdict[Key, Sums] = defaultdict(Sums)
    shapes: dict[str, str] = {}
    for trace in job.traces.values():
        if trace.class_id not in of_class:
            of_class[trace.class_id] = _sums_by_slot(trace.analysis.program)
        for (phase, kind, slot), sums in of_class[trace.class_id].items():
            over = ""
            if slot >= 0:
                text = trace.groups[slot]
                if text not in shapes:
                    shapes[text] = _shape(job, text)
                over = shapes[text]
            result[phase, kind, over] = result[phase, kind, over].more(sums)
    return dict(sorted(result.items()))


def _sums_by_slot(program: TraceProgram) -> dict[tuple[str, str, int], Sums]:
    sums: defaultdict[tuple[str, str, int], Sums] = defaultdict(Sums)
    for index, node in enumerate(program.nodes):
        row = row_of(node)
        size = row.tensor_bytes if row.comm_bytes is None else row.comm_bytes
        key = phase_of(node.name), row.collective or row.kind, program.group_slots.get(index, -1)
        sums[key] = sums[key].more(Sums(1, row.flops or 0, size or 0))
    return dict(sums)


def _shape(job: CheckedJob, text: str) -> str:
    """A description of a group without the numbers of its ranks: `8 ranks, step 8`."""
    number = group_id(text)
    members = job.members.get(number) if number is not None else None
    if members is None:
        return "all ranks" if text in ("", "0") else f"group {text}"
    steps = {later - rank for rank, later in pairwise(members)}
    step = f", step {steps.pop()}" if len(steps) == 1 else ""
    return f"{len(members)} ranks{step}"


def phase_of(name: str) -> str:
    """The phase in a node's name, '' without one."""
    phase, slash, _ = name.partition("/")
    return phase if slash else ""


def op_of(name: str) -> str:
    """A node's name without microbatch and layer."""
    return _NUMBERED.sub("", name)


# -- nodes -----------------------------------------------------------------------------------------


class _Match:
    """The nodes of two programs, matched: pairs of indices in the order of A."""

    def __init__(self, one: TraceProgram, two: TraceProgram, examples: int) -> None:
        self.one, self.two, self._examples = one, two, examples
        keys = [_keys(program) for program in (one, two)]
        there = {key: index for index, key in enumerate(keys[1])}
        self.pairs = [(i, there[key]) for i, key in enumerate(keys[0]) if key in there]
        matched = {key for key in keys[0] if key in there}
        self._only = [
            [p.nodes[i] for i, key in enumerate(own) if key not in matched]
            for p, own in zip((one, two), keys, strict=True)
        ]
        self._keys = [
            {node.id: key for node, key in zip(p.nodes, own, strict=True)}
            for p, own in zip((one, two), keys, strict=True)
        ]

        self._alike = self._keys[0] == self._keys[1]

    def differences(self, ranks: Sequence[int]) -> Iterator[Difference]:
        """The differences in the nodes themselves."""
        only: tuple[tuple[Kind, list[TraceNode]], ...] = (
            ("only in A", self._only[0]),
            ("only in B", self._only[1]),
        )
        for kind, rows in only:
            yield from self._differences(kind, ranks, [(node, _node_text(node)) for node in rows])
        both = [(self.one.nodes[i], self.two.nodes[j]) for i, j in self.pairs]
        different = [(a, text) for a, b in both if (text := _attributes(a, b))]
        yield from self._differences("different", ranks, different)
        moved = [self.pairs[at] for at in _out_of_order([j for _, j in self.pairs])]
        moves = [(self.one.nodes[i], self._move(i, j)) for i, j in moved]
        yield from self._differences("moved", ranks, moves)
        waits = [(a, text) for a, b in both if (text := self._dependencies(a, b))]
        yield from self._differences("other dependencies", ranks, waits)

    def _differences(
        self, kind: Kind, ranks: Sequence[int], rows: Sequence[tuple[TraceNode, str]]
    ) -> Iterator[Difference]:
        if rows:
            ops = Counter(op_of(node.name) for node, _ in rows)
            texts = [text for _, text in rows[: self._examples]]
            yield Difference(kind, ranks, len(rows), dict(ops.most_common()), texts)

    def _move(self, i: int, j: int) -> str:
        a, b = self.one.nodes, self.two.nodes
        where = [f"after {n[at - 1].label}" if at else "first" for n, at in ((a, i), (b, j))]
        return f"{a[i].label}: {where[0]} in A, {where[1]} in B"

    def _dependencies(self, a: TraceNode, b: TraceNode) -> str:
        """A description of different dependencies, '' if they are equal. A dependency that is not
        in the trace is described by its number."""
        texts: list[str] = []
        for what, of_a, of_b in (
            ("data", a.data_deps, b.data_deps),
            ("control", a.ctrl_deps, b.ctrl_deps),
        ):
            if of_a == of_b and self._alike:
                continue
            in_a, in_b = (
                {keys.get(d, (f"number {d}", 0)) for d in deps}
                for keys, deps in zip(self._keys, (of_a, of_b), strict=True)
            )
            for only, side in ((in_a - in_b, "A"), (in_b - in_a, "B")):
                if only:
                    more = f" and {len(only) - 1} more" if len(only) > 1 else ""
                    texts.append(f"waits for {min(only)[0]!r}{more} in {side} only ({what})")
        return f"{a.label} {', '.join(texts)}" if texts else ""


def _keys(program: TraceProgram) -> list[tuple[str, int]]:
    """The keys that match nodes: the name (the kind, for nodes without one), and the number of
    earlier nodes with that name."""
    seen: Counter[str] = Counter()
    keys: list[tuple[str, int]] = []
    for node in program.nodes:
        name = node.name or f"a node of kind {node.kind}"
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def _attributes(a: TraceNode, b: TraceNode) -> str:
    """A description of the attributes that differ, except groups and peers; '' if none do."""
    facts = [
        {k: v for k, v in n.attrs.items() if k not in LINKS}
        | {"kind": n.kind, "duration_micros": n.duration_micros, "start_micros": n.start_micros}
        for n in (a, b)
    ]
    names = [k for k in dict.fromkeys((*facts[0], *facts[1])) if _differ(k, *facts)]
    if not names:
        return ""
    shown = [f"{k} {_text(facts[0].get(k))} -> {_text(facts[1].get(k))}" for k in names]
    return f"{a.label}: {', '.join(shown)}"


def _differ(name: str, a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    one, two = a.get(name), b.get(name)
    return one != two and repr(one) != repr(two)  # NaN is not equal to itself


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "none" if value is None else repr(value)[:60]


def _node_text(node: TraceNode) -> str:
    row = row_of(node)
    size = row.tensor_bytes if row.comm_bytes is None else row.comm_bytes
    facts = {"FLOPs": row.flops, "bytes": size}
    words = [row.collective or row.kind, *(f"{v:,} {k}" for k, v in facts.items() if v)]
    return f"{node.label}: {', '.join(words)}"


def _out_of_order(places: Sequence[int]) -> list[int]:
    """The smallest set of positions without which the others are in order: all but a longest
    increasing subsequence, by patience sorting."""
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for at, place in enumerate(places):
        pile = bisect_left(ends, place)
        before.append(last[pile - 1] if pile else -1)
        if pile == len(ends):
            ends.append(place)
            last.append(at)
        else:
            ends[pile], last[pile] = place, at
    kept: set[int] = set()
    at = last[-1] if last else -1
    while at >= 0:
        kept.add(at)
        at = before[at]
    return [i for i in range(len(places)) if i not in kept]


# -- groups and peers ------------------------------------------------------------------------------


def _other_ranks(
    jobs: Sequence[CheckedJob], ranks: Sequence[int], match: _Match, examples: int
) -> Iterator[Difference]:
    """The difference that matched nodes communicate with other ranks, if there are any. Its
    examples are from the first such rank."""
    groups = _slots(match.pairs, match.one.group_slots, match.two.group_slots)
    peers = _slots(match.pairs, match.one.peer_slots, match.two.peer_slots)
    wrong: dict[int, list[tuple[Sequence[int], str]]] = {}
    for rank in ranks:
        a, b = (job.traces[rank] for job in jobs)
        rows = [
            (nodes, _ranks(with_a), _ranks(with_b))
            for (one, two), nodes in groups.items()
            if (with_a := _group(jobs[0], a, one)) != (with_b := _group(jobs[1], b, two))
        ]
        rows += [
            (nodes, f"rank {a.peers[one]}", f"rank {b.peers[two]}")
            for (one, two), nodes in peers.items()
            if a.peers[one] != b.peers[two]
        ]
        if rows:
            where = f": on rank {rank} with"
            wrong[rank] = [
                (n, f"{match.one.nodes[n[0]].label}{where} {in_a} in A, with {in_b} in B")
                for n, in_a, in_b in rows
            ]
    if wrong:
        first = next(iter(wrong.values()))
        nodes = [match.one.nodes[i] for indices, _ in first for i in indices]
        ops = Counter(op_of(node.name) for node in nodes)
        shown = [text for _, text in first[:examples]]
        yield Difference("other ranks", [*wrong], len(nodes), dict(ops.most_common()), shown)


def _slots(
    pairs: Iterable[tuple[int, int]], one: Mapping[int, int], two: Mapping[int, int]
) -> dict[tuple[int, int], list[int]]:
    """The pairs of slots of matched nodes, with the indices of these nodes in A."""
    slots: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for i, j in pairs:
        if i in one and j in two:
            slots[one[i], two[j]].append(i)
    return slots


def _group(job: CheckedJob, trace: RankTrace, slot: int) -> tuple[int, ...] | str:
    """The members of a group, or its number as text without a groups file."""
    text = trace.groups[slot]
    number = group_id(text)
    members = job.members.get(number) if number is not None else None
    return text if members is None else members


def _ranks(group: tuple[int, ...] | str) -> str:
    if isinstance(group, str):
        return "all ranks" if group == ALL_RANKS else f"group {group!r}"
    shown = ", ".join(map(str, group[:_SHOWN]))
    return f"ranks {shown}" + (f", ... ({len(group)})" if len(group) > _SHOWN else "")


_SHOWN = 8
