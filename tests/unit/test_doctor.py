"""`stagec doctor`: what is there is reported with its version, and what is broken fails."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import stagec as package
from stagec.driver.commands import doctor
from stagec.time.clock.speed import COMPILED
from tests.support import stagec
from tests.unit.test_packaging import ROOT


def test_it_reports_this_installation() -> None:
    shown = json.loads(stagec("doctor", "--json").out)
    assert shown["stagec"] == package.__version__ == version("stagec")
    assert shown["compiled"] is COMPILED
    assert shown["problems"] == []
    assert any("stagec.passes:PLUGIN" in plugin for plugin in shown["plugins"])
    assert shown["validation_rows"]["torchtitan"] == 6


def test_required_packages_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {package.name for package in doctor.installation().required}
    assert names == {line.partition(">=")[0] for line in project["dependencies"]}
    extras = {i for i, _ in doctor.OPTIONAL.values() if i.startswith("stagec[")}
    assert extras <= {f"stagec[{name}]" for name in project["optional-dependencies"]}


def test_what_is_missing_is_said_and_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.OPTIONAL, "no-such-package", ("stagec[none]", "nothing"))
    shown = stagec("doctor")
    assert shown.code == 0
    assert "not installed: pip install 'stagec[none]' (nothing)" in shown.out


def test_a_broken_plug_in_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stagec.plugins]\nbroken = no_such_module:PLUGIN\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    shown = stagec("doctor")
    assert shown.code == 1
    assert "broken (no_such_module:PLUGIN)" in shown.out
    assert "problem: plug-in 'broken'" in shown.out
