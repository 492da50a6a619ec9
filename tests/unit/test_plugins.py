"""Plug-ins of installed packages: found by their entry point, without network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagec.ir.opdef import OpDef
from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import DiagnosticError
from tests.support import LONG, stagec

EXAMPLE = Path(__file__).resolve().parent.parent / "plugin_example"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path; modules imported from it are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("stagec_example"):
            del sys.modules[name]


def pretend_installed(site: Path, name: str, value: str) -> None:
    """The metadata that an installer would leave."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[stagec.plugins]\n{name} = {value}\n")


def test_an_installed_package(site: Path) -> None:
    shutil.copytree(EXAMPLE / "src" / "stagec_example", site / "stagec_example")
    pretend_installed(site, "example", "stagec_example:PLUGIN")
    loaded = load_plugins()
    assert loaded.registry.get("ex.relu6") is not None
    assert loaded.origins["use-relu6"] == "example"
    assert "relu6-placed" in loaded.pipelines
    assert "use-relu6" in stagec("passes").out
    assert "min(max(x, 0), limit)" in stagec("ops", "ex.relu6").out


def test_what_a_caller_adds_is_its_own() -> None:
    class Mine(OpDef):
        name = "my.op"

    load_plugins().registry.add(Mine())
    assert load_plugins().registry.get("my.op") is None


def test_the_same_plugin_twice_is_a_clash(site: Path) -> None:
    shutil.copytree(EXAMPLE / "src" / "stagec_example", site / "stagec_example")
    pretend_installed(site, "example", "stagec_example:PLUGIN")
    with pytest.raises(DiagnosticError, match="registers 'use-relu6', which plug-in 'example'"):
        load_plugins([EXAMPLE / "src" / "stagec_example" / "__init__.py"])


@pytest.mark.parametrize("value", ["no_such_package_here:PLUGIN", "json:PLUGIN", "json:dumps"])
def test_a_broken_package_is_a_diagnostic(site: Path, value: str) -> None:
    pretend_installed(site, "broken", value)
    outcome = stagec("passes")
    assert outcome.code == 1
    assert f"plug-in 'broken' ({value})" in outcome.err
    assert "  help: " in outcome.err
    assert "Traceback" not in outcome.err


@LONG
def test_pip_installs_the_example(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], check=True)
    script = "from stagec.driver.cli import main; main(['passes', 'use-relu6'])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "use-relu6: parsed to differentiated" in done.stdout


def test_a_schedule_of_a_plugin_is_used(tmp_path: Path) -> None:
    plugin = EXAMPLE / "src" / "stagec_example" / "__init__.py"
    job = ["llama3-8b", "--pp", "2", "--microbatches", "3", "--set", "L=2", "--quiet"]
    made = stagec(
        "compile",
        *job,
        "--schedule",
        "depth-first-back",
        "--plugin",
        plugin,
        "-o",
        tmp_path / "out",
    )
    assert made.code == 0, made.err
    assert stagec("check", tmp_path / "out").code == 0
    drawn = stagec(
        "schedule", "depth-first-back", "--stages", "2", "--microbatches", "3", "--plugin", plugin
    )
    assert "rank 0" in drawn.out
    missing = stagec("compile", *job, "--schedule", "depth-first", "-o", tmp_path / "other")
    assert missing.code == 1
    assert "no schedule 'depth-first'" in missing.err


BAD_SCHEDULE = """
from stagec.api import Action, Plugin, Schedule

class Half(Schedule):
    name = "half"
    summary = "forgets to go back"

    def rank_actions(self, rank, stages, microbatches, chunks):
        return [Action("F", 0, i) for i in range(microbatches)]

PLUGIN = Plugin(name="half", schedules=(Half(),))
"""


def test_a_schedule_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(BAD_SCHEDULE)
    job = ["compile", "llama3-8b", "--pp", "2", "--schedule", "half", "--plugin", str(file)]
    made = stagec(*job, "--dry-run")
    assert made.code == 1
    assert "error:" in made.err
    assert "Traceback" not in made.err
