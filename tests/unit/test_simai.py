"""SimAI's workload text: read by the rules of its reader, summed up, and run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest

from stagec.formats.simai import SIMAI, Workload
from tests.exported import Tried, made, tried, written
from tests.support import LLAMA, MIXTRAL, stagec

WORDS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
}
Columns = tuple[tuple[int, str, int], ...]
#: Nanoseconds of a collective: its kind, the group that the suffix and the column say, bytes.
Network = Callable[[str, str, int], int]


@dataclass
class Text:
    """A workload as SimAI reads it: token by token."""

    pairs: dict[str, int]
    records: list[tuple[str, Columns]]

    def groups(self) -> dict[str, int]:
        """Ranks of its groups."""
        tp, ep = self.pairs["model_parallel_NPU_group:"], self.pairs["ep:"]
        dp = self.pairs["all_gpus:"] // (tp * self.pairs["pp:"])
        return {"TP": tp, "EP": ep, "DP": dp, "DP_EP": dp // ep}


def read(path: Path) -> Text:
    """A workload. Raises ValueError for what its reader does not take."""
    header, count, *rest = path.read_text().split("\n", 2)
    policy, *words = header.split()
    assert policy == "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
    pairs = {key: int(value) for key, value in zip(words[::2], words[1::2], strict=True)}
    tokens = rest[0].split()
    records: list[tuple[str, Columns]] = []
    for start in range(0, len(tokens), 12):
        name, dependency, *numbers, update = tokens[start : start + 12]
        assert (int(dependency), int(update)) == (-1, 0)
        columns = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        records.append((name, tuple((int(t), comm, int(size)) for t, comm, size in columns)))
    assert len(records) == int(count)
    return Text(pairs, records)


def group_of(column: int, comm: str) -> tuple[str, str]:
    """A collective and its group: by the suffix, else TP, or DP in the last column."""
    for suffix, group in (("_DP_EP", "DP_EP"), ("_EP", "EP")):
        if comm.endswith(suffix):
            return WORDS[comm.removesuffix(suffix)], group
    return WORDS[comm], "DP" if column == 2 else "TP"


def finish(text: Text, network: Network) -> int:
    """When the step ends: forward over the records, then backward, where collectives of the last
    column run one after the other beside what follows."""
    now, free = 0, 0

    def took(column: int, comm: str, size: int) -> int:
        return network(*group_of(column, comm), size) if comm != "NONE" else 0

    for _, (forward, _, _) in text.records:
        now += forward[0] + took(0, *forward[1:])
    for _, (_, inputs, weights) in reversed(text.records):
        now += inputs[0] + took(1, *inputs[1:]) + weights[0]
        if weights[1] != "NONE":
            free = max(now, free) + took(2, *weights[1:])
    return max(now, free)


def ring(groups: dict[str, int], rate: int) -> Network:
    """Rings of so many bytes a nanosecond: whole nanoseconds."""

    def took(kind: str, group: str, size: int) -> int:
        n = groups[group]
        return (2 if kind == "all_reduce" else 1) * size * (n - 1) // (n * rate)

    return took


def axes_of(mesh: dict[str, int]) -> dict[str, str]:
    """SimAI's groups by our axes."""
    data = [a for a in mesh if a not in ("tp", "pp")]
    actual = {"+".join(a for a in data if a != "ep"): "DP_EP", "ep": "EP"}
    return {**actual, "+".join(data): "DP", "tp": "TP"}


@tried(Tried(LLAMA, "1f1b"), Tried(MIXTRAL, "ep"), Tried(LLAMA, "fsdp"))
def test_sums_are_those_of_analyze(tried_job: Tried, tmp_path: Path) -> None:
    """Bytes of every group and kind, calls, times, messages; what is left out is said."""
    job, about = made(tried_job)
    folder = written(replace(job, format=SIMAI), tmp_path / "job")
    mesh: dict[str, int] = dict(job.mesh)
    names = axes_of(mesh)
    for number, each in enumerate(about["classes"]):
        text = read(folder / f"job.{each['name']}.txt")
        assert text.pairs["all_gpus:"] == prod(mesh.values())
        actual: Counter[tuple[str, str]] = Counter()
        calls: Counter[tuple[str, str]] = Counter()
        for _, columns in text.records:
            for column, (_, comm, size) in enumerate(columns):
                if comm != "NONE":
                    kind, group = group_of(column, comm)
                    # one group, two names
                    same = group == "EP" and text.groups()["DP_EP"] == 1
                    actual[kind, "DP" if same else group] += size
                    calls[kind, "DP" if same else group] += 1
        expected: Counter[tuple[str, str]] = Counter()
        called: Counter[tuple[str, str]] = Counter()
        for row in each["collectives"]:
            over = names.get("+".join(row["over"]))
            if over is not None:
                expected[row["op"], over] += row["bytes"]
                called[row["op"], over] += row["count"]
        assert (actual, calls) == (expected, called)
        left = [r for r in each["collectives"] if "+".join(r["over"]) not in names]
        program = job.program(number)
        message = " ".join(SIMAI.drops(program, job.layout))
        assert all(f"{row['op']} over {'+'.join(row['over'])}" in message for row in left)
        stages = [m for m in each["p2p"] if m["over"] == "pp"]
        sizes = {m["bytes"] // m["count"] for m in stages if m["dir"] == "send"}
        assert text.pairs.get("pp_comm:", 0) == max(sizes, default=0)
        assert job.durations is not None
        seconds = [job.durations(n) for n in program.nodes if n.is_computation]
        assert sum(c[0] for _, columns in text.records for c in columns) == sum(
            round(1e9 * s) for s in seconds
        )


@pytest.mark.parametrize("strategy", ["tp", "1f1b"])
def test_a_step_without_data_parallelism_is_a_sum(strategy: str, tmp_path: Path) -> None:
    """Every collective blocks, so a step is its computations and its collectives."""
    job, about = made(Tried(LLAMA, strategy))
    folder = written(replace(job, format=SIMAI), tmp_path / "job")
    for number, each in enumerate(about["classes"]):
        text = read(folder / f"job.{each['name']}.txt")
        computing = sum(
            round(1e9 * job.durations(n))  # type: ignore[misc]
            for n in job.program(number).nodes
            if n.is_computation
        )
        waiting = sum(
            (2 if row["op"] == "all_reduce" else 1) * row["bytes"] // 2
            for row in each["collectives"]
            if row["over"] == ["tp"]
        )
        assert finish(text, ring(text.groups(), 1)) == computing + waiting


@pytest.mark.parametrize(("rate", "hidden"), [(10**9, True), (1, False)])
def test_reductions_hide_behind_what_is_left(rate: int, hidden: bool, tmp_path: Path) -> None:
    """With one layer a bucket that is fast costs nothing; slow ones follow each other from the
    moment at which the first is issued."""
    words = ("--dp", "2", "--set", "L=1,S=128,B=2", "--ddp-bucket", "400000000")
    done = stagec(
        "compile", LLAMA, *words, "--format", "simai", "--machine", "h100-sxm", "-o", tmp_path / "j"
    )
    assert done.code == 0, done.err
    text = read(tmp_path / "j" / "llama3-8b.stage0.txt")
    network = ring(text.groups(), rate)
    order = [columns for _, columns in text.records][::-1]
    first = next(i for i, columns in enumerate(order) if columns[2][1] != "NONE")
    computing = sum(c[0] for columns in order for c in columns)
    later = sum(c[0] for columns in order[first + 1 :] for c in columns[1:])
    slow = sum(
        network("all_reduce", "DP", columns[2][2]) for columns in order if columns[2][1] != "NONE"
    )
    assert finish(text, network) == (computing if hidden else computing - later + slow)
    assert (slow < later) == hidden


def test_microbatches_repeat_their_records(tmp_path: Path) -> None:
    """What one microbatch is stands there for each, with its number in the names."""
    job, _ = made(Tried(LLAMA, "1f1b"))
    folder = written(replace(job, format=SIMAI), tmp_path / "job")
    text = read(folder / "job.stage0.txt")
    assert text.pairs["ga:"] == 4
    layers = Counter(n.split("/")[1] for n, _ in text.records if n.startswith("forward/"))
    assert len(layers) == 4
    assert len({*layers.values()}) == 1
    forward = [columns[0] for name, columns in text.records if name.startswith("forward/mb")]
    quarter = len(forward) // 4
    assert forward == forward[:quarter] * 4


def test_records_stand_where_their_layer_does() -> None:
    """Forward in the order of the program, backward in the reverse order."""
    job, _ = made(Tried(LLAMA, "tp-sp-dp"))
    program = job.program(0)
    groups = SIMAI._groups(job.layout)  # pyright: ignore[reportPrivateUsage]
    lines = [line for block in Workload(program, groups, lambda _: 1).lines() for line in block]
    names = [line.split("\t")[0] for line in lines]
    where = {n.name: n.id for n in program.nodes}
    forward = [where[n] for n in names if n.startswith("forward/")]
    assert forward == sorted(forward)
    backward = [where[n] for n in names if n in where and not n.startswith("forward/")]
    assert backward == sorted(backward, reverse=True)
    assert len(set(names)) == len(names)


def test_a_step_of_serving_is_forward(tmp_path: Path) -> None:
    """Its records have nothing in the other columns."""
    words = ("--serve", "decode", "--batch", "8", "--context", "128", "--tp", "2", "--set", "L=2")
    folder = tmp_path / "j"
    done = stagec(
        "compile", LLAMA, *words, "--machine", "h100-sxm", "--format", "simai", "-o", folder
    )
    assert done.code == 0, done.err
    text = read(folder / "llama3-8b.stage0.txt")
    assert text.records
    assert {columns[1:] for _, columns in text.records} == {((0, "NONE", 0),) * 2}
    computing = sum(columns[0][0] for _, columns in text.records)
    assert finish(text, lambda kind, group, size: 0) == computing


def test_options_name_axes(tmp_path: Path) -> None:
    words = ("compile", LLAMA, "--tp", "2", "--set", "L=1", "--machine", "h100-sxm")
    done = stagec(*words, "--format", "simai{tp=model}", "-o", tmp_path / "j")
    assert done.code == 1
    assert "option 'tp' of format 'simai' names the axis 'model', and the mesh has tp" in done.err
    done = stagec(*words, "--format", "simai{tp=dp}", "-o", tmp_path / "j")
    assert done.code == 1
    bare = stagec("compile", LLAMA, "--set", "L=1", "--format", "simai", "-o", tmp_path / "j")
    assert "needs the times of computations" in bare.err
    assert not (tmp_path / "j").exists()


def test_what_is_not_carried_is_reported(tmp_path: Path) -> None:
    words = ("compile", LLAMA, "--cp", "2", "--pp", "2", "--microbatches", "2", "--set", "L=2")
    done = stagec(*words, "--machine", "h100-sxm", "--format", "simai", "-o", tmp_path / "j")
    assert done.code == 0, done.err
    assert "remark: simai: messages over cp: SimAI knows those of stages" in done.err
    assert "all_reduce over pp: SimAI's groups are TP, DP, EP and DP_EP" in done.err
