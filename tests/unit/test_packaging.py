"""The package list of pyproject.toml against the disk, and a wheel against both; the rooms and
layers of CONTRIBUTING.md against what import-linter checks.

setuptools drops a forgotten sub-package or data file in silence; these tests do not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagec.driver.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"stagec": "stagec", "stagec.passes": "passes", "stagec.ir_spec": "ir_spec"}
SHIPPED = {
    *(".py", ".pyi", ".typed", ".stg", ".proto", ".json", ".toml", ".lark", ".md", ".csv"),
    *(".html", ".css", ".js", ".pxd", ".cfg", ".sh"),
}


def tools_config() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    config: dict[str, Any] = tomllib.loads(text)["tool"]
    return config


def setuptools_config() -> dict[str, Any]:
    config: dict[str, Any] = tools_config()["setuptools"]
    return config


def layers() -> list[str]:
    """The layers of the package that import-linter checks, top first."""
    contracts = tools_config()["importlinter"]["contracts"]
    (actual,) = (c["layers"] for c in contracts if c.get("containers") == ["stagec"])
    return list(actual)


def contributing() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def files_of(folder: Path) -> Iterator[Path]:
    """Files below a folder; the two symlinked rooms are visited under their own names."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from files_of(path)
        elif path.suffix in SHIPPED:
            yield path


def shipped_files() -> dict[str, Path]:
    """Name inside the wheel -> path on disk."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / room).as_posix()}": path
        for package, room in ROOMS.items()
        for path in files_of(ROOT / room)
    }


def packages_on_disk() -> set[str]:
    return {name.rpartition("/")[0].replace("/", ".") for name in shipped_files()}


def test_the_package_list_equals_the_disk() -> None:
    listed = setuptools_config()["packages"]
    assert listed == sorted(packages_on_disk())


def test_the_rooms_are_mapped_and_linked() -> None:
    assert setuptools_config()["package-dir"] == ROOMS
    for package, room in ROOMS.items():
        link = ROOT / package.replace(".", "/")
        assert link.resolve() == ROOT / room


def test_every_package_has_an_init() -> None:
    files = shipped_files()
    missing = {p for p in packages_on_disk() if f"{p.replace('.', '/')}/__init__.py" not in files}
    assert not missing


# -- what CONTRIBUTING.md says of the rooms --------------------------------------------------------


def test_the_layers_are_those_that_are_checked() -> None:
    (line,) = re.findall(r"^    (\w+ > .*)$", contributing(), re.M)
    assert line.split(" > ") == layers()


def test_every_room_of_the_disk_stands_in_the_table() -> None:
    """In the order of the layers, lowest first; `stagec/` may be left out behind a first room."""
    table = contributing().partition("## Which room")[2].partition("Layers point")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.M)
    named = [Path(room).stem for cell in cells for room in re.findall(r"`([^`]+)`", cell)]
    on_disk = {name.split(".")[1] for name in packages_on_disk() if "." in name}
    assert sorted(named) == sorted({*on_disk, "api", "interface"})
    depth = {room: n for n, layer in enumerate(layers()) for room in layer.split(" | ")}
    assert named == sorted(named, key=lambda room: -depth[room])


def test_the_index_lists_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {"index.md", *re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", text)}
    assert listed == {p.name for p in (ROOT / "docs").glob("*.md")}


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", text, re.M)
    assert pictures
    assert all((ROOT / picture).exists() for picture in pictures)


def test_every_command_stands_in_the_page_of_commands() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    table = text.partition("| command | |")[2].partition("Results go to")[0]
    assert set(re.findall(r"`stagec (\w+)", table)) == set(COMMANDS)


def copied(out: Path) -> Path:
    """A copy of what the package is made of, so that no build output lands in the checkout."""
    copy = out / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, copy)
    for room in ROOMS.values():
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / room, copy / room, symlinks=True, ignore=ignore)
    return copy


def built(copy: Path, out: Path, **env: str) -> Path:
    """A wheel of a project."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(out), str(copy)]
    subprocess.run(command, check=True, env={**os.environ, **env})
    (wheel,) = out.glob("stagec*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    return built(copied(out), out)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what is published."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "validation", copy / "validation")
    return built(copy / "validation", out)


@pytest.mark.long
def test_the_wheel_contains_every_file(wheel: Path) -> None:
    """And the compiled loop of the clock, if there is a compiler."""
    files = packed(wheel)
    compiled = {name for name in files if name.endswith((".so", ".pyd"))}
    assert files - compiled == set(shipped_files())
    assert len(compiled) == (shutil.which("cc") is not None)


@pytest.mark.long
def test_without_a_compiler_the_clock_is_python(tmp_path: Path) -> None:
    """It is installed and gives the same times."""
    wheel = built(copied(tmp_path), tmp_path, CC="no-such-compiler", CXX="no-such-compiler")
    assert packed(wheel) == set(shipped_files())
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert step_seconds(tmp_path / "site") == step_seconds(ROOT)


def step_seconds(folder: Path) -> str:
    """Seconds of a step as the package in a folder has them."""
    code = (
        "import stagec; job = stagec.job('llama3-8b', pp=2, microbatches=4, sizes={'L': 4}); "
        "print(job.time('h100-sxm').step_seconds)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.long
def test_the_wheel_has_its_entry_points(wheel: Path) -> None:
    text = entries(wheel)
    assert "stagec = stagec.__main__:entry" in text
    assert "[stagec.plugins]\nbuiltin = stagec.passes:PLUGIN" in text


@pytest.mark.long
def test_the_wheel_of_figures_is_data(figures: Path) -> None:
    """Every file of every source, and nothing that runs."""
    folder = ROOT / "validation"
    files = [f for about in folder.glob("*/source.toml") for f in about.parent.iterdir()]
    names = {f"{file.parent.name}/{file.name}" for file in files} | {"sources.toml"}
    assert packed(figures) == {f"stagec_validation/{name}" for name in names}
    assert "[stagec.validation]\nstagec = stagec_validation" in entries(figures)


@pytest.mark.long
def test_figures_are_where_their_wheel_is(wheel: Path, figures: Path, tmp_path: Path) -> None:
    """Where they are not, the command says how to get them."""
    for each in (wheel, figures):
        zipfile.ZipFile(each).extractall(tmp_path / each.stem)
    code = (
        "from stagec.validation.steps import measured_steps\n"
        "print(*map(len, measured_steps().values()))"
    )

    def run(*wheels: Path) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(str(tmp_path / each.stem) for each in wheels)
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
            capture_output=True,
            text=True,
        )

    counts = [8, 10, 4, 6, 41, 720, 15, 897, 61, 35, 30, 16, 11, 6, 4, 4]
    assert run(wheel, figures).stdout.split() == [*map(str, counts)]
    assert "are not installed" in run(wheel).stderr


def packed(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def entries(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
    return archive.read(name).decode()
