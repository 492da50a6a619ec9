"""GOAL schedules: read back from text and from binary, summed up, matched and run.

With LOGGOPSIM=BINARY in the environment (spcl/atlahs, sim/LogGOPSim) the real simulator runs some.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import zlib
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from math import ceil, log2, prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.formats.base import Durations, Layout, ModelJob
from stagec.formats.goal import format as format_module
from stagec.formats.goal.format import GoalFormat, GoalSchedule, Patched, binary_head, binary_of
from stagec.formats.goal.format import text_of as text_of_ops
from stagec.formats.goal.ops import CALC, COLLECTIVE_TAG, RECV, SEND, Ops, Place
from stagec.formats.messages import ALGORITHMS, KINDS, expansion, other_end, part_bytes, shape_of
from stagec.program.groups import GroupAxes, number_groups
from stagec.program.nodes import Ints, Node, Program
from stagec.traces.emit import EmittedJob
from tests.exported import JOBS, Tried, made, tried, written
from tests.goal import LogGP, Op, Rank, parse, unpack
from tests.support import GPT, LLAMA, MIXTRAL, crossed, examples, stagec


def text_of(
    job: EmittedJob, folder: Path, collectives: str = "ring", *, binary: bool = False
) -> Path:
    """The file of a job."""
    written(replace(job, format=GoalFormat(collectives, binary)), folder)
    return folder / ("job.bin" if binary else "job.goal")


def algorithm_of(tried_job: Tried) -> str:
    """Each job takes one of the algorithms."""
    return ALGORITHMS[JOBS.index(tried_job) % len(ALGORITHMS)]


# -- all of a job ----------------------------------------------------------------------------------


@tried(Tried(LLAMA, "1f1b"), Tried(MIXTRAL, "ep"), Tried(LLAMA, "fsdp"))
def test_sums_are_those_of_analyze(tried_job: Tried, tmp_path: Path) -> None:
    """Bytes over all axes, messages, nanoseconds; both files say the same; and all runs to its end,
    with sends that wait and with sends that do not."""
    job, about = made(tried_job)
    algorithm = algorithm_of(tried_job)
    ranks = parse(text_of(job, tmp_path / "text", algorithm).read_text())
    assert len(ranks) == about["ranks"]
    binary = text_of(job, tmp_path / "binary", algorithm, binary=True)
    assert unpack(binary.read_bytes()) == ranks
    assert_matched(ranks)
    expected: Counter[str] = Counter()
    for number, each in enumerate(about["classes"]):
        assert job.durations is not None
        nodes = [n for n in job.program(number).nodes if n.is_computation]
        computing = sum(round(1e9 * job.durations(n)) for n in nodes)
        messages: Counter[tuple[str, str]] = Counter()
        for row in each["p2p"]:
            messages[row["dir"], "count"] += row["count"]
            messages[row["dir"], "bytes"] += row["bytes"]
        for row in each["collectives"]:
            over, n = "+".join(row["over"]), row["group_size"]
            rounds = 2 if row["op"] == "all_reduce" else 1
            all_ranks = each["count"] * row["bytes"] * rounds * (n - 1)
            assert all_ranks % n == 0
            expected[over] += all_ranks // n
        here: list[int] = job.members[number].tolist()
        for rank in here:
            ops = ranks[rank]
            assert sum(op.size for op in ops if op.way == "calc") == computing
            for way, cpu in (("send", 2), ("recv", 3)):
                mine = [op.size for op in ops if op.cpu == cpu]
                assert len(mine) == messages[way, "count"]
                assert sum(mine) == messages[way, "bytes"]
    names = ["+".join(axes.words) for axes in job.groups.first]
    actual: Counter[str] = Counter()
    for ops in ranks:
        for op in ops:
            if op.way == "send" and op.cpu == 1:
                actual[names[op.tag - COLLECTIVE_TAG]] += op.size
    assert actual == expected
    for threshold in (0, 1 << 40):
        ends = LogGP(L=1000, G=0.04, S=threshold).ends(ranks)
        assert len(ends) == len(ranks)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pods_are_one_schedule(algorithm: str, tmp_path: Path) -> None:
    """Messages between pods are those of analyze, and nothing else joins them; the pod that decodes
    waits for them; an archive gives the same but for times."""
    pods = ("--prefill", "tp=4,pp=2,microbatches=2", "--decode", "tp=2,dp=2")
    step = ("--serve", "disaggregated", *pods, "--batch", "8", "--prompt", "64")
    words = ("llama3-8b", "--set", "L=2,D=64,H=4,G=4,K=16,F=64,V=64", *step)
    form = f"goal{{collectives={algorithm}}}"
    asked = (*words, "--machine", "h100-sxm", "--quiet")
    assert stagec("compile", *asked, "--format", form, "-o", tmp_path / "out").code == 0
    ranks = parse((tmp_path / "out" / "llama3-8b.goal").read_text())
    assert_matched(ranks)
    crossing = [op.size for ops in ranks[:8] for op in ops if op.way == "send" and op.peer >= 8]
    about = json.loads(stagec("analyze", *words, "--json").out)["handover"]
    assert (len(crossing), sum(crossing)) == (about["messages"], about["bytes"])
    assert not [op for ops in ranks[8:] for op in ops if op.way == "send" and op.peer < 8]
    near, far = (LogGP(L=n, G=0.04, S=1 << 40).ends(ranks)[8:] for n in (0, 1 << 30))
    assert min(far) > max(near) + (1 << 30)
    archive = tmp_path / "job.stagec"
    assert stagec("compile", *asked, "--archive", archive).code == 0
    done = stagec("materialize", archive, "--format", form, "-o", tmp_path / "again", "--quiet")
    assert done.code == 0, done.err
    again = parse((tmp_path / "again" / "llama3-8b.goal").read_text())
    assert [[untimed(op) for op in ops] for ops in again] == [
        [untimed(op) for op in ops] for ops in ranks
    ]


def untimed(op: Op) -> Op:
    """Archives have whole microseconds."""
    return replace(op, size=0) if op.way == "calc" else op


def assert_matched(ranks: list[Rank]) -> None:
    """Sends and receives of two ranks and a tag are as many, of equal sizes in their order."""
    sent: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, ops in enumerate(ranks):
        for op in ops:
            if op.way == "send":
                sent[rank, op.peer, op.tag].append(op.size)
            if op.way == "recv":
                received[op.peer, rank, op.tag].append(op.size)
    assert sent == received


@pytest.mark.skipif("LOGGOPSIM" not in os.environ, reason="LOGGOPSIM names no simulator")
@tried()
def test_as_the_simulator_has_it(tried_job: Tried, tmp_path: Path) -> None:
    """LogGOPSim reads the file and ends. It takes operations of one moment in any order, which
    moves an end by some messages; without ties it says what the stand-in says."""
    job, _ = made(tried_job)
    path = text_of(job, tmp_path / "binary", binary=True)
    words = [
        os.environ["LOGGOPSIM"],
        "-f",
        str(path),
        "-L",
        "1000",
        "-o",
        "0",
        "-g",
        "0",
        "-G",
        "0.04",
    ]
    for threshold in (0, 1 << 30):
        done = subprocess.run(
            [*words, "-S", str(threshold)], capture_output=True, text=True, check=True
        )
        theirs = [int(end) for end in re.findall(r"Host \d+: (\d+)", done.stdout)]
        ours = LogGP(L=1000, G=0.04, S=threshold).ends(unpack(path.read_bytes()))
        if len(ours) > 1:
            assert theirs == pytest.approx(ours, rel=1e-3)


# -- collectives -----------------------------------------------------------------------------------


@dataclass
class One:
    """A job of one class with this program."""

    layout: Layout
    only: Program
    name: str = "one"
    machine: None = None
    model: None = None
    models: tuple[ModelJob, ...] = ()
    durations: Durations | None = None

    @property
    def members(self) -> list[Ints]:
        """All ranks."""
        return [np.arange(self.layout.groups.ranks, dtype=np.int64)]

    def durations_of(self, number: int) -> Durations | None:
        return self.durations

    def layout_of(self, number: int) -> Layout:
        """That of all ranks."""
        return self.layout

    def program(self, number: int) -> Program:
        """That of all ranks."""
        assert number == 0
        return self.only


def one_collective(kind: str, size: int, mesh: dict[str, int], over: str) -> One:
    """A job whose ranks do one collective over an axis, and nothing else."""
    axes = GroupAxes((over,))
    zero: Ints = np.zeros(1, dtype=np.int64)
    none: Ints = np.zeros(0, dtype=np.int64)
    node = Node(kind, "y", "forward", size, group=axes)
    program = Program("one", [node], zero, zero, zero, np.zeros(2, dtype=np.int64), zero, none)
    ranks = np.arange(prod(mesh.values()), dtype=np.int64)
    return One(Layout(mesh, number_groups(mesh, [([axes], ranks)])), program)


def run(job: One, algorithm: str) -> list[Rank]:
    """The operations of all ranks."""
    return parse(b"".join(map(bytes, GoalSchedule(job, algorithm).text())).decode())


@examples(60)
@given(
    kind=st.sampled_from(KINDS),
    algorithm=st.sampled_from(ALGORITHMS),
    members=st.integers(2, 9),
    size=st.integers(1, 100),
    other=st.integers(1, 3),
)
def test_every_member_gets_what_it_needs(
    kind: str, algorithm: str, members: int, size: int, other: int
) -> None:
    """All members together send (n-1) times the buffer, twice that for all_reduce; groups stay
    among themselves; nothing waits for ever."""
    job = one_collective(kind, size, {"a": other, "b": members}, "b")
    ranks = run(job, algorithm)
    assert_matched(ranks)
    buffer = size if algorithm == "tree" and kind == "all_reduce" else max(size, members)
    rounds = 2 if kind == "all_reduce" else 1
    for first in range(0, other * members, members):
        group = ranks[first : first + members]
        sent = [op.size for ops in group for op in ops if op.way == "send"]
        assert sum(sent) == rounds * (members - 1) * buffer
        peers = {op.peer for ops in group for op in ops if op.way != "calc"}
        assert peers <= set(range(first, first + members))
    for threshold in (0, 1 << 40):
        LogGP(L=10, G=1, S=threshold).ends(ranks)


Sets = dict[int, set[int]]


@dataclass
class Parts:
    """A collective with sets instead of numbers: by member and part, whose addends are in it, and
    who has sent it here."""

    kind: str
    algorithm: str
    members: int

    def __post_init__(self) -> None:
        n = range(self.members)
        own = self.kind == "all_gather"
        self.held: list[Sets] = [{i: {p} if i == p or not own else set() for i in n} for p in n]
        self.senders: list[Sets] = [{i: {p} for i in n} for p in n]
        self.wires: defaultdict[tuple[int, int], deque[Sets]] = defaultdict(deque)
        self.at = [0] * self.members
        shapes = (shape_of(self.kind, self.members, self.algorithm, p) for p in n)
        self.ends = [expansion(self.kind, self.members, self.algorithm, s) for s in shapes]

    def run(self) -> None:
        """Let members go on by turns until none can."""
        while any([self.step(p) for p in range(self.members)]):  # noqa: C419
            pass
        assert self.at == [len(ends) for ends in self.ends]
        assert not any(self.wires.values())

    def step(self, p: int) -> bool:
        """The next end of a member, if it has one whose message is there."""
        if self.at[p] == len(self.ends[p]):
            return False
        end = self.ends[p][self.at[p]]
        assert all(before < self.at[p] for before in end.after)
        if end.way != "join":
            other = other_end(end.other, p, self.members)
            parts = [*range(self.members)] if end.part is None else [(p + end.part) % self.members]
            if end.way == "send":
                self.wires[p, other].append({part: {*self.held[p][part]} for part in parts})
            elif not self.wires[other, p]:
                return False
            else:
                sent = self.wires[other, p].popleft()
                assert [*sent] == parts
                for part, who in sent.items():
                    self.held[p][part] |= who
                    self.senders[p][part] |= {other}
        self.at[p] += 1
        return True


@crossed(kind=KINDS, algorithm=ALGORITHMS, members=(2, 3, 4, 7))
def test_parts_arrive_where_they_belong(kind: str, algorithm: str, members: int) -> None:
    parts = Parts(kind, algorithm, members)
    parts.run()
    everyone = set(range(members))
    for p in range(members):
        if kind == "all_reduce":
            assert all(who == everyone for who in parts.held[p].values())
        if kind == "reduce_scatter":
            assert parts.held[p][p] == everyone
        if kind == "all_gather":
            assert parts.held[p] == {part: {part} for part in range(members)}
        if kind == "all_to_all":
            assert parts.senders[p][p] == everyone


@crossed(members=(2, 3, 5, 8), kind=KINDS)
def test_a_ring_takes_its_closed_form(members: int, kind: str) -> None:
    """n-1 steps, for all_reduce twice, of a latency and a part's bytes; pairs go one after the
    other into the network."""
    part, latency, byte = 1000, 700, 2
    job = one_collective(kind, part * members, {"dp": members}, "dp")
    ends = LogGP(L=latency, G=byte).ends(run(job, "ring"))
    wire = (part - 1) * byte
    if kind == "all_to_all":
        assert ends == [(members - 1) * wire + latency] * members
    else:
        steps = (2 if kind == "all_reduce" else 1) * (members - 1)
        assert ends == [steps * (latency + wire)] * members


@pytest.mark.parametrize("members", [2, 3, 7, 15])
def test_a_tree_takes_its_closed_form(members: int) -> None:
    """Up each level a message; down each level two of them, one after the other: the last leaf
    hears of it at the end."""
    size, latency, byte = 1000, 700, 2
    job = one_collective("all_reduce", size, {"dp": members}, "dp")
    ends = LogGP(L=latency, G=byte).ends(run(job, "tree"))
    levels, wire = ceil(log2(members + 1)) - 1, (size - 1) * byte
    down = wire if members == 2 else 2 * wire
    assert max(ends) == levels * (2 * latency + wire + down)


def test_parts_add_up() -> None:
    for size in range(1, 30):
        for n in range(1, 9):
            parts = [part_bytes(size, n, i) for i in range(n)]
            assert sum(parts) == max(size, n)
            assert sorted(parts, reverse=True) == parts
            assert max(parts) - min(parts) <= 1


# -- schedules -------------------------------------------------------------------------------------


def attention_only(node: Node) -> float:
    """Seconds: one nanosecond forward, two backward, in the kernels of attention alone."""
    (kernel,) = node.kernels
    return {"attention": 1e-9, "attention_backward": 2e-9}.get(kernel.kind, 0.0)


@crossed(
    schedule=("gpipe", "1f1b", "interleaved"), stages=(2, 4), microbatches=(4, 8), model=(LLAMA,)
)
def test_a_pipeline_takes_its_closed_form(
    schedule: str, stages: int, microbatches: int, model: str, tmp_path: Path
) -> None:
    """Messages that take no time: (m + (p-1)/v)(F + B) for v chunks a stage."""
    chunks = 2 if schedule == "interleaved" else 1
    options = {"schedule": schedule, **({"chunks": chunks} if chunks > 1 else {})}
    layers = 2 * stages
    job, _ = made(
        Tried(model, "one"), pp=stages, microbatches=microbatches, sizes={"L": layers}, **options
    )
    ranks = parse(text_of(replace(job, durations=attention_only), tmp_path / "job").read_text())
    stage = 3 * layers // stages
    idle = (stages - 1) * stage // chunks
    assert max(LogGP().ends(ranks)) == microbatches * stage + idle


def test_without_a_network_a_step_is_its_computations(tmp_path: Path) -> None:
    job, _ = made(Tried(GPT, "tp-sp-dp"))
    ranks = parse(text_of(job, tmp_path / "job").read_text())
    computing = [sum(op.size for op in ops if op.way == "calc") for ops in ranks]
    assert LogGP().ends(ranks) == computing


# -- files -----------------------------------------------------------------------------------------


def test_binary_is_what_the_converter_writes() -> None:
    """The example of GOAL's documentation, as txt2bin writes it: 277 bytes with this checksum. The
    byte of the last nic is 0 in all files."""

    def ops(*rows: tuple[int, int, int, int], edges: list[tuple[int, int]]) -> Ops:
        type_, size, cpu, tag = np.array(rows, dtype=np.int64).T
        source, target = np.array(edges, dtype=np.int64).T
        peer = np.where(type_ == CALC, -1, 0)
        return Ops(type_, size, cpu, tag, peer, 0 * peer - 1, source, target, [("dp", 1)])

    first = ops((CALC, 1000, 0, 0), (SEND, 4096, 1, 7), (CALC, 500, 0, 0), edges=[(1, 0), (2, 0)])
    second = ops((RECV, 4096, 0, 7), (CALC, 2000, 0, 0), edges=[(1, 0)])
    axes = GroupAxes(("dp",))
    layout = Layout({"dp": 2}, number_groups({"dp": 2}, [([axes], np.arange(2))]))
    parts = [bytes(binary_of(o).rank(Place(layout, r))) for r, o in enumerate((first, second))]
    data = binary_head([len(p) for p in parts], 2) + b"".join(parts)
    assert unpack(data)[0][1].peer == 1
    assert (len(data), zlib.crc32(data)) == (277, 3303597246)


@crossed(algorithm=ALGORITHMS)
def test_bytes_are_made_once_for_a_class(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks; a tree has a few shapes."""
    calls: list[int] = []

    def counted(ops: Ops, ranks: int) -> Patched:
        calls.append(len(ops))
        return text_of_ops(ops, ranks)

    monkeypatch.setattr(format_module, "text_of", counted)
    actual: list[int] = []
    for ranks in (16, 64):
        calls.clear()
        run(one_collective("all_reduce", 64, {"dp": ranks}, "dp"), algorithm)
        actual.append(len(calls))
    assert actual == ([4, 4] if algorithm == "tree" else [1, 1])


def test_numbers_that_differ_are_as_wide_in_all_ranks(tmp_path: Path) -> None:
    """Twelve ranks, and a buffer that does not divide."""
    job = one_collective("all_reduce", 25, {"dp": 12}, "dp")
    text = b"".join(map(bytes, GoalSchedule(job, "ring").text())).decode()
    assert "send 02b to 01 tag 1073741824 cpu 1" in text
    assert len({len(part) for part in text.split("rank ")[2:11]}) == 1
    ranks = parse(text)
    assert_matched(ranks)
    sends = [{op.peer for op in ops if op.way == "send"} for ops in ranks]
    assert sends == [{(rank + 1) % 12} for rank in range(12)]


@pytest.mark.parametrize(
    ("format_", "problem"),
    [
        ("goal{collectives=rings}", "expects ring, tree, pairwise, found 'rings'"),
        ("goal{binary=1}", "expects true or false"),
    ],
)
def test_options_are_checked(format_: str, problem: str, tmp_path: Path) -> None:
    words = ("compile", LLAMA, "--set", "L=1", "--machine", "h100-sxm", "--format", format_)
    done = stagec(*words, "-o", tmp_path / "j")
    assert done.code == 1
    assert problem in done.err
    some = stagec(*words[:-1], "goal", "--only-ranks", "0", "-o", tmp_path / "j")
    assert "writes all ranks of a job" in some.err


@pytest.mark.long
def test_an_archive_becomes_a_schedule(tmp_path: Path) -> None:
    """With the times of its records, which are whole microseconds."""
    words = ("compile", LLAMA, "--tp", "2", "--pp", "2", "--set", "L=2", "--machine", "h100-sxm")
    assert stagec(*words, "--archive", tmp_path / "file", "--quiet").code == 0
    done = stagec("materialize", tmp_path / "file", "--format", "goal", "-o", tmp_path / "a")
    assert done.code == 0, done.err
    assert stagec(*words, "--format", "goal", "-o", tmp_path / "b", "--quiet").code == 0
    ours, theirs = (parse((tmp_path / d / "llama3-8b.goal").read_text()) for d in "ab")
    for a, b in zip(ours, theirs, strict=True):
        assert [(op.way, op.peer, op.tag, op.cpu, op.waits) for op in a] == [
            (op.way, op.peer, op.tag, op.cpu, op.waits) for op in b
        ]
        assert all(
            abs(x.size - y.size) <= 1000 if x.way == "calc" else x.size == y.size
            for x, y in zip(a, b, strict=True)
        )


def test_copies_to_a_host_take_a_machine(tmp_path: Path) -> None:
    words = ("compile", LLAMA, "--pp", "2", "--offload", "activations", "--memory-nodes")
    sizes = ("--set", "L=2,S=128,B=2", "--microbatches", "2", "--format", "goal", "-o")
    done = stagec(*words, "--machine", "h100-sxm", *sizes, tmp_path / "j", "--quiet")
    assert done.code == 0, done.err
    ranks = parse((tmp_path / "j" / "llama3-8b.goal").read_text())
    assert {op.cpu for op in ranks[0] if op.way == "calc"} == {0, 1, 4, 5}
    assert all(op.size > 0 for ops in ranks for op in ops if op.cpu in (4, 5))
