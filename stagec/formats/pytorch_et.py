"""Host execution traces of PyTorch with the communication of a job, which `comm_replay` of param
(github.com/facebookresearch/param) runs on real machines.

    node 3    ## process_group:init ##   the groups of the rank, "0" of all ranks
    node 4    record_param_comms         a collective or message, its group, elements and type
    node 9    record_param_comms wait    before the first communication that needs its result

Communication is asynchronous, unless it is blocking; computations are not included. Messages use
the group of all ranks; comm_replay does not wait for them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stagec.formats.base import Estimate, JobFormat, Layout, TraceJob
from stagec.formats.torch_comm import EIGHT_BITS, NCCL, TENSORS, elements_of
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Ints, Node, Program
from stagec.time.measured.torch_ops import SIZES

#: A version of the schema that comm_replay reads.
_SCHEMA = "1.1.0-chakra.0.0.4"
#: The approximate number of bytes of a communication and its wait.
_BYTES = 2700


@dataclass(frozen=True)
class PytorchEtFormat(JobFormat):
    """Host execution traces with the communication of each rank."""

    name: ClassVar[str] = "pytorch-et"
    pods: ClassVar[bool] = True

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        losses = ["computations, and copies to and from hosts"]
        if any(_uneven(node, layout) for node in program.prototypes):
            losses.append("all_to_alls in parts that differ: each part has as many bytes")
        return losses

    def estimate(self, job: TraceJob, ranks: Ints | None) -> Estimate:
        chosen, size = 0, 0
        for number, members in enumerate(job.members):
            count = len(members if ranks is None else np.intersect1d(members, ranks))
            if count:
                program = job.program(number)
                talks = zip(program.prototypes, program.counts.tolist(), strict=True)
                size += count * _BYTES * sum(n for node, n in talks if _talks(node))
                chosen += count
        return Estimate(size, f"{chosen} of {job.layout.groups.ranks} ranks")

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[tuple[str, Iterable[bytes]]]:
        for number, members in enumerate(job.members):
            chosen = members if ranks is None else np.intersect1d(members, ranks)
            if len(chosen):
                writer = _Class(job.program(number), job.layout_of(number))
                for rank in chosen.tolist():
                    yield f"rank-{rank}.json", writer.rank(rank)


def _talks(node: Node) -> bool:
    return node.is_collective or node.is_message


def _uneven(node: Node, layout: Layout) -> bool:
    return node.kind == "all_to_all" and node.size % node.group.size(layout.mesh) != 0


# -- what a class does -----------------------------------------------------------------------------


class _Action(NamedTuple):
    """The issue of a communication, or the wait for it: a node, and its index in the program."""

    node: Node
    number: int
    waits: bool = False


def _actions(program: Program) -> Iterator[_Action]:
    """The actions of the ranks of a class, in order."""
    done: set[int] = set()
    needs: list[frozenset[int]] = []  # pending communication that each node waits for
    issued: list[int] = []

    def node(at: int) -> Node:
        return program.prototypes[int(program.prototype[at])]

    def waited(waits: Iterable[int]) -> Iterator[_Action]:
        for at in sorted(waits):
            done.add(at)
            yield _Action(node(at), at, waits=True)

    # data edges only: the order of calls implies the control edges
    for at in range(len(program)):
        edges: list[int] = program.edges[program.starts[at] : program.control[at]].tolist()
        before = [needs[e - 1] for e in edges]
        needed = frozenset[int]().union(*before) - done
        if not _talks(node(at)):
            needs.append(needed)
            continue
        yield from waited(needed)
        yield _Action(node(at), at)
        if node(at).blocking:
            yield from waited([at])
        issued.append(at)
        needs.append(frozenset((at,)) - done)
    yield from waited(set(issued) - done)


# -- what a rank writes ----------------------------------------------------------------------------

_EVERY = "0", "default_pg"


class _Group(NamedTuple):
    """A group as a rank sees it: its name, a description, its number of ranks, the first of them
    and their distance, and the position of the rank, or of the peer. In the text of a class, values
    that differ between ranks are placeholders."""

    name: str
    text: str
    size: int
    start: int | str
    stride: int | str
    place: int | str


class _Class:
    """Writes the ranks of a class. Their actions are one text with placeholders, such as
    `%(place0)d`, for groups and peers."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self._layout = layout
        self._axes: dict[GroupAxes, int] = {}
        self._ways: dict[tuple[str, int], int] = {}
        self._text = "".join(self._lines(program))

    def rank(self, rank: int) -> Iterator[bytes]:
        """The trace of a rank, in parts."""
        head = {"schema": _SCHEMA, "pid": 1, "time": "", "start_ts": 0, "finish_ts": 0}
        yield json.dumps(head)[:-1].encode() + b', "nodes": [\n'
        roots = (json.dumps(_root(number, name)) for number, name in enumerate(_ROOTS, start=1))
        yield ",\n".join((*roots, json.dumps(self._init(rank)))).encode()
        values: dict[str, int] = {}
        for axes, i in self._axes.items():
            name, ranks = self._own(axes, rank)
            values |= {f"name{i}": name, f"start{i}": ranks[0], f"stride{i}": _stride(ranks)}
            values[f"place{i}"] = ranks.index(rank)
        for (over, by), i in self._ways.items():
            values[f"peer{i}"] = self._layout.peer(rank, over, by)
        yield (self._text % values).encode()
        yield b"\n]}\n"

    def _init(self, rank: int) -> dict[str, Any]:
        """The node that lists the groups of the rank."""
        name, text = _EVERY
        size = self._layout.groups.ranks
        groups: list[dict[str, Any]] = [
            {"pg_name": name, "pg_desc": text, "ranks": [], "group_size": size}
        ]
        for axes in self._axes:
            number, ranks = self._own(axes, rank)
            about = {"pg_name": str(number), "pg_desc": "+".join(axes.words)}
            groups.append({**about, "ranks": ranks, "group_size": len(ranks)})
        more = {"backend_config": "cuda:nccl", "group_count": len(groups)}
        values = [json.dumps([{**each, **more} for each in groups])]
        inputs: dict[str, list[Any]] = {"values": values, "shapes": [[]], "types": ["String"]}
        made = {"inputs": inputs, "outputs": _NONE, "attrs": _attributes()}
        return {"id": 3, "name": "## process_group:init ##", "ctrl_deps": 2, **made}

    def _own(self, axes: GroupAxes, rank: int) -> tuple[int, list[int]]:
        """The number and the ranks of a rank's group."""
        groups = self._layout.groups
        return groups.of_rank(axes, rank), groups.row(axes, rank).tolist()

    def _lines(self, program: Program) -> Iterator[str]:
        """The text of the actions of the class: a line for each call and each wait."""
        calls: Counter[tuple[str, bool]] = Counter()
        requests: dict[int, list[Any]] = {}
        for number, action in enumerate(_actions(program), start=len(_ROOTS) + 2):
            node, group = action.node, self._group(action.node)
            if not action.waits:
                stream = group.name, node.is_message
                requests[action.number] = [calls[stream], node.is_message]
                calls[stream] += 1
            request = requests[action.number]
            made = _wait(group, request) if action.waits else self._issued(node, group, request)
            line = json.dumps({"id": number, "name": _NAME, "ctrl_deps": 2, **made})
            yield ",\n" + _HOLE.sub(r"\1", line)

    def _group(self, node: Node) -> _Group:
        """The group of a collective; for a message, all ranks with the position of the peer."""
        if node.is_message:
            at = self._ways.setdefault(node.way, len(self._ways))
            return _Group(*_EVERY, self._layout.groups.ranks, 0, 1, f"%(peer{at})d")
        at = self._axes.setdefault(node.group, len(self._axes))
        holes = (f"%({what}{at})d" for what in ("start", "stride", "place"))
        size, text = node.group.size(self._layout.mesh), "+".join(node.group.words)
        return _Group(f"%(name{at})s", text, size, *holes)

    def _issued(self, node: Node, group: _Group, request: list[Any]) -> dict[str, Any]:
        """The fields of a call: a collective, send or receive."""
        dtype, into, out = elements_of(node, self._layout.mesh)
        if dtype in EIGHT_BITS:  # comm_replay does not know them
            dtype = "Byte"
        kind, split = NCCL.get(node.kind, (node.kind, ""))[0], list[int]()
        if node.kind == "all_to_all":
            split = [into // group.size] * group.size
            into = out = sum(split)
        width, kind_of = SIZES[dtype], f"GenericList[Tensor({TENSORS[dtype]})]"
        tensors: list[dict[str, list[Any]]] = [
            {"values": [[[0, 0, 0, n, width, "cpu"]]], "shapes": [[[n]]], "types": [kind_of]}
            for n in (into, out)
        ]
        values = [request, [group.name, group.text], group.place, kind, split, split]
        inputs = _joined(tensors[0], _constants([*values, group.start, group.stride, group.size]))
        attributes = _attributes(
            group,
            collective_name=kind,
            dtype=dtype,
            in_msg_nelems=into,
            out_msg_nelems=out,
            in_split_size=str(split),
            out_split_size=str(split),
            global_rank_start=group.start,
            global_rank_stride=group.stride,
        )
        return {"inputs": inputs, "outputs": tensors[1], "attrs": attributes}


#: A placeholder for a number, in quotes in JSON.
_HOLE = re.compile(r'"(%\(\w+\)d)"')
_NAME = "record_param_comms"
_ROOTS = ("[pytorch|profiler|execution_trace|process]", "[pytorch|profiler|execution_trace|thread]")
_NONE: dict[str, list[Any]] = {"values": [], "shapes": [], "types": []}


def _root(number: int, name: str) -> dict[str, Any]:
    fields = {"inputs": _NONE, "outputs": _NONE, "attrs": _attributes()}
    return {"id": number, "name": name, "ctrl_deps": 1, **fields}


def _wait(group: _Group, request: list[Any]) -> dict[str, Any]:
    values = [request, [group.name, group.text], group.place, "wait", [], [], -1, -1]
    attributes = _attributes(
        group,
        collective_name="wait",
        dtype="Byte",
        in_msg_nelems=0,
        out_msg_nelems=0,
        in_split_size="[]",
        out_split_size="[]",
    )
    return {"inputs": _constants([*values, 1]), "outputs": _NONE, "attrs": attributes}


def _stride(ranks: Sequence[int]) -> int:
    """The difference between successive ranks, 0 if it is not constant."""
    steps = {later - rank for rank, later in pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else 0


def _constants(values: Sequence[Any]) -> dict[str, list[Any]]:
    """The arguments of a call that are not tensors, with PyTorch's names of their types."""
    kinds = ["Tuple[Int,Bool]", "Tuple[String,String]", "Int", "String"]
    kinds += ["GenericList[]", "GenericList[]", "Int", "Int", "Int"]
    shapes: list[Any] = [[[], []] if kind.startswith("Tuple") else [] for kind in kinds]
    return {"values": [*values], "shapes": shapes, "types": kinds}


def _joined(*parts: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [v for part in parts for v in part[name]] for name in parts[0]}


def _attributes(group: _Group | None = None, **more: int | str) -> list[dict[str, Any]]:
    """The attributes of a node; with a group, also those of communication."""
    usual = {"rf_id": 0, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0}
    types = {"seq_id": "int64"}
    given: dict[str, int | str] = {**usual, "op_schema": "", **more}
    if group is not None:
        given |= {"pg_name": group.name, "pg_desc": group.text, "pg_size": group.size}
    return [
        {"name": name, "type": _type(value, types.get(name, "uint64")), "value": value}
        for name, value in given.items()
    ]


def _type(value: int | str, number: str) -> str:
    return "string" if isinstance(value, str) and not value.endswith(")d") else number


PYTORCH_ET = PytorchEtFormat()
