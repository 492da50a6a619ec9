"""The parser keeps nothing of a text: neither of one before, nor of one that is read beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from itertools import repeat
from threading import Barrier

import pytest

from stagec.ir.core import Operation
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import FileLoc, Source
from stagec.text import parser
from stagec.text.build import parse_op
from tests.support import registry

STATEMENTS = 400


def place(op: Operation) -> FileLoc:
    assert isinstance(op.loc, FileLoc)
    return op.loc


def strategy(name: str) -> Operation:
    body = "\n".join(f"stg.microbatches[count = {i + 1}]" for i in range(STATEMENTS))
    return parse_op(Source(name, f"stg.strategy @s {{\n{body}\n}}"), registry())


def test_texts_that_are_read_at_once_keep_their_places() -> None:
    names = [f"{i}.stg" for i in range(4)]
    strategy("before.stg")  # the parser is made once, and shared from here on
    start = Barrier(len(names))

    def read(name: str, start: Barrier) -> Operation:
        start.wait()
        return strategy(name)

    with ThreadPoolExecutor(len(names)) as pool:
        actual = list(pool.map(read, names, repeat(start)))
    for name, op in zip(names, actual, strict=True):
        assert [place(o) for o in op.body.ops] == [
            FileLoc(name, i + 2, 1) for i in range(STATEMENTS)
        ]


def test_a_text_that_fails_leaves_nothing_behind() -> None:
    good = 'stg.strategy @s {\n  stg.split[BB, "x", over = dp]\n}'

    def expected() -> list[object]:
        with pytest.raises(DiagnosticError) as e:
            parse_op(Source("good.stg", good), registry())
        return [d.loc for d in e.value.diagnostics]

    before = expected()
    for broken in ("stg.strategy @s {\n stg.split[(B, ", "stg.strategy @s { stg.split[1/0] }"):
        with pytest.raises(DiagnosticError):
            parse_op(Source("broken.stg", broken), registry())
    assert expected() == before == [FileLoc("good.stg", 2, 17)]


def test_tables_are_those_of_the_grammar() -> None:
    """By the tables a text has the same syntax as by the grammar, whose tables they are."""
    text = files("stagec.models").joinpath("deepseek_v3.stg").read_text(encoding="utf-8")
    source = Source("a.stg", text + "\n//" + " " * (1 << 16))  # long texts are parsed each time
    by_tables = parser.parse_syntax(source)
    tables = parser.tables()
    grammar, lark = parser.tables_of().split()
    if tables["of"].endswith(lark):
        assert tables["of"] == f"{grammar} {lark}", "run python -m tools.gen_tables"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "tables", lambda: {"of": "another grammar"})
        patch.setattr(parser, "_idle", [])
        assert parser.parse_syntax(source) == by_tables
