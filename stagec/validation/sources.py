"""The sources of published figures and measured steps: folders with a `source.toml`, which has the
common values of all rows, and a `rows.csv`.

A package provides folders by an entry point of the group `stagec.validation`, whose value is the
package; its `sources.toml` lists them. In a checkout, those of stagec are next to it and need no
installation.
"""

import csv
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeVar

import stagec
from stagec.jobs.request.option import Switch, text_of
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.json_values import is_list
from stagec.support.source import FileLoc
from stagec.support.suggest import did_you_mean
from stagec.support.texts import read_text
from stagec.support.toml_text import toml_tables

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GROUP, OWN = "stagec.validation", "stagec"
LIST, ABOUT, ROWS = "sources.toml", "source.toml", "rows.csv"
_TABLES = "sizes, flags, changes, notes and moments of memory are tables, and nothing else is"
#: The kinds of rows, and the names of the tables of a `source.toml` with their common values.
KINDS = ("figures", "steps", "memory", "serve")
RecordT = TypeVar("RecordT", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row or a file: its values by name, texts and tables such as `sizes`, and its place."""

    place: FileLoc
    given: Mapping[str, Any]

    def read(self, cls: type[RecordT]) -> RecordT:
        """The record of the row. Raises `DiagnosticError` for unknown and missing names, and for
        values that must be tables or must not."""
        known = {each.name: each for each in fields(cls)}
        for name, value in self.given.items():
            if name not in known:
                remedy = did_you_mean(name, known) or f"choose among {', '.join(known)}"
                raise error(f"unknown name '{name}'", self.place, remedy=remedy)
            table = known[name].default_factory is not MISSING
            if isinstance(value, Mapping) != table:
                kind = "a table" if table else "a value, not a table"
                raise error(f"'{name}' must be {kind}", self.place, remedy=_TABLES)
        for name, each in known.items():
            needed = each.default is MISSING and each.default_factory is MISSING
            if needed and name not in self.given:
                raise error(
                    f"'{name}' is missing", self.place, remedy="add it to this row, or to [common]"
                )
        texts = {n: text_of(v) for n, v in self.given.items() if not isinstance(v, Mapping)}
        return cls(**{**self.given, **texts})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """The values that rows of all sources may have: the sizes and flags of a job, and notes for
    titles and readers; `kind` refers to values that several rows share."""

    kind: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow(JobRow):
    """A row that counts for the errors of its source if it is `judged`."""

    judged: str = "on"


RowT = TypeVar("RowT", bound=MeasuredRow)
RecordedT = TypeVar("RecordedT")


@dataclass(frozen=True, slots=True)
class SourceText:
    """A `source.toml`: the title, the URL and the quantity of a publication; `fitted_every` n means
    that constants were fitted to every n-th judged row. The common values of all rows are in the
    table of their kind (`figures`, `steps`, `memory`, `serve`), and those of a group of rows in
    `kind`."""

    title: str
    url: str
    states: str
    fitted_every: str = "0"
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps: Mapping[str, Any] = field(default_factory=dict[str, Any])
    memory: Mapping[str, Any] = field(default_factory=dict[str, Any])
    serve: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kind: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rows_are(self) -> str:
        """The kind of the rows: figures, steps, memory or serve."""
        return next((kind for kind in KINDS if getattr(self, kind)), KINDS[0])

    @property
    def common(self) -> Mapping[str, Any]:
        """The common values of all rows."""
        common: Mapping[str, Any] = getattr(self, self.rows_are)
        return common


@dataclass(frozen=True, slots=True)
class ValidationSource:
    """A folder with rows."""

    folder: Path
    text: SourceText

    @property
    def name(self) -> str:
        """The name for `--source`."""
        return self.folder.name

    def rows(self) -> Iterator[SourceRow]:
        """The rows: the common values, those of [kind.NAME] for rows whose `kind` is NAME, and the
        cells of the row; empty cells are ignored. Raises `DiagnosticError`."""
        path = str(self.folder / ROWS)
        kinds: dict[str, Mapping[str, Any]] = {"": {}}
        kinds |= {n: table for n, table in self.text.kind.items() if isinstance(table, Mapping)}
        for line, cells in enumerate(_cells(path), 2):
            place, name = FileLoc(path, line, 1), cells.get("kind") or ""
            if None in cells:
                raise error(
                    "more cells than columns", place, remedy="quote cells that contain commas"
                )
            if name not in kinds:
                remedy = did_you_mean(name, kinds) or f"add [kind.{name}] to {ABOUT}"
                raise error(f"unknown kind '{name}'", place, remedy=remedy)
            own = [_nested(key, text) for key, text in cells.items() if text]
            yield SourceRow(place, _merged(self.text.common, kinds[name], *own))

    def measured(
        self, cls: type[RowT], record: Callable[[RowT, bool, bool], RecordedT]
    ) -> Iterator[RecordedT]:
        """The result of `record` for each row, with whether it is judged and whether constants were
        fitted to it: every n-th judged row, from the first one. Raises `DiagnosticError`."""
        every, count = int(self.text.fitted_every), 0
        for given in self.rows():
            with at(given.place):
                row = given.read(cls)
                judged = Switch().of(row.judged)
                fitted = bool(judged and every and count % every == 0)
                yield record(row, judged, fitted)
            count += judged


def validation_sources(name: str | None = None, *, kind: str) -> list[ValidationSource]:
    """The sources whose rows are of a kind, or the one of that name. Raises `DiagnosticError` if no
    package provides sources, and for an unknown name."""
    folders = _folders()
    if not folders:
        raise error(
            "the published figures are not installed",
            remedy="pip install 'stagec[validation]', or run stagec from a checkout",
        )
    named = [folder / name for folder in folders for name in _source_names(folder / LIST)]
    sources = [ValidationSource(path, _table(path / ABOUT).read(SourceText)) for path in named]
    for each, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise error(f"two sources have the name '{each}'", remedy="rename the folder of one")
    chosen = {source.name: source for source in sources if source.text.rows_are == kind}
    if name is not None and name not in chosen:
        remedy = did_you_mean(name, chosen) or f"choose among {', '.join(chosen)}"
        raise error(f"unknown source '--source {name}'", remedy=remedy)
    return list(chosen.values()) if name is None else [chosen[name]]


def has_sources() -> bool:
    """Whether there are sources, in a package or checkout. Raises `DiagnosticError` for a broken
    package."""
    return bool(_folders())


def _folders() -> list[Path]:
    """The folders of the packages with sources, that of stagec first, which may be in a checkout.
    Raises `DiagnosticError` for a missing package."""
    packages = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    checkout = Path(str(stagec.__file__)).parents[1] / "validation"
    own = [checkout] if (checkout / LIST).is_file() else []
    if own:
        packages.pop(OWN, None)
    return own + [_folder(packages[n]) for n in sorted(packages, key=lambda n: (n != OWN, n))]


def _folder(package: str) -> Path:
    """The folder of a package, which is not imported since it has no code."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise error(f"{GROUP}: cannot find the package '{package}'", remedy="install it again")
    return Path(next(iter(spec.submodule_search_locations)))


def _source_names(path: Path) -> list[str]:
    names = _table(path).given.get("sources")
    if not is_list(names):
        raise error(f"{path} lists no sources", remedy='write sources = ["NAME", ...]')
    return [str(name) for name in names]


def _table(path: Path) -> SourceRow:
    tables = toml_tables(read_text(str(path)), "correct the file")
    return SourceRow(FileLoc(str(path), 1, 1), tables)


def _cells(path: str) -> list[dict[Any, Any]]:
    try:
        return list(csv.DictReader(read_text(path).text.splitlines()))
    except csv.Error as problem:
        raise error(f"{path}: {problem}", remedy="write comma-separated values") from None


def _merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """The union of tables: the last value of a name counts, and nested tables are merged."""
    row: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            both = isinstance(value, Mapping) and isinstance(row.get(name), Mapping)
            row[name] = {**row[name], **value} if both else value
    return row


def _nested(key: str, value: str) -> dict[str, Any]:
    """A cell as a table: `flags.tp` is tp of [flags]."""
    table, dot, name = key.partition(".")
    return {table: {name: value}} if dot else {key: value}


def filled(text: str, names: Mapping[str, object]) -> str:
    """A title with its `$name` substituted. Raises `ValueError`."""
    try:
        return Template(text).substitute(names)
    except KeyError as missing:
        raise ValueError(f"'{text}': unknown name {missing}") from None


@contextmanager
def at(place: FileLoc) -> Generator[None]:
    """A context in which errors get the place of a row. Raises `DiagnosticError`."""
    remedy = f"correct the row, or {ABOUT} beside it"
    try:
        yield
    except (ValueError, ArithmeticError) as problem:
        raise error(str(problem), place, remedy=remedy) from None
    except DiagnosticError as problem:
        first = problem.diagnostics[0]
        raise error(first.message, place, remedy=first.remedy or remedy) from None
