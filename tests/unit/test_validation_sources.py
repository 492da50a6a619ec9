"""Sources of published figures and measured steps: where they are from, what their files may say,
and what formulas are."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import stagec as package
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import file_loc
from stagec.validation import sources
from stagec.validation.figures import published_rows
from stagec.validation.formula import sizes_of, value_of
from stagec.validation.sources import KINDS, validation_sources
from stagec.validation.steps import measured_steps
from tests.checked_sources import ROOT, listed, written
from tests.support import stagec

HEAD = 'title = "t"\nurl = "https://example.org"\nstates = "s"\n'
FIGURE = f"""{HEAD}
[figures]
source = "a paper"
row = "$model parameters, L = $L, $what"
ours = "parameters / 1e9"
format = ".1f"
digits = 1
"""
STEP = f"""{HEAD}fitted_every = 3
[steps]
row = "tp $tp, D $D"
model = "llama3-8b"
machine = "h100-sxm"
unit = "ms"
sizes = {{ D = 64, F = "4 * D / 2" }}
flags = {{ zero = 1 }}
"""


def test_every_folder_is_listed() -> None:
    both = [s for kind in KINDS for s in validation_sources(kind=kind)]
    on_disk = {path.parent.name for path in (ROOT / "validation").glob("*/source.toml")}
    assert sorted(source.name for source in both) == sorted(on_disk)


def test_every_source_says_where_it_is_from() -> None:
    for source in [s for kind in KINDS for s in validation_sources(kind=kind)]:
        assert source.text.title
        assert source.text.states
        assert source.text.url.startswith("https://")


# -- where sources are from ------------------------------------------------------------------------


def bring(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    """Let these packages be installed, by the names of their entry points."""

    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in packages.items()]

    monkeypatch.setattr(sources, "entry_points", entry_points)


def leave_the_checkout(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let stagec stand where there is no `validation/` beside it."""
    monkeypatch.setattr(package, "__file__", str(folder / "stagec" / "__init__.py"))


@pytest.mark.parametrize("flags", [(), ("--time",)])
def test_without_sources_the_command_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    leave_the_checkout(monkeypatch, tmp_path)
    bring(monkeypatch)
    ran = stagec("validate", *flags)
    assert ran.code == 1
    assert not ran.out
    assert "help: pip install 'stagec[validation]'" in ran.err


def test_packages_bring_sources_behind_those_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By an entry point; the installed ones of stagec are left for those of the checkout."""
    there = tmp_path / "measured_here"
    there.mkdir()
    with monkeypatch.context() as patch:
        row = "gpus,measured,flags.tp\n2,9,2\n"
        written(patch, there, {"source.toml": STEP, "rows.csv": row})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    bring(monkeypatch, stagec="no_such_package", here="measured_here")
    names = [*measured_steps()]
    assert names[0] == "korthikanti"
    assert names[-1] == "mine"
    assert "measured_here" not in sys.modules
    leave_the_checkout(monkeypatch, tmp_path)
    with pytest.raises(DiagnosticError, match="cannot find the package 'no_such_package'"):
        measured_steps()


# -- rows ------------------------------------------------------------------------------------------


def test_cells_go_before_their_kind_and_that_before_what_all_rows_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = f"{STEP}[kind.wide]\nsizes = {{ D = 128 }}\nflags = {{ zero = 2, sp = true }}\n"
    rows = "gpus,measured,kind,flags.tp,flags.zero\n2,9,,2,\n2,9,wide,2,\n2,9,wide,2,3\n2,7,,1,\n"
    written(monkeypatch, tmp_path, {"source.toml": text, "rows.csv": rows})
    steps = measured_steps()["mine"]
    assert [step.row for step in steps] == ["tp 2, D 64", *["tp 2, D 128"] * 2, "tp 1, D 64"]
    assert [step.sizes["F"] for step in steps] == [128, 256, 256, 128]
    assert [step.flags["zero"] for step in steps] == [1, 2, 3, 1]
    assert [step.flags.get("sp") for step in steps] == [None, True, True, None]
    assert [step.fitted for step in steps] == [True, False, False, True]
    assert steps[3].seconds == pytest.approx(7e-3)


@pytest.mark.parametrize(
    ("rows", "message", "remedy"),
    [
        ("gpus,measured,flag.tp\n2,9,2\n", "unknown name 'flag'", "did you mean 'flags'"),
        ("gpus,measured,flags.pt\n2,9,2\n", "no flag 'pt'", "did you mean 'pp'"),
        ("gpus,measured,flags.tp\n2,9,two\n", "tp: 'two' is not", "on the command line"),
        ("gpus,flags.tp\n2,2\n", "'measured' is missing", "add it"),
        ("gpus,measured,flags\n2,9,2\n", "'flags' must be a table", "are tables"),
        ("gpus,measured,kind\n2,9,wode\n", "unknown kind 'wode'", "did you mean 'wide'"),
        ("gpus,measured\n2,9,3\n", "more cells than columns", "quote"),
        ("gpus,measured\n2,9\n", "unknown name 'tp'", "correct the row"),
        ("gpus,measured,flags.tp\n2,x,2\n", "could not convert", "correct the row"),
        ("gpus,measured,flags.tp\n2,-1,2\n", "a step cannot take -0.001 s", "correct the row"),
        ("gpus,measured,kind\n2,9,flat\n", "unknown kind 'flat'", "add "),
        ("gpus,measured,flags.tp,unit\n2,9,2,h\n", "unknown unit 'h'", "correct the row"),
        ("gpus,measured,flags.tp,sizes.D\n2,9,2,Q\n", "unknown size 'Q'", "correct the row"),
        ("gpus,measured,flags.tp,sizes.K\n2,9,2,D/3\n", "a size cannot be 64/3", "correct the row"),
        ("gpus,measured,flags.tp,judged\n2,9,2,hm\n", "not a valid boolean", "correct the row"),
    ],
)
def test_mistakes_have_their_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: str, message: str, remedy: str
) -> None:
    files = {"source.toml": f"{STEP}[kind]\nflat = 1\n[kind.wide]\n", "rows.csv": rows}
    folder = written(monkeypatch, tmp_path, files)
    with pytest.raises(DiagnosticError, match=message) as caught:
        measured_steps()
    (problem,) = caught.value.diagnostics
    place = file_loc(problem.loc)
    assert place is not None
    assert (place.file, place.line) == (str(folder / "rows.csv"), 2)
    assert remedy in str(problem.remedy)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"source.toml": "title ="}, "not TOML"),
        ({"source.toml": HEAD + "titel = 1"}, "unknown name 'titel'"),
        ({"source.toml": "title = 't'"}, "'url' is missing"),
        ({"source.toml": HEAD + "steps = 3"}, "'steps' must be a"),
    ],
)
def test_mistakes_of_a_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: Mapping[str, str], message: str
) -> None:
    written(monkeypatch, tmp_path, files)
    with pytest.raises(DiagnosticError, match=message):
        measured_steps()


def test_a_list_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed(monkeypatch, tmp_path, "mine")
    (tmp_path / sources.LIST).write_text("source = []")
    with pytest.raises(DiagnosticError, match="lists no sources"):
        measured_steps()


def test_sources_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written(monkeypatch, tmp_path, {"source.toml": STEP, "rows.csv": "gpus\n"})
    listed(monkeypatch, tmp_path, "mine", "mine")
    with pytest.raises(DiagnosticError, match="two sources have the name 'mine'"):
        measured_steps()


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "ok"),
    [("8.0", True), ("8.1", False), ("7.9 to 8.2", True), ("8.2 to 8.3", False), ("L / 4", True)],
)
def test_figures_are_right_as_they_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, published: str, ok: bool
) -> None:
    rows = f"model,notes.what,published\nllama3-8b,all,{published}\n"
    written(monkeypatch, tmp_path, {"source.toml": FIGURE, "rows.csv": rows})
    (row,) = published_rows()
    assert row.row == "llama3-8b parameters, L = 32, all"
    assert row.ours == "8.0"
    assert row.published == (published if published[0].isdigit() else "8.0")
    assert row.ok == ok


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("model,notes.what,published\nllama4-8b,a,8\n", "no model 'llama4-8b'"),
        ("model,notes.what,published\n,a,8\n", "'parameters' needs a model"),
        ("model,notes.what,published,ours\ngpt2,a,8,parametres\n", "unknown quantity"),
        ("model,notes.what,published,ours\ngpt2,a,8,memory.stsh\n", "unknown quantity"),
        ("model,notes.what,published,ours\ngpt2,a,8,memory.stash\n", "needs a value for 'B'"),
        ('model,notes.what,published,ours\ngpt2,a,8,"bytes(send, pp)"\n', "unknown quantity"),
        ("model,notes.what,published,ours\ngpt2,a,8,1 / (S - S)\n", "divides by zero"),
        ("model,notes.what,published,ours\ngpt2,a,8,bubble\n", "needs the flags pp"),
        ("model,notes.what,published,format\ngpt2,a,8,q\n", "format"),
        ("model,notes.what,published,digits\ngpt2,a,8,q\n", "invalid literal"),
    ],
)
def test_mistakes_of_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cells: str, message: str
) -> None:
    folder = written(monkeypatch, tmp_path, {"source.toml": FIGURE, "rows.csv": cells})
    with pytest.raises(DiagnosticError, match=message) as caught:
        published_rows()
    place = file_loc(caught.value.diagnostics[0].loc)
    assert place is not None
    assert (place.file, place.line) == (str(folder / "rows.csv"), 2)


# -- formulas --------------------------------------------------------------------------------------

SIZES = {"L": 4, "D": 6, "H": 2}


def product(name: tuple[str, ...], sizes: Mapping[str, int]) -> Fraction:
    """A quantity: what its names are the sizes of, multiplied."""
    value = Fraction(1)
    for part in name[1:]:
        value *= sizes[part]
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3 - 4 / 8", Fraction(13, 2)),
        ("0.1 + 1e3", Fraction(10001, 10)),
        ("(L + D) / H", Fraction(5)),
        ("of(L, D)", Fraction(24)),
        ("of.L", Fraction(4)),
        ("more(of(L, D), L=L + 1)", Fraction(6)),
        ("more(of(L, D) + 9, L=2 * L)", Fraction(24)),
        # what both more layers and twice the width add, and neither alone
        ("more(more(of(L, D), L=L + 1), D=2 * D)", Fraction(6)),
        ("more(more(of(L) + of(D), L=L + 1), D=2 * D)", Fraction(0)),
    ],
)
def test_formulas_are_exact(text: str, value: Fraction) -> None:
    assert value_of(text, SIZES, product) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "1 +", "L ** 2", "-L", "'L'", "[L]", "(lambda: 1)()", "of(L)(D)", "of.L.D", "L < D"),
        *("of(1)", "more(L, L=L / 3)", "__import__('os')", "(" * 300 + "L" + ")" * 300),
    ],
)
def test_what_is_no_formula(text: str) -> None:
    with pytest.raises(ValueError, match=r"formula|size cannot"):
        value_of(text, SIZES, product)


def test_sizes_are_numbers_and_formulas_of_these() -> None:
    assert sizes_of({"K": "D / H", "D": 8, "H": "2"}) == {"D": 8, "H": 2, "K": 4}
    with pytest.raises(ValueError, match="unknown size 'F'"):
        sizes_of({"K": "F / 2", "F": "4 * D", "D": 8})
