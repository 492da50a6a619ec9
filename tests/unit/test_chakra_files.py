"""Chakra traces as other tools write them: JSON of `chakra_jsonizer`, that of Chakra's feeder, and
gzip of any, read as the protobuf they stand for."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from chakra.src.jsonizer import jsonizer

from stagec.formats.chakra import record_files
from stagec.formats.chakra.nodes import TraceError, json_of_record
from stagec.formats.chakra.record_files import read_all_records, read_trace
from tests.support import LONG, stagec

JOB = ("compile", "llama3-8b", "--tp", "2", "--pp", "2", "--set", "L=2", "--quiet")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job") / "job"
    assert stagec(*JOB, "-o", folder).code == 0
    return folder


def jsonized(trace: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trace as Chakra's own tool writes it."""
    words = ["chakra_jsonizer", "--input_filename", str(trace), "--output_filename", str(to)]
    monkeypatch.setattr("sys.argv", words)
    jsonizer.main()
    return to


def test_json_of_chakras_tool_is_read(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = text = job / "llama3-8b.0.et"
    for rank in range(4):
        trace = job / f"llama3-8b.{rank}.et"
        text = jsonized(trace, tmp_path / f"llama3-8b.{rank}.json", monkeypatch)
        assert next(iter(read_all_records(text)))[1] == next(iter(read_all_records(trace)))[1]
        nodes = list(read_trace(text))
        assert nodes == list(read_trace(trace))
        assert [n.attr_types for n in nodes] == [n.attr_types for n in read_trace(trace)]
    assert stagec("show", text).out.splitlines()[1:] == stagec("show", trace).out.splitlines()[1:]


def test_a_folder_of_json_is_checked(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path
    for rank in range(4):
        name = f"llama3-8b.{rank}"
        text = jsonized(job / f"{name}.et", tmp_path / f"{name}.json", monkeypatch)
    (tmp_path / "llama3-8b.json").write_bytes((job / "llama3-8b.json").read_bytes())
    expected = stagec("check", tmp_path).out.partition(": ")[2]
    assert expected == stagec("check", job).out.partition(": ")[2]
    assert stagec("diff", job, tmp_path).code == 0
    text.write_text(text.read_text().replace('"comm_size"', '"comm_sise"', 1))
    ran = stagec("check", tmp_path)
    assert (ran.code, "missing-attribute" in ran.err) == (1, True)
    text.write_text(text.read_text()[:-100])
    ran = stagec("check", tmp_path)
    assert (ran.code, "llama3-8b.3.json: line " in ran.err) == (1, True), ran.err


def test_gzip_is_read(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = job / "llama3-8b.1.et"
    text = jsonized(trace, tmp_path / "plain.json", monkeypatch)
    for source in (trace, text):
        packed = tmp_path / f"{source.name}.gz"
        packed.write_bytes(gzip.compress(source.read_bytes()))
        assert list(read_trace(packed)) == list(read_trace(trace))
        packed.write_bytes(gzip.compress(source.read_bytes())[:-20])
        with pytest.raises(TraceError, match="gzip"):
            list(read_trace(packed))


def test_the_graph_of_the_feeder_is_read(tmp_path: Path) -> None:
    """As its source names things: Chakra's src/feeder/json_node.cpp."""
    nodes: list[dict[str, object]] = [
        {"Id": 0, "Name": "a", "NodeType": 4, "is_cpu_op": True, "runtime": 5, "data_deps": []},
        {
            "Id": 1,
            "NodeType": 7,
            "is_cpu_op": False,
            "data_deps": [0],
            "comm_type": 0,
            "comm_size": 1 << 40,
            "comm_priority": 3,
            "pg_name": "1",
        },
    ]
    path = tmp_path / "job.0.json"
    path.write_text(json.dumps({"workload_graph": nodes}))
    one, two = read_trace(path)
    assert (one.id, one.name, one.kind, one.duration_micros, one.attrs) == (
        *(0, "a", 4, 5),
        {"is_cpu_op": True},
    )
    assert (two.data_deps, two.attrs["comm_size"], two.attr_types["comm_size"]) == (
        *((0,), 1 << 40),
        "int64",
    )
    assert "all_reduce" in stagec("show", path).out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"version": "1"} [1]', "expected an object for each record"),
        ('{"schema": 1, "model": "gpt2"}', "found an answer of --json, as 'diff -u' compares"),
        ('{"version": 7}', "expected the metadata of a trace"),
        ('{"version": "1"} {"id": -1}', "expected a Chakra node"),
        ('{"version": "1"} {"attr": [{"name": "x", "int64Val": "y"}]}', "expected a Chakra node"),
        ('{"version": "1"} {"id": "1", "name": "a"', "the file ends"),
        ('{"workload_graph": [{"Id": "x"}]}', "expected a Chakra node"),
        ('{"workload_graph": 3}', "expected a Chakra node: it is not an object"),
        ('{"x": {"workload_graph": 3}}', "expects a list 'workload_graph'"),
    ],
)
def test_texts_that_are_no_traces(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "job.0.json"
    path.write_text(text)
    ran = stagec("show", path)
    assert (ran.code, expected in ran.err) == (1, True), ran.err
    assert "line 1" in ran.err


@LONG
def test_memory_is_bounded_by_what_a_trace_may_hold(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much a packed file unpacks to."""
    path = tmp_path / "a.0.json.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"version": "')
        for _ in range(400):
            file.write(b"a" * (1 << 20))
    assert path.stat().st_size < 4 << 20
    tracemalloc.start()
    ran = stagec("show", path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (ran.code, "error: " in ran.err) == (1, True)
    assert peak < 250 << 20
    monkeypatch.setattr(record_files, "MAX_NODES", 10)
    trace = job / "llama3-8b.0.et"
    for words in (("show", trace), ("diff", trace, trace)):
        ran = stagec(*words)
        assert (ran.code, "expected a trace of at most 10 nodes" in ran.err) == (1, True)


def test_json_of_a_record_is_that_of_chakras_tool(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = job / "llama3-8b.2.et"
    text = jsonized(trace, tmp_path / "a.json", monkeypatch).read_text()
    records = [record for _, record in read_all_records(trace)]
    made = [json_of_record(record, metadata=not i) for i, record in enumerate(records)]
    assert "".join(made) == text
