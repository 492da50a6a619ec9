"""Lints of tests and tracked files: each on a text that has the fault and one that has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagec.testing.lint import directive_problem, known_prefixes, lint_lit_text, means_a_test
from tools import lint_checks
from tools.lint_checks import machine_specific

RUN = "// RUN: %stagec opt %s | %filecheck %s\n"


def complaints(text: str) -> list[str]:
    return [f"{f.line}: {f.message}" for f in lint_lit_text(Path("x.stg"), text)]


@pytest.mark.parametrize(
    ("line", "prefixes"),
    [
        ("%stagec opt %s | %filecheck %s", {"CHECK"}),
        ("%stagec opt %s | %golden", set[str]()),
        ("%stagec opt %s | %filecheck %s --check-prefix=TP", {"TP"}),
        (
            "%stagec opt %s | %filecheck --check-prefixes A,B %s && %filecheck %s",
            {"A", "B", "CHECK"},
        ),
    ],
)
def test_known_prefixes(line: str, prefixes: set[str]) -> None:
    assert known_prefixes([line]) == prefixes


@pytest.mark.parametrize(
    ("word", "colon", "problem"),
    [
        ("CHECK", True, ""),
        ("CHECK-NEXT", True, ""),
        ("CHECK-COUNT-3", True, ""),
        ("CHECK", False, "no colon"),
        ("CHECK-NEXT", False, "no colon"),
        ("CHECK-NXT", True, "no known directive"),
        ("CHECK_NEXT", False, "no known directive"),
        ("CHEK", True, "no known directive"),
        ("OTHER-NEXT", False, "no known directive"),
        ("FSDP", False, ""),
        ("RUN", True, ""),
        ("RUN", False, "no colon"),
        ("XFAIL", True, "no known directive"),
    ],
)
def test_directive_problem(word: str, colon: bool, problem: str) -> None:
    actual = directive_problem(word, colon, {"CHECK"})
    assert problem in actual
    assert bool(problem) == bool(actual)


def test_a_clean_test_has_no_findings() -> None:
    assert (
        complaints(f"{RUN}// FSDP gathers.\n%a = x // CHECK: foo\n// CHECK-NEXT{{LITERAL}}: y\n")
        == []
    )


def test_findings_name_the_line() -> None:
    assert complaints(f"{RUN}// CHECK: a\n%b = y // CHECK-NEXT b\n") == [
        "3: `CHECK-NEXT` has no colon: FileCheck ignores it"
    ]


def test_a_test_without_run_is_reported() -> None:
    assert complaints("stg.module\n") == ["1: no RUN line: the test runs nothing"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("// RUN: x\n", True),
        ("stg.module @m  // CHECK: x\n", True),
        ("// RUN %stagec\n", True),
        ("# GOLDEN\n", True),
        ("// A model of RUN length.\nstg.module @m\n", False),
        ("", False),
    ],
)
def test_a_file_with_a_directive_is_meant_as_a_test(text: str, meant: bool) -> None:
    assert means_a_test(text) == meant


def test_checks_without_filecheck_are_reported() -> None:
    (actual,) = complaints("// RUN: %stagec opt %s\n// CHECK: x\n")
    assert "no RUN line runs %filecheck" in actual


def test_the_golden_section_is_not_linted() -> None:
    assert complaints("// RUN: %stagec opt %s | %golden\n// GOLDEN:\n// CHECK x\n// FOO: y\n") == []


def test_inputs_and_golden_directories_hold_no_tests(tmp_path: Path) -> None:
    for folder in ("Inputs", "x.golden", "good"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.stg").write_text("")
    assert [f.path for f in lint_checks.lint_lit(tmp_path)] == [tmp_path / "good" / "a.stg"]


@pytest.mark.parametrize("top", ["work", "root", "home", "Users"])
def test_machine_paths_are_found(top: str) -> None:
    assert machine_specific(f"see '/{top}/someone/x'", [])
    assert not machine_specific(f"see https://example.org/{top}/someone and a/{top}/b", [])


def test_the_checkout_itself_is_a_machine_path() -> None:
    assert machine_specific("in /srv/x/stagec/y", ["/srv/x/stagec"]) == "/srv/x/stagec"


def test_package_index_options_are_found() -> None:
    assert machine_specific("pip install --index" + "-url https://x.example", [])


def test_main_reports_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests" / "lit").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("fine\n")
    assert lint_checks.main(tmp_path) == 0
    (tmp_path / "a.txt").write_text("cd /" + "home/someone\n")
    assert lint_checks.main(tmp_path) == 1
    assert "a.txt:1:" in capsys.readouterr().out


# -- passes ----------------------------------------------------------------------------------------

API = "from stagec.ir.core import Operation\nfrom stagec.pipeline.passes import Pass\n"
A_PASS = "from stagec.api import Pass\n\nclass A(Pass):\n    pass\n"


def complaints_about_passes(root: Path, **texts: str) -> list[str]:
    for name, text in {**texts, "stagec/api": API}.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    actual = lint_checks.lint_passes(root)
    return [f"{f.path.relative_to(root)}:{f.line}: {f.message}" for f in actual]


def test_a_pass_is_imported_by_the_list_of_passes_only(tmp_path: Path) -> None:
    again = "from stagec.passes.part.a import A\n"
    texts = {
        "passes/__init__": again,
        "passes/part/a": A_PASS + "from stagec.passes.part.help import f\n",
        "passes/part/help": "f = 1\n",
        "passes/part/b": again,
    }
    (actual,) = complaints_about_passes(tmp_path, **texts)
    assert actual.startswith("passes/part/b.py:1: `stagec.passes.part.a` is a pass")


def test_a_pass_imports_what_is_public_from_there(tmp_path: Path) -> None:
    core = "from stagec.ir.core import Use\nfrom stagec.ir.core import Operation\n"
    actual = complaints_about_passes(tmp_path, **{"passes/part/a": A_PASS + core})
    expected = "import `Operation` from stagec.api, as a user's pass does"
    assert actual == [f"passes/part/a.py:6: {expected}"]


# -- names -----------------------------------------------------------------------------------------


def test_a_class_name_stands_for_one_thing(tmp_path: Path) -> None:
    texts = {
        "stagec/time/held.py": "class Held:\n    pass\n\nclass _Part:\n    pass\n",
        "stagec/time/other.py": "class Step:\n    pass\n\nclass _Part:\n    pass\n",
        "passes/part/a.py": "import os\n\nclass Held:\n    pass\n",
        "tests/support.py": "class Step:\n    pass\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (actual,) = lint_checks.lint_names(tmp_path)
    assert (actual.path, actual.line) == (tmp_path / "passes/part/a.py", 3)
    assert actual.message.startswith("class `Held` is another one in stagec/time/held.py")
