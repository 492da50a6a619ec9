"""Names of nodes: all else is the same whatever their length."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from stagec.formats.chakra.record_files import read_trace
from tests.support import LLAMA, LONG, stagec

SIZES = "L=4,B=8,S=4,D=8,H=4,G=4,K=2,F=8,V=16"
JOB = ["compile", LLAMA, "--set", SIZES, "--dp", "2", "--pp", "2", "--microbatches", "4"]


@LONG
def test_names_change_nothing_else(tmp_path: Path) -> None:
    for names in ("full", "short", "none"):
        assert stagec(*JOB, "--names", names, "-o", tmp_path / names, "--quiet").code == 0
        assert stagec("check", tmp_path / names).code == 0
    for rank in range(4):
        full, short, none = (
            list(read_trace(tmp_path / names / f"{LLAMA}.{rank}.et"))
            for names in ("full", "short", "none")
        )
        assert [re.sub(r"^\w+/(mb\d+/)?(L\d+(\.\.L\d+)?/)?", "", n.name) for n in full] == [
            n.name for n in short
        ]
        assert {n.name for n in none} == {""}
        assert [replace(n, name="") for n in full] == none
        assert [replace(n, name="") for n in short] == none
    sizes = [sum(p.stat().st_size for p in (tmp_path / n).glob("*.et")) for n in ("full", "short")]
    assert sizes[1] < sizes[0]


def test_the_command_of_the_manifest_names_them(tmp_path: Path) -> None:
    assert stagec(*JOB, "--names", "none", "-o", tmp_path / "a", "--quiet").code == 0
    command = json.loads((tmp_path / "a" / "manifest.json").read_text())["command"].split()
    assert stagec(*command[1:], "-o", tmp_path / "b", "--quiet").code == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
