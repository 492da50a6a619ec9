"""What a release has beside the package: citation, container, the action for other repositories,
man pages, and a source distribution from which the wheel can be built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import stagec
from stagec.driver.cli import COMMANDS
from tests.unit.test_packaging import ROOT, built, copied, shipped_files
from tests.unit.test_packaging import packed as packed_files
from tools import man


def project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def test_the_citation_is_that_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == project()["version"] == stagec.__version__
    assert cited["license"] == project()["license"]


def test_classifiers_say_the_versions_of_python() -> None:
    named = re.findall(r":: (3\.\d+)$", "\n".join(project()["classifiers"]), re.M)
    assert named == ["3.11", "3.12", "3.13", "3.14"]
    assert project()["requires-python"] == f">={named[0]}"


def steps_of_the_action() -> list[dict[str, Any]]:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps: list[dict[str, Any]] = action["runs"]["steps"]
    used = set(re.findall(r"inputs\.(\w+)", str(action["runs"])))
    assert used == set(action["inputs"])
    return [step for step in steps if "run" in step]


@pytest.mark.long
def test_the_action_compares_with_golden_traces(tmp_path: Path) -> None:
    """Its steps but the installation, as a runner executes them: traces that changed fail."""
    inputs = {
        "COMMAND": "compile llama3-8b --set L=2 -o out --name job --quiet --force",
        "GOLDEN": "golden",
        "TRACES": "out",
    }
    last = [step["run"] for step in steps_of_the_action() if set(step.get("env", ())) <= {*inputs}]
    assert len(last) == 2

    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def ran(**changed: str) -> int:
        given = {**os.environ, "PATH": beside, **inputs, **changed}
        script = "\n".join(["set -e", *last])
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=given, check=False)
        return done.returncode

    first = {**os.environ, "PATH": beside, **inputs}
    subprocess.run(["bash", "-ec", last[0]], cwd=tmp_path, env=first, check=True)
    (tmp_path / "out").rename(tmp_path / "golden")
    assert ran() == 0
    assert ran(COMMAND=inputs["COMMAND"].replace("L=2", "L=3")) == 1


def test_the_container_builds_from_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    sources = re.findall(r" /src(/\w+)?", text)
    assert all((ROOT / source.strip("/")).is_dir() for source in sources)
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {"stagec", "passes", "ir_spec", "validation", "README.md"} & {*left_out}
    named = re.search(r"python:(3\.\d+)-slim AS build", text)
    assert named is not None
    assert f"Programming Language :: Python :: {named[1]}" in project()["classifiers"]


@pytest.mark.long
def test_a_wheel_comes_from_the_source_distribution(tmp_path: Path) -> None:
    """It has the files of one from a checkout."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", str(out)]
    subprocess.run([*command, str(copied(tmp_path))], check=True, capture_output=True)
    (archive,) = out.glob("stagec-*.tar.gz")
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:  # Python 3.11.3 and older have no filters
        packed.extractall(tmp_path, **safely)
    wheel = built(tmp_path / archive.name.removesuffix(".tar.gz"), out)
    compiled = {name for name in packed_files(wheel) if name.endswith((".so", ".pyd"))}
    assert packed_files(wheel) - compiled == set(shipped_files())


@pytest.mark.long
def test_there_is_a_man_page_for_each_command(tmp_path: Path) -> None:
    assert man.main([str(tmp_path)]) == 0
    names = {page.stem for page in tmp_path.glob("*.1")}
    assert names == {"stagec", *(f"stagec-{name}" for name in COMMANDS)}
    assert "--advise" in (tmp_path / "stagec-memory.1").read_text("utf-8").replace("\\-", "-")


def test_the_site_has_every_page() -> None:
    """Pages that its navigation forgets would be warnings of `make site`; here they fail sooner."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w/-]+\.md)$", text, re.M))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    added = {"changelog.md", "contributing.md", "language.md", "validation.md"}
    folders = {"decisions/README.md"} | {
        f"reference/{name}/index.md" for name in ("api", "commands", "ops", "passes")
    }
    folders |= {"reference/flags.md", "reference/families.md"}
    assert named == pages | added | folders
