"""Imported texts: where they are looked for, and what hostile ones give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagec.support.limits import MAX_DEPTH, MAX_OPERATIONS
from stagec.text.printer import print_module
from tests.support import LONG, Outcome, parse, run_passes, stagec

CALLS = "inline,infer-shapes"


def text(name: str, body: str) -> str:
    return f"stg.module @{name} {{\n  stg.symbols[B, D]\n{body}}}\n"


def block(name: str, *, calls: str = "", imports: str = "") -> str:
    """A text of one private function, which applies GELU or calls another one."""
    head = f'  stg.import["{imports}"]\n' if imports else ""
    op = f"stg.call @{calls}(%x)" if calls else "stg.gelu(%x)"
    return text(
        name,
        f"{head}  stg.func @{name}[private] (%x: bf16[B, D]) {{\n"
        f"    %y = {op}\n    stg.return(%y)\n  }}\n",
    )


def main_text(*imports: str, call: str = "a") -> str:
    head = "".join(f'  stg.import["{path}"]\n' for path in imports)
    body = f"    %y = stg.call @{call}(%x)\n    stg.return(%y)\n"
    return text("m", f"{head}  stg.func @f(%x: bf16[B, D]) {{\n{body}  }}\n")


def opened(folder: Path, source: str) -> Outcome:
    (folder / "main.stg").write_text(source, encoding="utf-8")
    return stagec("opt", folder / "main.stg", "-p", CALLS)


def refused(ran: Outcome, message: str) -> None:
    assert ran.code == 1
    assert message in ran.err
    assert "error: " in ran.err
    assert "help: " in ran.err
    assert "internal error" not in ran.err


def test_a_text_is_looked_for_beside_the_text_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.stg").write_text(block("a", calls="b", imports="b.stg"))
    (tmp_path / "sub" / "b.stg").write_text(block("b"))
    ran = opened(tmp_path, main_text("sub/a.stg"))
    assert ran.code == 0, ran.err
    assert "%a/b/y = stg.gelu(%x)" in ran.out


def test_a_file_comes_before_the_library(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "swiglu.stg").write_text(block("swiglu"))
    ran = opened(tmp_path, main_text("blocks/swiglu.stg", call="swiglu"))
    assert ran.code == 0, ran.err
    assert "%swiglu/y = stg.gelu(%x)" in ran.out


def test_a_diamond_is_read_once(tmp_path: Path) -> None:
    """The same text by two paths is one text."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.stg").write_text(block("b"))
    (tmp_path / "sub" / "a.stg").write_text(block("a", calls="b", imports="../b.stg"))
    ran = opened(tmp_path, main_text("b.stg", "sub/a.stg", "./sub/../b.stg"))
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("first", "second"), [("b.stg", "a.stg"), ("../sub/b.stg", "../sub/a.stg")]
)
def test_a_circle_is_reported(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.stg").write_text(block("a", imports=first))
    (tmp_path / "sub" / "b.stg").write_text(block("b", imports=second))
    ran = opened(tmp_path, main_text("sub/a.stg"))
    refused(ran, "texts import each other: ")
    assert "sub/a.stg -> " in ran.err


def test_a_text_that_imports_itself(tmp_path: Path) -> None:
    refused(opened(tmp_path, main_text("main.stg")), "texts import each other: ")


@LONG
def test_a_text_of_the_library_finds_the_library_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stagec models X > x.stg` compiles wherever it is."""
    monkeypatch.chdir(tmp_path)
    Path("x.stg").write_text(stagec("models", "deepseek-v3").out, encoding="utf-8")
    ran = stagec("analyze", "x.stg", "--set", "B=1", "--json")
    assert ran.code == 0, ran.err
    assert stagec("analyze", "deepseek-v3", "--set", "B=1", "--json").out != ""


@pytest.mark.parametrize(
    "path", ["/etc/passwd.stg", "../../etc/passwd", "a.stg/", "", ".", "a\\b.stg", "blocks", "a.py"]
)
def test_paths_that_name_no_text(tmp_path: Path, path: str) -> None:
    refused(opened(tmp_path, main_text(path)), "expects the relative path of an .stg text")


@pytest.mark.parametrize(
    "path",
    [
        "../../../../../../../etc/passwd.stg",
        "blocks/../../../models/nothing.stg",
        "~/a.stg",
        "$HOME/a.stg",
        "blocks/*.stg",
        ".stg",
    ],
)
def test_a_text_that_is_not_there(tmp_path: Path, path: str) -> None:
    refused(opened(tmp_path, main_text(path)), f'no text "{path}"')


def test_a_near_match_is_reported(tmp_path: Path) -> None:
    assert "blocks/swiglu" in opened(tmp_path, main_text("blocks/swigl.stg")).err


def test_a_name_that_no_file_system_takes(tmp_path: Path) -> None:
    ran = opened(tmp_path, main_text("x" * 5000 + ".stg"))
    assert ran.code == 1
    assert "error: " in ran.err
    assert "internal error" not in ran.err


def test_what_is_no_text(tmp_path: Path) -> None:
    for data, message in (
        (b"", "the text is empty"),
        (b"stg.module\0", "a NUL byte"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"hello", "syntax error"),
        (b"stg.strategy @s", "stg.module"),
    ):
        (tmp_path / "a.stg").write_bytes(data)
        refused(opened(tmp_path, main_text("a.stg")), message)


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.stg").mkdir()
    refused(opened(tmp_path, main_text("a.stg")), 'no text "a.stg"')


def test_a_text_of_100_megabytes(tmp_path: Path) -> None:
    with (tmp_path / "a.stg").open("wb") as file:
        os.truncate(file.fileno(), 100 << 20)
    refused(opened(tmp_path, main_text("a.stg")), "is longer than")


def test_an_imported_text_is_verified_alone(tmp_path: Path) -> None:
    """Also functions that nobody calls: they are wrong for everyone."""
    (tmp_path / "a.stg").write_text(
        block("a").replace("bf16[B, D]", "bf16[B, Q]").replace("stg.return(%y)", "")
    )
    ran = opened(tmp_path, main_text("a.stg"))
    refused(ran, "'Q' is neither a declared symbol nor a mesh axis")
    assert "does not end in a yield or return" in ran.err
    assert "a.stg:3:" in ran.err


def test_imports_that_go_deep(tmp_path: Path) -> None:
    for i in range(MAX_DEPTH + 5):
        (tmp_path / f"a{i}.stg").write_text(block(f"a{i}", imports=f"a{i + 1}.stg"))
    refused(opened(tmp_path, main_text("a0.stg")), "imports are nested more than")


@LONG
def test_calls_that_go_deep(tmp_path: Path) -> None:
    """Bound symbols are looked for in all that is called; both ways to the limit."""
    for given in ("", "[D = B]"):
        functions = "".join(
            block(f"a{i}", calls=f"a{i + 1}").partition("\n")[2].partition("\n")[2].rstrip("}\n")
            + "}\n"
            for i in range(2000)
        )
        body = main_text(call=f"a0{given}").replace("  stg.func @f", functions + "  stg.func @f")
        refused(opened(tmp_path, body), "are nested more than")


@LONG
def test_calls_that_double(tmp_path: Path) -> None:
    """What is opened stays a text that can be read again."""
    functions = "  stg.func @a0[private] (%x) {\n    %y = stg.gelu(%x)\n    stg.return(%y)\n  }\n"
    for i in range(1, 40):
        functions += (
            f"  stg.func @a{i}[private] (%x) {{\n    %y = stg.call @a{i - 1}(%x)\n"
            f"    %z = stg.call @a{i - 1}(%y)\n    stg.return(%z)\n  }}\n"
        )
    body = main_text(call="a39").replace("  stg.func @f", functions + "  stg.func @f")
    refused(opened(tmp_path, body), f"hold more than {MAX_OPERATIONS:,} operations")


def test_names_of_parameters_are_unique() -> None:
    """Those of a call, of a repeat and of a value meet in one path."""
    module = parse(
        text(
            "m",
            "  stg.func @g[private] (%x: bf16[B, D]) {\n"
            "    %w = stg.param : bf16[D]\n    %y = stg.rmsnorm(%x, %w)\n    stg.return(%y)\n  }\n"
            "  stg.func @f(%x: bf16[B, D]) {\n"
            "    %a = stg.call @g[as = s](%x)\n"
            "    %b = stg.repeat @s[count = 2] (%h = %a) {\n"
            "      %w = stg.param : bf16[D]\n      %n = stg.rmsnorm(%h, %w)\n"
            "      stg.yield(%n)\n    }\n"
            "    %c = stg.call @g[as = s_2](%b)\n    stg.return(%c)\n  }\n",
        )
    )
    run_passes(module, CALLS)
    names = [arg.name for arg in module.main.body.args]
    assert names == ["x", "s/w", "s_2/w", "s_2_2/w"]
    assert print_module(parse(print_module(module))) == print_module(module)
