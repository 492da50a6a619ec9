"""Formats of plug-ins: written by the same machinery as the built-in one, and refused where they
do not go."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.formats.base import Variant
from stagec.formats.chakra.nodes import TraceNode, encode_metadata, encode_node
from stagec.formats.registry import BUILTIN, find_format
from stagec.program.nodes import Program
from stagec.support.diagnostics import DiagnosticError
from stagec.traces.stored import stored_program
from tests.support import stagec

ROOT = Path(__file__).resolve().parents[2]
JOB = ("compile", "llama3-8b", "--tp", "2", "--pp", "2", "--dp", "2", "--set", "L=2", "--quiet")
#: Every rank anew: a line for each node.
LINES = """
import json
from stagec.api import Format, Plugin

class Encoder:
    def __init__(self, program, layout):
        self.program, self.layout = program, layout

    def rank(self, rank):
        rows = []
        for node in self.program.nodes:
            row = {"id": node.id, "kind": node.kind, "size": node.size}
            if node.is_collective:
                row["group"] = self.layout.groups.of_rank(node.group, rank)
            if node.is_message:
                by = node.by if node.kind == "send" else -node.by
                row["peer"] = self.layout.peer(rank, node.over, by)
            rows.append(row)
        return "\\n".join(map(json.dumps, rows)).encode()

class Lines(Format):
    name = "lines"
    suffix = "jsonl"
    def encoder(self, program, layout, durations):
        return Encoder(program, layout)

PLUGIN = Plugin(name="lines", formats=(Lines(),))
"""
#: A class once, patched per rank: a text of fixed columns, `kind group` or `kind peer`.
COLUMNS = """
import numpy as np
from stagec.api import Format, PatchedEncoder, Plugin, Variant

class Encoder(PatchedEncoder):
    def __init__(self, format_, layout, program):
        super().__init__(format_, layout, program.groups)
        self.program = program

    def serialised(self, widths):
        data, ends, peers = bytearray(), {axes: [] for axes in widths}, {}
        for node in self.program.nodes:
            data += f"{node.kind} {node.size} ".encode()
            if node.is_collective:
                data += b"?" * widths[node.group]
                ends[node.group].append(len(data) - 1)
            if node.is_message:
                data += b"?" * len(self.format.peer(0, self.layout.groups.ranks))
                by = node.by if node.kind == "send" else -node.by
                peers.setdefault((node.over, by), []).append(len(data) - 1)
            data += b"\\n"
        bytes_ = np.frombuffer(bytes(data), dtype=np.uint8).copy()
        places = [{k: np.array(v) for k, v in p.items() if v} for p in (ends, peers)]
        return Variant(bytes_, *places)

class Columns(Format):
    name = "columns"
    suffix = "txt"
    patched = True
    def encoder(self, program, layout, durations):
        return Encoder(self, layout, program)
    def peer(self, rank, ranks):
        return str(rank).zfill(len(str(ranks - 1))).encode()

PLUGIN = Plugin(name="columns", formats=(Columns(),))
"""


def plugin(tmp_path: Path, text: str) -> Sequence[str]:
    """The words that load a plug-in of this text."""
    path = tmp_path / "plugin.py"
    path.write_text(text)
    return "--plugin", str(path)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the manifest, which tells how it was made."""
    files = (p for p in folder.iterdir() if p.name != "manifest.json")
    return {p.name: p.read_bytes() for p in files}


@pytest.mark.long
def test_a_format_of_a_plugin_says_of_each_node_what_chakra_does(tmp_path: Path) -> None:
    words = *JOB, *plugin(tmp_path, LINES), "--format", "lines"
    assert stagec(*words, "-o", tmp_path / "out", "--jobs", "2").code == 0
    assert stagec(*JOB, "-o", tmp_path / "et").code == 0
    names = [f"llama3-8b.{rank}.jsonl" for rank in range(8)]
    assert sorted(contents(tmp_path / "out")) == sorted([*names, "llama3-8b.json"])
    for rank, name in enumerate(names):
        rows = [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
        shown = stagec("show", "--all", "--json", tmp_path / "et" / f"llama3-8b.{rank}.et").out
        nodes = [json.loads(line) for line in shown.splitlines()]
        assert [r["id"] for r in rows] == [n["id"] for n in nodes]
        assert [r.get("group") for r in rows] == [
            int(n["group"]) if n["group"] else None for n in nodes
        ]
        assert [r.get("peer") for r in rows] == [n["peer"] for n in nodes]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["format"] == "lines"
    assert "--format lines" in manifest["command"]


@pytest.mark.long
def test_ranks_can_be_chosen_and_runs_completed(tmp_path: Path) -> None:
    words = *JOB, *plugin(tmp_path, LINES), "--format", "lines"
    assert stagec(*words, "-o", tmp_path / "all").code == 0
    assert stagec(*words, "-o", tmp_path / "some", "--only-ranks", "3").code == 0
    every, some = contents(tmp_path / "all"), contents(tmp_path / "some")
    assert {*some} == {"llama3-8b.3.jsonl", "llama3-8b.json"}
    assert all(every[name] == content for name, content in some.items())
    assert stagec(*words, "-o", tmp_path / "all", "--resume").code == 0
    assert contents(tmp_path / "all") == every


@pytest.mark.parametrize("option", [("--archive", "job"), ("--scheduler", "x", "-o", "out")])
def test_a_format_without_patches_refuses_archives_and_clusters(
    option: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = stagec(*JOB, *plugin(tmp_path, LINES), "--format", "lines", *option)
    assert done.code == 1
    assert "error: the format 'lines' encodes each rank on its own" in done.err


def test_a_patched_format_goes_into_archives(tmp_path: Path) -> None:
    load = plugin(tmp_path, COLUMNS)
    words = *JOB, *load, "--format", "columns"
    assert stagec(*words, "-o", tmp_path / "out").code == 0
    assert stagec(*words, "--archive", tmp_path / "job").code == 0
    made = stagec("materialize", tmp_path / "job", "-o", tmp_path / "again", "--quiet", *load)
    assert made.code == 0, made.err
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    first = (tmp_path / "out" / "llama3-8b.5.txt").read_text()
    assert "?" not in first
    without = stagec("materialize", tmp_path / "job", "-o", tmp_path / "no")
    assert "error: no format 'columns'" in without.err
    checked = stagec("check", tmp_path / "job")
    assert "no format 'columns'" in checked.err


def test_a_format_of_one_mesh_refuses_pods(tmp_path: Path) -> None:
    pods = ("--serve", "disaggregated", "--prompt", "16", "--batch", "4", "--prefill", "dp=2")
    words = "compile", "llama3-8b", "--set", "L=1,D=8,F=8,V=16,H=2,G=2,K=4", *pods
    mine = *plugin(tmp_path, COLUMNS), "--format", "columns"
    done = stagec(*words, *mine, "-o", tmp_path / "out")
    assert done.code == 1
    assert "'columns' is of one mesh and one model, and the job has several pods" in done.err


def test_the_table_of_formats_is_right() -> None:
    assert {name: find_format(name).name for name in BUILTIN} == {name: name for name in BUILTIN}


def test_a_format_that_there_is_not(tmp_path: Path) -> None:
    done = stagec(*JOB, "--format", "chakr", "-o", tmp_path / "out")
    assert done.code == 1
    assert "error: no format 'chakr'" in done.err
    assert "did you mean 'chakra'" in done.err


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ("(3,)", "registers 3 as a format"),
        ("(Format(),)", "as a format"),
        ("(type('A', (Format,), {'name': 'chakra', 'suffix': 'x'})(),)", "two formats have"),
        ("(type('A', (Format,), {'name': 'a', 'suffix': '../x'})(),)", "as a format"),
    ],
)
def test_what_is_no_format_is_reported_at_load(formats: str, message: str, tmp_path: Path) -> None:
    text = f"from stagec.api import Format, Plugin\nPLUGIN = Plugin(formats={formats})\n"
    done = stagec(*JOB, *plugin(tmp_path, text), "-o", tmp_path / "out")
    assert done.code == 1
    assert message in done.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "the format 'mine' has no encoder"),
        ("encoder = lambda *_: None", "the format 'mine' gives a NoneType as its encoder"),
        (
            "encoder = lambda *_: type('E', (), {'rank': lambda *_: 'text'})()",
            "the format 'mine' gives a str for rank 0, expected bytes",
        ),
        (
            "encoder = lambda *_: type('E', (), {'rank': lambda *_: 1 / 0})()",
            "a mistake in plug-in 'formats': ZeroDivisionError",
        ),
    ],
)
def test_mistakes_of_a_format_are_reported(body: str, message: str, tmp_path: Path) -> None:
    text = (
        "from stagec.api import Format, Plugin\n"
        f"class Mine(Format):\n    name, suffix = 'mine', 'x'\n    {body}\n"
        "PLUGIN = Plugin(name='formats', formats=(Mine(),))\n"
    )
    words = *JOB, *plugin(tmp_path, text), "--format", "mine"
    done = stagec(*words, "-o", tmp_path / "out")
    assert done.code == 1
    assert message in done.err
    assert not (tmp_path / "out").exists()


#: Files of a whole job: a line for each class, the options of which are the fields.
WHOLE = """
from dataclasses import dataclass
from stagec.api import JobFormat, Plugin

@dataclass(frozen=True)
class Whole(JobFormat):
    per_line: int = 1
    title: str = ""
    loud: bool = False
    name = "whole"

    def drops(self, program, layout):
        return ["times of nodes"] if len(layout.mesh) else []

    def files(self, job, ranks):
        yield f"{job.name}.about.txt", [f"{self.title} {self.per_line} {self.loud}".encode()]
        for number, members in enumerate(job.members):
            nodes = job.program(number).nodes
            lines = (f"{n.id} {n.kind} {n.size}\\n".encode() for n in nodes)
            yield f"{job.name}.class{number}.txt", (line for line in lines)

PLUGIN = Plugin(name="whole", formats=(Whole(),))
"""


def test_a_format_of_a_job_names_its_files(tmp_path: Path) -> None:
    load = plugin(tmp_path, WHOLE)
    words = *JOB, *load, "--format", "whole{per-line=3, title=all of it,loud}"
    assert stagec(*words, "-o", tmp_path / "out").code == 0
    actual = contents(tmp_path / "out")
    names = ["llama3-8b.about.txt", "llama3-8b.class0.txt", "llama3-8b.class1.txt"]
    assert sorted(actual) == names
    assert actual["llama3-8b.about.txt"] == b"all of it 3 True"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name, content in actual.items():
        about = manifest["files"][name]
        assert about == {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    assert stagec(*words, "-o", tmp_path / "out", "--resume").code == 0
    assert contents(tmp_path / "out") == actual


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returns a NoneType from 'files'"),
        ("yield 3", "yields 3 from 'files'"),
        ("yield 'a', 3", "yields ('a', 3) from 'files'"),
        ("yield 'a', 'text'", "gives a str as a part of 'a', expected bytes"),
        ("yield '../a', [b'']", "yields the invalid or repeated file name '../a'"),
    ],
)
def test_files_that_are_none_are_reported(body: str, message: str, tmp_path: Path) -> None:
    head, _, _ = WHOLE.partition("        yield")
    load = plugin(
        tmp_path, f"{head}        {body}\n\nPLUGIN = Plugin(name='w', formats=(Whole(),))"
    )
    done = stagec(*JOB, *load, "--format", "whole", "-o", tmp_path / "out")
    assert done.code == 1
    assert f"error: the format 'whole' {message}" in done.err
    assert "  help: " in done.err
    assert not (tmp_path / "out").exists()


def test_what_a_format_does_not_carry_is_reported_once_and_kept(tmp_path: Path) -> None:
    words = [w for w in JOB if w != "--quiet"]
    done = stagec(*words, *plugin(tmp_path, WHOLE), "--format", "whole", "-o", tmp_path / "out")
    assert done.err.count("remark: whole: times of nodes") == 1
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [c["not_carried"] for c in manifest["classes"]] == [["times of nodes"]] * 2


@pytest.mark.long
def test_several_formats_have_a_folder_each(tmp_path: Path) -> None:
    load = plugin(tmp_path, WHOLE)
    both: Sequence[str | Path]
    both = *JOB, *load, "--format", "chakra,whole{loud=true}", "-o", tmp_path / "both"
    assert stagec(*both).code == 0
    assert stagec(*JOB, "-o", tmp_path / "one").code == 0
    assert contents(tmp_path / "both" / "chakra") == contents(tmp_path / "one")
    assert (tmp_path / "both" / "whole" / "llama3-8b.about.txt").read_text() == " 1 True"
    again = stagec(*both)
    assert again.code == 1
    assert "is not empty" in again.err
    assert stagec(*both, "--force").code == 0
    refused: Sequence[str | Path]
    refused = *JOB, "--format", "chakra,astra-sim", "-o", tmp_path / "neither"
    assert "the format 'astra-sim' needs a machine" in stagec(*refused).err
    assert not (tmp_path / "neither").exists()
    over = stagec(*both[:-1], tmp_path / "one")
    assert "has the files of a job" in over.err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("whole{lines=3}", "format 'whole' has no option 'lines'"),
        ("whole{per-line=x}", "option 'per-line' of format 'whole' expects an integer, found 'x'"),
        ("whole{loud=3}", "option 'loud' of format 'whole' expects true or false, found '3'"),
        ("chakra{a=1}", "format 'chakra' has no option 'a'"),
        ("whole,whole", "--format names 'whole' twice"),
        ("whole{a=1,a=2}", "option 'a' of 'whole' is given twice"),
        ("whole{", "--format expects the name of a format, found 'whole{'"),
        ("whole,", "--format expects the name of a format, found ''"),
        ("", "--format expects the name of a format, found ''"),
    ],
)
def test_options_and_lists_of_formats_are_checked(text: str, problem: str, tmp_path: Path) -> None:
    words = *JOB, *plugin(tmp_path, WHOLE), "--format", text
    done = stagec(*words, "-o", tmp_path / "out")
    assert done.code == 1
    assert f"error: {problem}" in done.err
    assert "help: " in done.err


@pytest.mark.long
def test_an_archive_is_made_into_other_formats(tmp_path: Path) -> None:
    """What a format finds in an archive is what it finds in the compiled job."""
    load = plugin(tmp_path, LINES)
    assert stagec(*JOB, "--archive", tmp_path / "job").code == 0
    assert stagec(*JOB, *load, "--format", "lines", "-o", tmp_path / "out").code == 0
    words: Sequence[str | Path]
    words = "materialize", tmp_path / "job", *load, "--quiet", "--format", "lines,chakra"
    assert stagec(*words, "-o", tmp_path / "again").code == 0
    assert stagec(*JOB, "-o", tmp_path / "et").code == 0
    assert contents(tmp_path / "again" / "chakra") == contents(tmp_path / "et")
    made, expected = contents(tmp_path / "again" / "lines"), contents(tmp_path / "out")
    assert {*made} == {*expected}
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"}
    for name in (n for n in made if n.endswith("jsonl")):
        for ours, theirs in zip(made[name].splitlines(), expected[name].splitlines(), strict=True):
            row, other = json.loads(ours), json.loads(theirs)
            if other["kind"] not in kinds:
                other["kind"], other["size"] = "comp", max(1, other["size"])
            assert row == other


@pytest.mark.parametrize(
    "change",
    [
        {"id": 7},
        {"data_deps": (9,)},
        {"kind": 5},
        {"kind": 7, "attrs": {"comm_type": 99}},
        {"attrs": {"num_ops": 1, "alloc_bytes": 2**64 - 1}},
        {"attrs": {"num_ops": "many"}, "attr_types": {"num_ops": "string"}},
    ],
)
def test_records_of_others_are_no_program(change: dict[str, Any]) -> None:
    first = TraceNode(1, "forward/x", 4, attrs={"num_ops": 8, "tensor_size": 4})
    good, bad = ([first, replace(first, **{"id": 2, **c})] for c in ({}, change))

    def read(nodes: Sequence[TraceNode]) -> Program:
        data = b"".join([encode_metadata("0"), *map(encode_node, nodes)])
        variant = Variant(np.frombuffer(data, dtype=np.uint8).copy(), {}, {})
        return stored_program("stage0", variant, {"dp": 2}, Path("job"), None)

    assert [n.flops for n in read(good).nodes] == [8, 8]
    with pytest.raises(DiagnosticError, match="holds a record that stagec did not write"):
        read(bad)


def test_the_page_of_consumers_has_a_row_for_each_format() -> None:
    page = (ROOT / "docs" / "consumers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*?) \|", page, re.M)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert set(BUILTIN) <= named


@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        ("--host-between 40ms", "they do not have the 40.00 ms"),
        ("--serve decode --batch 2 --context 8 --host-step 1ms", "they do not have the 1.00 ms"),
        ("--offload optimizer --offload-update host", "chakra: that updates run in host memory"),
    ],
)
def test_time_of_hosts_that_files_lack_is_said(flags: str, remark: str, tmp_path: Path) -> None:
    job = ("compile", "llama3-8b", "--set", "L=1", "-o", tmp_path / "job")
    assert remark not in stagec(*job).err
    assert remark in stagec(*job, *flags.split(), "--force").err
