"""Formats of plug-ins: written by the same machinery as the built-in one, and told where they do
not go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import stagec

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
    assert "error: the format 'lines' makes every rank anew" in done.err


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


def test_a_format_that_there_is_not(tmp_path: Path) -> None:
    done = stagec(*JOB, "--format", "chakr", "-o", tmp_path / "out")
    assert done.code == 1
    assert "error: no format 'chakr'" in done.err
    assert "did you mean 'chakra'" in done.err


@pytest.mark.parametrize(
    ("formats", "told"),
    [
        ("(3,)", "brings 3 as a format"),
        ("(Format(),)", "as a format"),
        ("(type('A', (Format,), {'name': 'chakra', 'suffix': 'x'})(),)", "two formats have"),
        ("(type('A', (Format,), {'name': 'a', 'suffix': '../x'})(),)", "as a format"),
    ],
)
def test_what_is_no_format_is_told_at_load(formats: str, told: str, tmp_path: Path) -> None:
    text = f"from stagec.api import Format, Plugin\nPLUGIN = Plugin(formats={formats})\n"
    done = stagec(*JOB, *plugin(tmp_path, text), "-o", tmp_path / "out")
    assert done.code == 1
    assert told in done.err


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("pass", "the format 'mine' has no encoder"),
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
def test_mistakes_of_a_format_are_told(body: str, told: str, tmp_path: Path) -> None:
    text = (
        "from stagec.api import Format, Plugin\n"
        f"class Mine(Format):\n    name, suffix = 'mine', 'x'\n    {body}\n"
        "PLUGIN = Plugin(name='formats', formats=(Mine(),))\n"
    )
    words = *JOB, *plugin(tmp_path, text), "--format", "mine"
    done = stagec(*words, "-o", tmp_path / "out")
    assert done.code == 1
    assert told in done.err
    assert not (tmp_path / "out").exists()
