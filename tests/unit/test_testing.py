"""`stagec test` in the folder of an author, with a plug-in beside its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stagec

PLUGIN = '''
from dataclasses import dataclass
from stagec.api import Builder, Module, Pass, Phase, Plugin

@dataclass(frozen=True)
class FastGelu(Pass):
    """Use SiLU in place of GeLU."""

    name = "fast-gelu"
    needs = Phase.SHAPED

    def run(self, module: Module) -> None:
        for op in [op for op in module.walk() if op.name == "stg.gelu"]:
            b = Builder.before(module.registry, op)
            op.result.replace_with(b.value("stg.silu", op.operands, hint=op.result.name))
            op.erase()

PLUGIN = Plugin(name="fast", passes=(FastGelu,))
'''
MODULE = """stg.module @m {
  stg.symbols[B]
  stg.func @f(%x: bf16[B]) {
    %y = stg.gelu(%x)
    stg.return(%y)
  }
}
"""
RUN = "// RUN: %stagec opt %s --plugin my.py -p infer-shapes,fast-gelu"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An author's folder: a plug-in, a model, and two tests of which the second is not accepted."""
    monkeypatch.delenv("STAGEC_BLESS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(PLUGIN)
    (tmp_path / "model.stg").write_text(MODULE)
    (tmp_path / "check.stg").write_text(f"{RUN} | %filecheck %s\n// CHECK: stg.silu\n{MODULE}")
    (tmp_path / "golden.stg").write_text(f"{RUN} | %golden\n{MODULE}")
    return tmp_path


def test_the_tests_of_a_folder(folder: Path) -> None:
    outcome = stagec("test", "-v", "check.stg")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("PASS check.stg\n1 test: all passed (")


def test_a_failure_shows_the_difference_and_how_to_accept_it(folder: Path) -> None:
    outcome = stagec("test", "-j", "1")
    assert outcome.code == 1
    assert "FAIL golden.stg\n" in outcome.out
    assert "+    %y = stg.silu(%x) : bf16[B]" in outcome.out
    assert f"stagec test {folder / 'golden.stg'} --bless" in outcome.out
    assert "2 tests: 1 failed, 1 passed (" in outcome.out
    assert (folder / "golden.stg").read_text() == f"{RUN} | %golden\n{MODULE}"


def test_accepting_rewrites_the_goldens_once(folder: Path) -> None:
    accepted = stagec("test", "--bless", "-j", "1")
    assert accepted.code == 0
    assert f"golden: wrote {folder / 'golden.stg'}\n" in accepted.out
    assert "// GOLDEN:\n" in (folder / "golden.stg").read_text()
    again = stagec("test", "-j", "1")
    assert again.code == 0
    assert "wrote" not in again.out


def test_several_at_once_say_the_same(folder: Path) -> None:
    outcome = stagec("test", "-j", "2", "-v")
    assert outcome.code == 1
    assert outcome.out.index("PASS check.stg") < outcome.out.index("FAIL golden.stg")
    assert "without a RUN line, so no tests: model.stg" in outcome.err


def test_some_tests_by_their_path(folder: Path) -> None:
    assert "1 test: all passed" in stagec("test", "-k", "check").out
    outcome = stagec("test", "-k", "nothing")
    assert outcome.code == 1
    assert "error: no test has 'nothing' in its path" in outcome.err


def test_a_misspelt_directive_fails_before_anything_runs(folder: Path) -> None:
    text = (folder / "check.stg").read_text()
    (folder / "check.stg").write_text(text.replace("CHECK:", "CHEK:"))
    outcome = stagec("test", "check.stg")
    assert outcome.code == 1
    assert "check.stg:2: `CHEK` is no known directive" in outcome.out


def test_a_test_whose_run_line_is_misspelt_is_not_taken_for_an_input(folder: Path) -> None:
    (folder / "check.stg").write_text(f"// RUN {RUN}\n{MODULE}")
    outcome = stagec("test", "-k", "check")
    assert outcome.code == 1
    assert "check.stg:1: no RUN line: the test runs nothing" in outcome.out


def test_a_folder_without_tests_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.stg").write_text(MODULE)
    outcome = stagec("test", tmp_path)
    assert outcome.code == 1
    assert "error: no tests found" in outcome.err
    assert "help: start a test with '// RUN: %stagec opt" in outcome.err


def test_a_path_that_is_not_there_is_a_usage_error() -> None:
    assert stagec("test", "no/such/folder").code == 2


@pytest.mark.long
def test_the_module_is_the_command(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagec.testing", "check.stg"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 test: all passed" in done.stdout
