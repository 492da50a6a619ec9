"""HPCC's flow list, which ns-3 simulates: one collective of a job as flows between ranks.

Source of the format: alibaba-edu/High-Precision-Congestion-Control, simulation/mix/flow.txt: the
number of flows, then `source destination priority port bytes seconds` for each, by time. Flows have
no dependencies, so a list contains one collective with all of its groups, and the messages from one
member to another in all steps are one flow.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np

from stagec.formats.base import JobFile, JobFormat, Layout, TraceJob, all_ranks, check_choice
from stagec.formats.messages import ALGORITHMS, expansion, other_end, part_bytes, shape_of
from stagec.program.nodes import Ints, Node, Program, numbered
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

#: The priority of RDMA traffic, and the port, in HPCC's own lists.
_PRIORITY, _PORT = 3, 100


@dataclass(frozen=True)
class HpccFormat(JobFormat):
    """`NAME.flow.txt`: the flows of the collective `node`, by default the largest one of the first
    rank class. They begin after `start` seconds. `collectives` is the algorithm: `ring`, `tree` or
    `pairwise`. In a job of several pods, the collective is one of `pod`, by default of the first
    pod that has it."""

    node: str = ""
    pod: str = ""
    collectives: str = "ring"
    start: float = 0.0
    name: ClassVar[str] = "hpcc"
    pods: ClassVar[bool] = True

    def check(self, job: TraceJob) -> None:
        """Raises `DiagnosticError` for invalid options, and for a job without the collective."""
        check_choice(self, "collectives", ALGORITHMS)
        if not 0 <= self.start < inf:
            raise error(
                f"option 'start' of format 'hpcc' expects 0 or more seconds, found {self.start:g}",
                remedy="for example, start=2",
            )
        self._chosen(job)

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        chosen = self.node or "the largest one, node=NAME chooses"
        return [
            f"all but one collective ({chosen}), and its steps: members send all they send at once"
        ]

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        all_ranks(self, ranks)
        yield f"{job.name}.flow.txt", self._lines(job)

    def _lines(self, job: TraceJob) -> Iterator[bytes]:
        node, groups, ranks = self._chosen(job)
        rows = groups[np.isin(groups, ranks).all(axis=1)]
        flows = flows_of(node.kind, node.size, rows.shape[1], self.collectives)
        yield f"{len(rows) * len(flows)}\n".encode()
        for row in rows:
            members: list[int] = row.tolist()
            lines = (
                f"{members[here]} {members[there]} {_PRIORITY} {_PORT} {size} {self.start:g}\n"
                for (here, there), size in flows.items()
            )
            yield "".join(lines).encode()

    def _chosen(self, job: TraceJob) -> tuple[Node, Ints, Ints]:
        """The collective, the groups over its axes, and the ranks of all classes of its pod that
        have a collective of that name."""
        pods = [job.layout_of(number).pod for number in range(len(job.members))]
        classes = [number for number, pod in enumerate(pods) if self.pod in ("", pod)]
        if not classes:
            raise error(
                f"no pod '{self.pod}' in the job",
                remedy=did_you_mean(self.pod, pods)
                or "drop pod=NAME, which is for jobs of several pods",
            )
        name = self.node or _largest(job.program(classes[0]))
        names: set[str] = set()
        having: dict[int, Node] = {}
        for number in classes:
            known = dict(_collectives(job.program(number)))
            names |= known.keys()
            if name in known:
                having[number] = known[name]
        if not having:
            raise error(
                f"no collective '{name}' in the job",
                remedy=did_you_mean(name, names) or "'stagec show' lists the names of nodes",
            )
        first, node = next(iter(having.items()))
        ranks = [job.members[number] for number in having if pods[number] == pods[first]]
        groups = job.layout_of(first).groups.members[node.group]
        return node, groups, np.concatenate(ranks)


def _largest(program: Program) -> str:
    """The name of the largest collective. Raises `DiagnosticError` if there is none."""
    name, largest = max(_collectives(program), key=lambda pair: pair[1].size, default=("", None))
    if largest is None:
        raise error(
            "the first rank class has no collectives, and the format 'hpcc' writes one",
            remedy="add --tp 2 or --dp 2, or name one of another class: hpcc{node=NAME}",
        )
    if not name:
        raise error("the nodes of this job have no names", remedy="drop --names none")
    return name


def flows_of(kind: str, size: int, n: int, algorithm: str) -> Counter[tuple[int, int]]:
    """The bytes that members of a group of n send to each other, by sender and receiver."""
    flows: Counter[tuple[int, int]] = Counter()
    for here in range(n):
        for end in expansion(kind, n, algorithm, shape_of(kind, n, algorithm, here)):
            if end.way == "send":
                part = None if end.part is None else (here + end.part) % n
                sent = max(1, size) if part is None else part_bytes(size, n, part)
                flows[here, other_end(end.other, here, n)] += sent
    return flows


def _collectives(program: Program) -> Iterator[tuple[str, Node]]:
    """The collectives of a program by name."""
    wanted = np.array([n.is_collective for n in program.prototypes], dtype=bool)
    used = np.flatnonzero(wanted[program.prototype])
    pairs = np.stack([program.prototype[used], program.microbatch[used]], axis=1)
    rows: list[list[int]] = np.unique(pairs, axis=0).tolist()
    for prototype, microbatch in rows:
        node = program.prototypes[prototype]
        yield numbered(node.name, microbatch), node


HPCC = HpccFormat()
