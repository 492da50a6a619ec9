"""`stagec convert`: the same records in another form, and timelines of traces with durations."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as public_untyped

from stagec.formats.chakra.nodes import AttrValue, NodeKind, TraceNode, encode_metadata, encode_node
from stagec.formats.chakra.record_files import read_trace
from tests.support import stagec

public: Any = public_untyped
WORDS = ("llama3-8b", "--tp", "2", "--pp", "2", "--set", "L=2", "--quiet")
COMP: dict[str, AttrValue] = {"is_cpu_op": False, "num_ops": 7, "tensor_size": 9}
COLL: dict[str, AttrValue] = {"is_cpu_op": False, "comm_type": 0, "comm_size": 64, "pg_name": "1"}
#: The example of `stagec.formats.timeline.recorded`.
NODES = (
    TraceNode(1, "forward/a", NodeKind.COMP, (), (), COMP, 3),
    TraceNode(2, "forward/b", NodeKind.COLL, (1,), (), COLL, 5),
    TraceNode(3, "forward/c", NodeKind.COMP, (), (), COMP, 4),
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job") / "job"
    assert stagec("compile", *WORDS, "-o", folder).code == 0
    return folder


def written(folder: Path, nodes: Sequence[TraceNode], rank: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"small.{rank}.et"
    path.write_bytes(encode_metadata("0.0.4") + b"".join(map(encode_node, nodes)))
    (folder / "small.json").write_text('{"1": [0, 1]}')
    return path


def test_a_folder_there_and_back(job: Path, tmp_path: Path) -> None:
    """To JSON, packed, and back: the same bytes, with the groups."""
    text, again = tmp_path / "text", tmp_path / "again"
    assert stagec("convert", job, "-o", text, "--to", "json", "--gzip").code == 0
    names = {f"llama3-8b.{rank}.json.gz" for rank in range(4)}
    assert {p.name for p in text.iterdir()} == {*names, "llama3-8b.json"}
    assert stagec("check", text).code == 0
    assert stagec("convert", text, "-o", again, "--to", "chakra").code == 0
    for path in again.iterdir():
        assert path.read_bytes() == (job / path.name).read_bytes(), path.name
    assert stagec("check", again).code == 0


def test_a_file_keeps_what_stagec_does_not_know(tmp_path: Path) -> None:
    """Fields that no `TraceNode` has: operands, metadata, unset values."""
    from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata, Node

    metadata = GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val="1.1.1-chakra.0.0.4")
    node = Node(id=7, name="aten::mm", type="COMP_NODE", start_time_micros=3, duration_micros=4)
    node.inputs.values = "[1]"
    node.attr.add(name="no value")
    parts = (m.SerializeToString() for m in (metadata, node))
    path = tmp_path / "x.0.et"
    path.write_bytes(b"".join(bytes([len(p)]) + p for p in parts))
    assert stagec("convert", path, "-o", tmp_path / "x.json", "--to", "json").code == 0
    assert stagec("convert", tmp_path / "x.json", "-o", tmp_path / "y", "--to", "chakra").code == 0
    assert (tmp_path / "y").read_bytes() == path.read_bytes()


def chrome_events(trace: Path, to: Path) -> list[dict[str, Any]]:
    done = stagec("convert", trace, "-o", to, "--to", "chrome")
    assert done.code == 0, done.err
    actual: list[dict[str, Any]] = json.loads(to.read_text())["traceEvents"]
    return actual


def times(events: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    return {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}


def test_nodes_are_replayed(tmp_path: Path) -> None:
    events = chrome_events(written(tmp_path / "job", NODES), tmp_path / "out.json")
    assert times(events) == {"forward/a": (0, 3), "forward/b": (3, 8), "forward/c": (3, 7)}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        "compute",
        "collectives over group 1",
    }


def test_recorded_times_are_kept(tmp_path: Path) -> None:
    nodes = [
        TraceNode(i, name, NodeKind.COMP, (), (), COMP, 2, start_micros=start)
        for i, (name, start) in enumerate({"a": 105, "b": 100, "c": 103}.items())
    ]
    events = chrome_events(written(tmp_path / "job", nodes), tmp_path / "out.json")
    assert times(events) == {"b": (0, 2), "c": (3, 5), "a": (5, 7)}


def test_a_ring_of_control_dependencies_is_left_out(tmp_path: Path) -> None:
    """As PyTorch's converter writes it: an op waits for what it calls."""
    nodes = [
        TraceNode(1, "a", NodeKind.COMP, (2,), (), COMP, 3),
        TraceNode(2, "b", NodeKind.COMP, (), (1,), COMP, 4),
    ]
    events = chrome_events(written(tmp_path / "job", nodes), tmp_path / "out.json")
    assert times(events) == {"b": (0, 4), "a": (4, 7)}


def test_host_ops_are_on_threads(tmp_path: Path) -> None:
    host = TraceNode(1, "aten::mm", NodeKind.COMP, (), (), {"is_cpu_op": True, "tid": 4}, 9)
    kernel = TraceNode(2, "gemm", NodeKind.COMP, (1,), (), {**COMP, "stream": 7}, 5)
    path = written(tmp_path / "job", [host, kernel])
    done = stagec("convert", path, "-o", tmp_path / "k.json", "--to", "kineto")
    assert done.code == 0, done.err
    events = json.loads((tmp_path / "k.json").read_text())["traceEvents"]
    actual = {(e["cat"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert actual["cpu_op", "aten::mm"] == (0, 9)
    assert actual["kernel", "gemm"] == (9, 5)


def test_a_job_becomes_timelines(tmp_path: Path) -> None:
    """Messages are arrows, collectives have their groups; sums are those of the traces."""
    message: dict[str, AttrValue] = {"is_cpu_op": False, "comm_size": 8, "comm_tag": 3}
    for rank in (0, 1):
        kind = (NodeKind.SEND, NodeKind.RECV)[rank]
        end = ("comm_dst", "comm_src")[rank]
        last = TraceNode(4, "m", kind, (3,), (), {**message, end: 1 - rank}, 2)
        trace = written(tmp_path / "job", [*NODES, last], rank)
    for to in ("kineto", "chrome", "perfetto"):
        done = stagec("convert", tmp_path / "job", "-o", tmp_path / to, "--to", to)
        assert done.code == 0, done.err
    flops: Counter[int] = Counter()
    for rank in (0, 1):
        text = (tmp_path / "kineto" / f"small.{rank}.json").read_text()
        events = json.loads(text)["traceEvents"]
        flops[rank] = sum(e.get("args", {}).get("flops", 0) for e in events)
        (coll,) = (e for e in events if e["name"] == "ncclDevKernel_AllReduce")
        assert coll["args"]["Process Group Ranks"] == "[0, 1]"
        assert (coll["args"]["In msg nelems"], coll["args"]["dtype"]) == (64, "Byte")
        (sent,) = (e for e in events if e["name"] == "ncclDevKernel_SendRecv")
        assert sent["args"]["Collective name"] == ("send", "recv")[rank]
    assert flops == {r: sum(int(str(n.attrs.get("num_ops", 0))) for n in NODES) for r in (0, 1)}
    events = json.loads((tmp_path / "chrome").read_text())["traceEvents"]
    assert Counter(e["ph"] for e in events if e["ph"] in "sf") == {"s": 1, "f": 1}
    packets = public.Trace.FromString((tmp_path / "perfetto").read_bytes()).packet
    kinds = Counter(p.track_event.type for p in packets if p.HasField("track_event"))
    assert kinds == {1: 8, 2: 8}
    assert len([*read_trace(trace)]) == 4


def test_a_packed_timeline(tmp_path: Path) -> None:
    path = written(tmp_path / "job", NODES)
    assert stagec("convert", path, "-o", tmp_path / "a", "--to", "chrome").code == 0
    assert stagec("convert", path, "-o", tmp_path / "b", "--to", "chrome", "--gzip").code == 0
    assert gzip.decompress((tmp_path / "b").read_bytes()) == (tmp_path / "a").read_bytes()


LONG = TraceNode(1, "a", NodeKind.COMP, (), (), COMP, 1 << 60)
RING = (
    TraceNode(1, "a", NodeKind.COMP, (2,), (), COMP, 1),
    TraceNode(2, "b", NodeKind.COMP, (1,), (), COMP, 1),
)
UNTIMED = (*NODES, TraceNode(4, "s", NodeKind.SEND, (), (), {"comm_dst": 1}))


@pytest.mark.parametrize(
    ("nodes", "reported"),
    [
        (UNTIMED, "node 4 's' has no duration, nor has any other send node"),
        (RING, "nodes depend on each other in a cycle"),
        ([LONG], "its times go on for"),
    ],
)
def test_traces_without_times(nodes: Sequence[TraceNode], reported: str, tmp_path: Path) -> None:
    """Nothing is written."""
    path = written(tmp_path / "job", nodes)
    for to in ("kineto", "chrome", "perfetto"):
        done = stagec("convert", path, "-o", tmp_path / "out", "--to", to)
        assert (done.code, reported in done.err) == (1, True), done.err
        assert not (tmp_path / "out").exists()


def test_what_is_refused(job: Path, tmp_path: Path) -> None:
    one = job / "llama3-8b.0.et"
    done = stagec("convert", one, "-o", one, "--to", "json")
    assert (done.code, "already exists" in done.err) == (1, True)
    done = stagec("convert", job, "-o", job, "--to", "json")
    assert (done.code, "is not empty" in done.err) == (1, True)
    done = stagec("convert", tmp_path / "none", "-o", tmp_path / "x", "--to", "json")
    assert (done.code, "no file or folder '" in done.err) == (1, True)
    broken = tmp_path / "broken.0.et"
    broken.write_bytes(one.read_bytes()[:-9])
    for to in ("json", "chakra", "chrome"):
        done = stagec("convert", broken, "-o", tmp_path / "x", "--to", to)
        assert (done.code, "truncated" in done.err) == (1, True), done.err
        assert not (tmp_path / "x").exists()
    host = tmp_path / "host.json"
    host.write_text('{"schema": "1.0.2-chakra.0.0.4", "pid": 1, "nodes": []}')
    done = stagec("show", host)
    assert "found a host trace of PyTorch" in done.err
    host.write_text('{"schemaVersion": 1, "traceEvents": []}')
    done = stagec("show", host)
    assert "found a profile of PyTorch" in done.err
    (tmp_path / "jobs").mkdir()
    shutil.copytree(job, tmp_path / "jobs" / "one")
    done = stagec("convert", tmp_path / "jobs", "-o", tmp_path / "x", "--to", "json")
    assert f"name the directory that holds traces: {tmp_path / 'jobs' / 'one'}" in done.err
