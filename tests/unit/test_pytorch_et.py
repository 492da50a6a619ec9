"""Host execution traces of PyTorch, read by the rules of param's comm_replay: communication is that
of `stagec analyze`, and all ranks call the same collectives in the same order."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.exported import WRITTEN, Tried, classes, tiny, traffic_of
from tests.support import stagec

#: What comm_replay has tensors of: `dtypeMap` of comms_utils.py.
SIZE = {"bfloat16": 2, "float": 4, "byte": 1, "int": 4, "long": 8, "half": 2, "bool": 1, "char": 1}
#: As `paramToCommName` calls them.
NAMES = {
    "allreduce": "all_reduce",
    "allgatherbase": "all_gather",
    "reducescatterbase": "reduce_scatter",
    "alltoallv": "all_to_all",
    "send": "send",
    "recv": "recv",
}


@dataclass(frozen=True)
class Call:
    """A communication as comm_replay runs it; `over` is the description of its group."""

    kind: str
    ranks: tuple[int, ...]
    over: str
    into: int
    out: int
    peer: int


@dataclass
class Trace:
    """A rank: its calls in order, and how many of them are asynchronous."""

    calls: list[Call]
    asynchronous: int


def read(path: Path, rank: int, world: int) -> Trace:
    """The rules of et_replay/comm/commsTraceParser.py at 1e115ff."""
    trace = json.loads(path.read_text())
    assert trace["schema"] == "1.1.0-chakra.0.0.4"
    nodes = trace["nodes"]
    assert [n["id"] for n in nodes] == [*range(1, len(nodes) + 1)]
    groups: dict[str, list[int]] = {}
    calls: list[Call] = []
    open_requests: set[tuple[str, int, bool]] = set()
    waited = 0
    for node in nodes:
        attrs: dict[str, Any] = {a["name"]: a["value"] for a in node["attrs"]}
        assert {"rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema"} <= {*attrs}
        for side in ("inputs", "outputs"):
            assert len({len(values) for values in node[side].values()}) == 1
        if "process_group:init" in node["name"]:
            for pg in json.loads(node["inputs"]["values"][0]):
                assert pg["pg_name"].isdecimal()
                groups[pg["pg_name"]] = pg["ranks"] or [*range(pg["group_size"])]
                assert len(groups[pg["pg_name"]]) == pg["group_size"]
        if node["name"] != "record_param_comms":
            continue
        ranks, values = groups[attrs["pg_name"]], node["inputs"]["values"]
        assert rank in ranks
        assert attrs["pg_size"] == len(ranks)
        base = 0 if attrs["collective_name"] == "wait" else 1
        sequence, is_p2p = values[base]
        request = attrs["pg_name"], sequence, is_p2p
        if attrs["collective_name"] == "wait":
            open_requests.remove(request)
            waited += 1
            continue
        assert request not in open_requests
        open_requests.add(request)
        calls.append(_call(node, attrs, ranks, values))
    assert not open_requests
    assert groups["0"] == [*range(world)]
    return Trace(calls, waited)


def _call(node: Any, attrs: dict[str, Any], ranks: list[int], values: Any) -> Call:
    kind = NAMES["".join(c for c in attrs["collective_name"].lower() if c.isalpha())]
    place: int = values[3]
    if kind not in ("send", "recv"):
        assert (
            ranks == [*range(ranks[0], ranks[-1] + 1, attrs["global_rank_stride"] or 1)]
            or not attrs["global_rank_stride"]
        )
    width = SIZE[attrs["dtype"].lower()]
    if kind == "all_to_all":
        for side in ("in", "out"):
            assert sum(json.loads(attrs[f"{side}_split_size"])) == attrs[f"{side}_msg_nelems"]
            assert len(json.loads(attrs[f"{side}_split_size"])) == len(ranks)
    tensor: list[int]
    ((tensor,),) = node["inputs"]["values"][:1]
    assert tensor[3:5] == [attrs["in_msg_nelems"], width]
    into, out = (int(attrs[f"{side}_msg_nelems"]) * width for side in ("in", "out"))
    peer: int = ranks[place]
    if kind in ("send", "recv"):
        return Call(kind, (), "", into, out, peer)
    gathers, scatters = kind == "all_gather", kind == "reduce_scatter"
    assert into * (len(ranks) if gathers else 1) == out * (len(ranks) if scatters else 1)
    return Call(kind, tuple(ranks), attrs["pg_desc"], into, out, -1)


def compiled(tmp_path: Path, words: Sequence[str], *more: str) -> Path:
    folder = tmp_path / "et"
    done = stagec("compile", *words, "--format", "pytorch-et", "-o", folder, "--quiet", *more)
    assert done.code == 0, done.err
    return folder


@WRITTEN
def test_calls_and_bytes_are_those_of_analyze(tried_job: Tried, tmp_path: Path) -> None:
    job = tried_job.words
    actual = classes(job)
    world = sum(each["count"] for each in actual)
    folder = compiled(tmp_path, job)
    traces = {rank: read(folder / f"rank-{rank}.json", rank, world) for rank in range(world)}
    for each in actual:
        traffic: dict[tuple[str, str], Counter[str]] = {}
        calls = traces[each["example_rank"]].calls
        for call in calls:
            size = max(call.into, call.out)
            traffic.setdefault((call.kind, call.over), Counter()).update(calls=1, bytes=size)
        assert {k: (v["calls"], v["bytes"]) for k, v in traffic.items()} == traffic_of(each)
        assert traces[each["example_rank"]].asynchronous == len(calls)
    check_agreement(traces)


def check_agreement(traces: dict[int, Trace]) -> None:
    """All members of a group call the same in the same order, and each message is received."""
    called: defaultdict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(dict)
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, trace in traces.items():
        for call in trace.calls:
            if call.kind == "send":
                sent[rank, call.peer].append(call.into)
            elif call.kind == "recv":
                received[call.peer, rank].append(call.out)
            else:
                called[call.ranks].setdefault(rank, []).append(call)
    assert sent == received
    for ranks, of_rank in called.items():
        assert sorted(of_rank) == sorted(ranks)
        first = next(iter(of_rank.values()))
        assert all(calls == first for calls in of_rank.values())


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("--tp", "2", "--no-async-tp"), 1),
        (("--dp", "2", "--ddp-bucket", "64"), 2),
        (("--pp", "2", "--microbatches", "4"), 3),
    ],
)
def test_waits_stand_where_a_result_is_needed(
    words: Sequence[str], most: int, tmp_path: Path
) -> None:
    """Calls that are under way when another one is waited for: a blocking collective is waited for
    at once, buckets of gradients are reduced and messages sent beside what follows."""
    folder = compiled(tmp_path, tiny("llama3-8b", *words))
    nodes = json.loads((folder / "rank-0.json").read_text())["nodes"]
    under_way, actual = 0, list[int]()
    for node in nodes:
        if node["name"] == "record_param_comms":
            is_wait = any(a["value"] == "wait" for a in node["attrs"])
            actual += [under_way] if is_wait else []
            under_way += -1 if is_wait else 1
    assert under_way == 0
    assert max(actual) >= most
    assert most > 1 or {*actual} == {1}


def test_an_archive_and_some_ranks(tmp_path: Path) -> None:
    """Types are not in an archive: elements are bytes. Ranks are chosen."""
    job = tiny("llama3-8b", "--tp", "2", "--pp", "2", "--microbatches", "2")
    assert stagec("compile", *job, "--archive", tmp_path / "job", "--quiet").code == 0
    done = stagec(
        "materialize",
        tmp_path / "job",
        "--format",
        "pytorch-et",
        "-o",
        tmp_path / "out",
        "--only-ranks",
        "1-2",
    )
    assert done.code == 0, done.err
    assert "remark: pytorch-et: computations, and copies" in done.err
    assert {p.name for p in (tmp_path / "out").glob("rank*")} == {"rank-1.json", "rank-2.json"}
    folder = compiled(tmp_path, job)
    for rank in (1, 2):
        one, two = (read(f / f"rank-{rank}.json", rank, 4) for f in (folder, tmp_path / "out"))
        assert one == two


@pytest.mark.long
def test_a_large_job_is_bounded(tmp_path: Path) -> None:
    """The trace of a rank grows with its own calls, not with ranks."""
    sizes: list[int] = []
    for dp in (4, 64):
        words = tiny("llama3-8b", "--tp", "2", "--dp", str(dp), B=128)
        folder = compiled(tmp_path / str(dp), words, "--only-ranks", "0")
        sizes.append((folder / "rank-0.json").stat().st_size)
    assert sizes[1] < 1.2 * sizes[0]
