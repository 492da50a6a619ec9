"""What an answer is: data, a text for people, rows for data frames. One place shows it."""

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, TextIO, cast

from stagec.support.diagnostics import error


class Report(ABC):
    """An answer. `str` is the text that a command prints; notebooks show the same with tables that
    are sorted by their heads."""

    #: The columns of `--format csv` where there may be no row.
    column_names: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def as_json(self) -> Any:
        """What `--json` prints: objects, lists, texts and numbers."""

    @abstractmethod
    def print(self, stream: TextIO) -> None:
        """Write the text for people, as wide as a terminal is."""

    def rows(self) -> list[dict[str, Any]]:
        """The rows of a data frame, each with the same keys: by default one, of all figures."""
        data = self.as_json()
        return [data] if isinstance(data, dict) else list(data)

    @property
    def title(self) -> str:
        """The title of its page: by default the model, as `--json` has it."""
        data: Any = self.as_json()
        return str(data["model"]) if "model" in data else "stagec"

    def page(self) -> str:
        """What `--html` writes: a page that loads nothing from elsewhere. By default it has the
        text for people and the rows. Raises `DiagnosticError` where a picture cannot be made."""
        from stagec.output.page import table_page

        return table_page(self.title, str(self), self.rows())

    def plot(self) -> str:
        """What `--html FILE.svg` writes. Raises `DiagnosticError` where there is no plot."""
        raise error("this answer has no plot, only a page", remedy="give --html FILE.html")

    def as_csv(self) -> str:
        """What `--format csv` prints: by default the rows, with names as `to_pandas` has them and
        lists as JSON."""
        lines = [
            {n: json.dumps(v) if isinstance(v, list | tuple) else v for n, v in flat_row(row)}
            for row in self.rows()
        ]
        names = dict.fromkeys([*self.column_names, *(n for line in lines for n in line)])
        return csv_text(names, lines)

    def as_markdown(self) -> str:
        """The text for people with tables as Markdown has them."""
        from stagec.output.markdown import MarkdownText

        text = MarkdownText()
        self.print(text)
        return text.markdown()

    def to_pandas(self) -> Any:
        """The rows as a data frame; nested figures have names such as `time.step_seconds`. Raises
        `DiagnosticError` without pandas, which is optional."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError:
            raise error(
                "pandas is not installed", remedy="install it: pip install pandas"
            ) from None
        return pandas.json_normalize(self.rows())

    def __init_subclass__(cls) -> None:
        """Give a dataclass this `__repr__` of one line instead of one with all its figures."""
        super().__init_subclass__()
        cls.__repr__ = Report.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<stagec {type(self).__name__}: {self.title}>"

    def __str__(self) -> str:
        text = io.StringIO()
        self.print(text)
        return text.getvalue()

    def _repr_html_(self) -> str:
        from stagec.output.notebook import NotebookText

        text = NotebookText()
        self.print(text)
        return text.html()


def csv_text(names: Iterable[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Comma-separated values: a line of names, and a line for each row, in which a missing value is
    empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def flat_row(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The figures of a row by their paths, such as `time.step_seconds`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flat_row(cast("Mapping[str, Any]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value
