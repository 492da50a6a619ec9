"""Sources of published figures and measured steps, changed for a test."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from stagec.validation import sources

ROOT = Path(__file__).resolve().parents[1]


def only(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *changes: tuple[str, str]
) -> Path:
    """Let `stagec validate` see a copy of one source, with texts in its files changed."""
    shutil.copytree(ROOT / "validation" / name, folder / name)
    for file in (folder / name).iterdir():
        for before, after in changes:
            file.write_text(file.read_text().replace(before, after))
    return listed(monkeypatch, folder, name)


def written(
    monkeypatch: pytest.MonkeyPatch, folder: Path, files: Mapping[str, str], name: str = "mine"
) -> Path:
    """Let `stagec validate` see one source, of these files."""
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(text)
    return listed(monkeypatch, folder, name)


def listed(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> Path:
    """Let `stagec validate` see these folders only."""
    (folder / sources.LIST).write_text(f"sources = {list(names)}")
    monkeypatch.setattr(sources, "_folders", lambda: [folder])
    return folder / names[0]
