"""`stagec measure`: what it writes is a table that is read again; other files are reported with
their place, and leave no output."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from stagec.support import json_stream
from stagec.support.diagnostics import DiagnosticError
from stagec.support.json_stream import JsonStream
from stagec.time.measured.kernel_tables import read_measured
from stagec.time.measured.kineto import read_trace, rows
from tests.support import assert_schema, stagec
from tests.unit.kineto_traces import Trace


def a_trace(rank: int = 0) -> Trace:
    trace = Trace(rank)
    for time in (10.0, 12.0):
        trace.tensors("aten::mm", [[512, 128], [128, 256]], ["float", "float"], time)
        trace.tensors("aten::mul", [[512, 128], []], ["float", "Scalar"], 4.0)
    trace.collective("allreduce", 4096, 8, 30.0 + rank)
    trace.launch(trace.now, "void (anonymous namespace)::mine<4>(int)", 2.0)
    trace.now += 100
    return trace


@pytest.mark.parametrize("name", ["table.csv", "table.json"])
def test_the_table_is_what_measured_takes(tmp_path: Path, name: str) -> None:
    traces = [a_trace(rank).write(tmp_path / f"rank{rank}.json.gz") for rank in (0, 1)]
    actual = stagec("measure", *traces, "-o", tmp_path / name)
    assert (actual.code, actual.out) == (0, "")
    tables = read_measured(tmp_path / name)
    expected = rows([read_trace(path) for path in traces])
    assert sum(len(t.seconds) for t in tables) == len(expected) == 3
    assert "all_reduce,,8x8192,,,30.0,1" in stagec("measure", *traces, "--quiet").out
    printed = json.loads(stagec("measure", *traces, "--json").out)
    assert_schema("measure", printed)
    assert printed[0]["extents"] == [1, 512, 256, 128]


def test_the_summary_says_what_is_covered(tmp_path: Path) -> None:
    path = a_trace().write(tmp_path / "trace.json")
    refusal = stagec("measure", path).err
    assert "rank 0, A GPU: 16 events; 6 on the GPU, 0.062 ms" in refusal
    assert "3 rows from 96.8% of the GPU's time: all_reduce 48.4%, matmul 35.5%" in refusal
    assert "0.002 ms   3.2%       1 x  mine (no op launched it)" in refusal
    assert not stagec("measure", path, "--quiet").err


def test_shapes_that_were_not_recorded_are_reported(tmp_path: Path) -> None:
    trace = a_trace()
    trace.op("aten::mm", 1000.0)
    path = trace.write(tmp_path / "trace.json")
    assert (
        "94.2% are of ops without shapes: profile with record_shapes" in stagec("measure", path).err
    )


def no_trace(data: bytes, tmp_path: Path, name: str = "trace.json") -> str:
    """What is reported of a file that is no trace; the output stays what it was."""
    path, output = tmp_path / name, tmp_path / "table.csv"
    path.write_bytes(data)
    output.write_text("before")
    actual = stagec("measure", path, "-o", output)
    assert actual.code == 1, actual.err
    assert "error:" in actual.err
    assert "help:" in actual.err
    assert "Traceback" not in actual.err
    assert output.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "table.csv"])
    return actual.err


def events(*made: Any) -> bytes:
    return json.dumps({"traceEvents": made}).encode()


KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "trace.json:1:1: error: the file is empty"),
    "spaces": (b" \n ", "the file is empty"),
    "binary": (bytes(range(256)), "trace.json:1:1: error: expected a JSON object"),
    "a list": (b"[1, 2]", "trace.json:1:1: error: expected a JSON object"),
    "another object": (b'{"model": {"a": 1}}', "not a trace: it has no 'traceEvents'"),
    "no name": (b"{1: 2}", "trace.json:1:2: error: expected a name in quotes"),
    "no colon": (b'{"a" 2}', "trace.json:1:6: error: expected ':' after 'a'"),
    "no comma": (b'{"a": 2\n "b": 3}', "trace.json:2:2: error: expected ',' or '}'"),
    "bad value": (b'{"a":\n  oops}', "trace.json:2:3: error: not JSON"),
    "depth": (b'{"traceEvents": ' + b"[" * 100_000, "not JSON"),
    "digits": (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
    "nothing ran": (events(), "ran on a GPU"),
    "no list": (b'{"traceEvents": {"a": 1}}', "not a trace: it has no 'traceEvents'"),
    "no event": (events(KERNEL, 7), "expects an event, an object"),
    "no time": (events({**KERNEL, "ts": "soon"}), "'ts': expects microseconds, found 'soon'"),
    "negative": (events({**KERNEL, "dur": -1}), "'dur': expects microseconds"),
    "infinite": (events({**KERNEL, "dur": float("inf")}), "'dur': expects microseconds"),
    "no arguments": (events({**KERNEL, "args": []}), "'args': expects an object"),
    "no number": (events({**KERNEL, "args": {"correlation": {}}}), "'correlation': expects a"),
    "no text": (events({**KERNEL, "name": None}), "'name': expects a string"),
    "no thread": (events({**KERNEL, "cat": "cpu_op", "tid": []}), "expects 'pid' and 'tid'"),
    "unmatched": (events(KERNEL), "the profile has no kernels that can be identified"),
    "gzip of nothing": (gzip.compress(b""), "the file is empty"),
    "no gzip": (b"\x1f\x8b oops", "not a complete gzip"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_trace_is_reported(tmp_path: Path, case: str) -> None:
    data, message = WRONG[case]
    assert message in no_trace(data, tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_was_cut_is_reported(tmp_path: Path, packed: bool) -> None:
    data = a_trace().text().encode()
    data = gzip.compress(data) if packed else data
    choose = random.Random(7)
    for length in [2, len(data) - 1, *(choose.randrange(1, len(data)) for _ in range(10))]:
        no_trace(data[:length], tmp_path, "trace.json.gz" if packed else "trace.json")


def test_missing_files_and_folders_are_reported(tmp_path: Path) -> None:
    assert "nowhere.json: No such file" in stagec("measure", tmp_path / "nowhere.json").err
    assert "Is a directory" in stagec("measure", tmp_path).err
    table = tmp_path / "none" / "table.csv"
    ran = stagec("measure", tmp_path / "nowhere.json", "-o", table)
    assert f"{table}: No such file" in ran.err
    assert stagec("measure").code == 2


def test_json_in_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    path = a_trace().write(tmp_path / "trace.json")
    actual = stagec("measure", path, "--json", "-o", tmp_path / "table.csv")
    assert actual.code == 1
    assert "give -o NAME.json" in actual.err


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_how_a_text_is_cut_in_pieces_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", chunk)
    value: dict[str, Any] = {
        "a": [1, {"b": "\u00e9\n\u4e2d"}],
        "list": [-12.5e3, "x,]", {}, [], None],
        "n": 1234,
    }
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
        path = tmp_path / "value.json"
        path.write_text(text, encoding="utf-8")
        with path.open("rb") as stream:
            members = list(JsonStream(stream, "value.json", "").members("list"))
        assert [v for name, v in members if name == "list"] == value["list"]
        assert dict(m for m in members if m[0] != "list") == {"a": value["a"], "n": 1234}


def test_the_place_of_a_mistake_does_not_depend_on_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"a": 1, "list": [{"b": i} for i in range(9)]}, indent=1)
    path = tmp_path / "value.json"
    for at in range(5, len(text), 11):
        path.write_text(text[:at] + "@" + text[at:])
        refusal: list[str] = []
        for chunk in (3, 20, 1 << 20):
            monkeypatch.setattr(json_stream, "_CHUNK", chunk)
            with path.open("rb") as stream:
                try:
                    list(JsonStream(stream, "value.json", "").members("list"))
                except DiagnosticError as problem:
                    refusal.append(str(problem.diagnostics[0].loc))
        assert len(set(refusal)) <= 1


def test_what_a_trace_measured_is_found_in_a_job(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "docs" / "examples" / "trace.json"
    table = tmp_path / "table.csv"
    assert stagec("measure", example, "-o", table, "--quiet").code == 0
    job = ("time", "llama3-8b", "--set", "L=1,S=4096,B=2", "--machine", "h100-sxm", "--json")
    modelled, refusal = (
        json.loads(stagec(*job, *more).out) for more in ((), ("--measured", str(table)))
    )
    assert modelled["found"]["matched"] == 0
    assert refusal["found"]["matched"] > 1
    assert sum(modelled["found"].values()) == sum(refusal["found"].values())
    assert refusal["step_seconds"] != modelled["step_seconds"]
