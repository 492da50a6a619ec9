"""docs/python.md and the notebooks: what they show is what they give."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import LONG
from tools.notebook import ran, read

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
NOTEBOOKS = sorted((ROOT / "docs" / "examples").glob("*.ipynb"))


@LONG
def test_the_page_shows_what_python_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = "\n".join(
        "" if line.startswith("```") else line for line in PAGE.read_text().split("\n")
    )
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 15
    actual: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=actual.append)
    assert not failed, "".join(actual)


@LONG
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_cells_give(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored: Any = json.loads(notebook.read_text())
    assert ran(read(notebook)) == stored, (
        f"to accept: python -m tools.notebook docs/examples/{notebook.name}"
    )
