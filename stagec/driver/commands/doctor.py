"""`stagec doctor`: installed packages, missing optional ones, and problems."""

import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any, TextIO

import click

import stagec
from stagec.driver.shell.click_options import takes
from stagec.driver.shell.show import show
from stagec.jobs.request.result import FORM, JSON
from stagec.output.report import Report
from stagec.pipeline.plugins import GROUP, load_plugins
from stagec.support.diagnostics import DiagnosticError

#: package -> the argument of pip install, its purpose
OPTIONAL = {
    "distributed": ("stagec[dask]", "workers on a cluster: --scheduler"),
    "aiconfigurator-core": ("stagec[kernels]", "measured kernels: --kernels-from aiconfigurator"),
    "infragraph": ("stagec[infragraph]", "networks from InfraGraph files: --machine DEVICE+FILE"),
    "cairosvg": ("stagec[pdf]", "plots as PDF: --html FILE.pdf"),
    "pandas": ("pandas", "answers as data frames: to_pandas()"),
}
_COMPILED = "compiled with Cython"
_PYTHON = "Python: slower; install a C compiler and build the package again"


@dataclass(frozen=True)
class Package:
    """A required or optional package, with its version (None if it is not installed)."""

    name: str
    version: str | None
    install: str
    use: str


@dataclass(frozen=True)
class Installation(Report):
    """An installation. `problems` are those that prevent commands from working; a missing optional
    package is not one."""

    stagec: str
    python: str
    platform: str
    folder: str
    compiled: bool
    required: tuple[Package, ...]
    optional: tuple[Package, ...]
    plugins: tuple[str, ...]
    validation_rows: dict[str, int] | None
    problems: tuple[str, ...]

    @property
    def title(self) -> str:
        return "stagec doctor"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def print(self, stream: TextIO) -> None:
        for name, text in self._lines():
            stream.write(f"{name:<20}  {text}".rstrip() + "\n")
        for problem in self.problems:
            stream.write(f"problem: {problem}\n")

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "stagec", f"{self.stagec}, in {self.folder}"
        yield "python", f"{self.python}, {self.platform}"
        yield "clock", _COMPILED if self.compiled else _PYTHON
        yield "required", ", ".join(f"{each.name} {each.version}" for each in self.required)
        for each in self.optional:
            missing = f"not installed: pip install '{each.install}'"
            yield each.name, f"{each.version or missing} ({each.use})"
        yield "plug-ins", ", ".join(self.plugins)
        yield "published figures", _rows_text(self.validation_rows)


@click.command("doctor")
@takes(JSON, FORM)
def command(**given: Any) -> int:
    """Report the version, the interpreter, whether the clock is compiled, required and optional
    packages, plug-ins, and rows of published figures. Exit code 1 if anything is broken."""
    answer = installation()
    show(answer, {**given, "output": None})
    return int(bool(answer.problems))


def installation() -> Installation:
    """The current installation. Does not raise: failures are in its `problems`."""
    from stagec.time.clock.speed import COMPILED

    required = tuple(_package(name, name, "") for name in _required())
    problems = [
        f"{each.name} is not installed: pip install {each.name}"
        for each in required
        if each.version is None
    ]
    rows: dict[str, int] | None = None
    try:
        load_plugins(())
        rows = _validation_rows()
    except DiagnosticError as broken:
        problems += [str(each.message) for each in broken.diagnostics]
    return Installation(
        stagec=stagec.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=f"{platform.system()} {platform.machine()}",
        folder=str(Path(str(stagec.__file__)).parent),
        compiled=COMPILED,
        required=required,
        optional=tuple(_package(name, *about) for name, about in OPTIONAL.items()),
        plugins=tuple(f"{e.name} ({e.value})" for e in dict.fromkeys(entry_points(group=GROUP))),
        validation_rows=rows,
        problems=tuple(problems),
    )


def _required() -> list[str]:
    """The names of the required packages of the distribution, without its extras."""
    with suppress(PackageNotFoundError):
        lines = requires("stagec") or ()
        return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if ";" not in line]
    return []


def _package(name: str, install: str, use: str) -> Package:
    try:
        return Package(name, version(name), install, use)
    except PackageNotFoundError:
        return Package(name, None, install, use)


def _validation_rows() -> dict[str, int] | None:
    """Rows by source; None if no package with sources is installed. Raises `DiagnosticError` for a
    source that cannot be read."""
    from stagec.validation.sources import KINDS, has_sources, validation_sources

    if not has_sources():
        return None
    sources = [source for kind in KINDS for source in validation_sources(kind=kind)]
    return {source.name: len(list(source.rows())) for source in sources}


def _rows_text(rows: dict[str, int] | None) -> str:
    if rows is None:
        return "not installed: pip install 'stagec[validation]' (stagec validate)"
    return f"{sum(rows.values()):,} rows of {len(rows)} sources"
