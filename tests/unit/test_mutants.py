"""The table of mutants: every patch fits the compiler as it is; `make mutants` runs them."""

from __future__ import annotations

import pytest

from stagec.passes import PLUGIN
from stagec.testing.syntax import find_tests
from tests.support import DISTINCT
from tools.mutants import LIT, ROOT, TABLE, Mutant, read_table
from tools.mutations import mutants_of, sampled

pytestmark = DISTINCT

MUTANTS = read_table(TABLE.read_text())


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_patch_fits_once_and_can_be_run(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    patched = mutant.apply(text)
    assert patched != text
    compile(patched, mutant.file, "exec")
    assert any(find_tests(ROOT / LIT / mutant.folder))


def test_a_patch_that_does_not_fit_is_refused() -> None:
    mutant = Mutant("it", "passes/bind", "a.py", "a = 1", "a = 2")
    assert mutant.apply("a = 1\n") == "a = 2\n"
    for text in ("b = 1\n", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match=r"a\.py has 'a = 1' [02] times, expected once"):
            mutant.apply(text)


def test_mutants_are_distinguished_by_what_they_break() -> None:
    assert len({str(m) for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.stands, m.instead) for m in MUTANTS}) == len(MUTANTS)


def test_every_pass_has_a_lit_folder_and_a_mutant() -> None:
    """But `emit`, which writes files (`tests/unit/test_emit.py`), and mutants of `verify`, whose
    checks have a folder of their own, `tests/lit/verify`."""
    names = {p.name.replace("-", "_") for p in PLUGIN.passes}
    assert {p.name for p in (ROOT / LIT / "passes").iterdir()} == names - {"emit"}
    mutated = {m.folder for m in MUTANTS}
    assert {name for name in names if f"passes/{name}" not in mutated} == {"emit", "verify"}


@pytest.mark.long
def test_generated_mutants_are_other_programs() -> None:
    path = ROOT / "passes" / "lower" / "fuse_kernels.py"
    actual = list(mutants_of(path, "passes/fuse_kernels"))
    assert len(actual) > 30
    assert {m.stands for m in actual} == {path.read_text()}
    kinds = {"->": 0, " and ": 0, " not in ": 0}
    for mutant in actual:
        compile(mutant.instead, mutant.file, "exec")
        assert mutant.instead != mutant.stands
        kinds |= {kind: kinds[kind] + (kind in mutant.breaks) for kind in kinds}
    assert all(kinds.values())
    assert [str(m) for m in sampled(5, 3)] == [str(m) for m in sampled(5, 3)]
