"""LLMServingSim's trace of a batch: the computations of a serving step, one after the other.

Source of the format: casys-kaist/LLMServingSim, docs of its trace files: a line with the mode, the
number of pipeline stages and the first row of each stage after the first; the number of rows; a
header; and rows of 11 fields with blanks between them. A row is a computation, in nanoseconds,
followed by a collective. The simulator's converter adds the ranks of a stage and the messages
between stages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from stagec.formats.base import JobFile, JobFormat, Layout, Need, TraceJob, all_ranks, nanoseconds
from stagec.program.nodes import Ints, Node, Program
from stagec.support.diagnostics import error

_HEADER = (
    *("Layername", "comp_time", "input_loc", "input_size", "weight_loc", "weight_size"),
    *("output_loc", "output_size", "comm_type", "comm_size", "misc"),
)
_COLLECTIVES = {"all_reduce": "ALLREDUCE", "all_to_all": "ALLTOALL"}
_HERE, _HOST, _NONE = "LOCAL", "REMOTE:0", "NONE"


@dataclass
class _Row:
    """A computation with the bytes that it reads and writes, and the collective after it."""

    name: str
    nanoseconds: int = 0
    reads: int = 0
    writes: int = 0
    comm: str = _NONE
    sent: int = 0


@dataclass
class _Rows:
    """The rows of all stages. `axes` are the groups of their collectives; `starts` are the first
    rows of the stages after the first."""

    rows: list[_Row] = field(default_factory=list[_Row])
    starts: list[int] = field(default_factory=list[int])
    axes: set[object] = field(default_factory=set[object])

    def stage(self, program: Program, time: Callable[[Node], int]) -> None:
        """Add the rows of a stage. Raises `DiagnosticError` for nodes that a row cannot express."""
        if self.rows:
            self.starts.append(len(self.rows))
        first = len(self.rows)
        self.axes |= {node.group for node in program.nodes if node.is_collective}
        if len(self.axes) > 1:
            raise error(
                "the collectives of this step go over several axes, and rows of LLMServingSim do "
                "not say which ranks they join",
                remedy="split the model over one axis beside the stages, such as --tp 8",
            )
        for node in program.nodes:
            if node.is_collective:
                self._communicate(node, first)
            elif node.is_computation:
                writes = min(node.out, node.size)  # an append writes rows of a cache in place
                self.rows.append(_Row(_plain(node), time(node), node.size - writes, writes))

    def _communicate(self, node: Node, first: int) -> None:
        kind = _COLLECTIVES.get(node.kind)
        if kind is None:
            raise error(
                f"LLMServingSim has no {node.kind} in its rows: '{node.name}'",
                remedy="choose a strategy whose ranks reduce and exchange only: --tp, --ep; and "
                "give --sampling none, which gathers no logits",
            )
        if len(self.rows) == first or self.rows[-1].comm != _NONE:
            self.rows.append(_Row(_plain(node)))
        self.rows[-1].comm, self.rows[-1].sent = kind, node.size

    def text(self) -> Iterator[bytes]:
        """The content of the file."""
        about = f"COLOCATED\t\tmodel_parallel_NPU_group: {1 + len(self.starts)}"
        if self.starts:
            about += f"\t\tpp_stage_boundaries: {','.join(map(str, self.starts))}"
        yield "\n".join((about, str(len(self.rows)), _line(_HEADER))).encode()
        last = len(self.rows) - 1
        for i, row in enumerate(self.rows):
            fields = (
                *(f"{row.name}_{i}", row.nanoseconds),
                *(_HOST if i == 0 else _HERE, row.reads, _HERE, 0),
                *(_HOST if i == last else _HERE, row.writes, row.comm, row.sent, _NONE),
            )
            yield _line(fields).encode()


def _line(fields: Sequence[object]) -> str:
    return "\t".join(map(str, fields)) + "\n"


@dataclass(frozen=True)
class LlmServingSimFormat(JobFormat):
    """`NAME.txt`: the step of a batch, all pipeline stages one after the other; with several pods
    `NAME.prefill.txt` and so on, each the batch of an instance."""

    name: ClassVar[str] = "llmservingsim"
    pods: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"durations"})

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        """The losses of the format, see `Format.drops`."""
        lost = [
            "who waits for whom: rows follow each other, and a collective stands behind its row",
            "weights by themselves: they are among the bytes that are read",
        ]
        if any(n.is_message and n.over not in layout.mesh for n in program.prototypes):
            lost.append("messages between pods: the simulator makes those between instances")
        return lost

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        all_ranks(self, ranks)
        pods: dict[str, _Rows] = {}
        for number in range(len(job.members)):
            program, durations = job.program(number), job.durations_of(number)
            _check(program)
            if durations is not None:
                rows = pods.setdefault(job.layout_of(number).pod, _Rows())
                rows.stage(program, nanoseconds(durations))
        for pod, rows in pods.items():
            yield ".".join(filter(None, (job.name, pod, "txt"))), rows.text()


def _check(program: Program) -> None:
    if any(node.phase != "forward" for node in program.nodes):
        raise error(
            "LLMServingSim simulates servers, and this step trains",
            remedy="compile a step of serving: --serve decode --context 4096",
        )
    if program.microbatch.any():
        raise error(
            "a trace of LLMServingSim is one batch, and this step has several microbatches",
            remedy="add --microbatches 1",
        )


def _plain(node: Node) -> str:
    """The name of a node without phase, microbatch and slashes."""
    return node.name.removeprefix("forward/").removeprefix("mb0/").replace("/", "_")


LLM_SERVING_SIM = LlmServingSimFormat()
