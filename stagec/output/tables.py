"""What all tables for people are made of: consoles, tables, sizes and counts as texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from stagec.output.markdown import TableText
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.analysis.memory_fit import MemoryFit

#: Columns of a terminal below which tables of many columns leave some out.
NARROW = 120
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_LONG = 300
#: Columns of a file up to which a row is a line, and those of a name that is folded in none.
_PIPED, _LONGEST_NAME = 160, 80
#: Columns that no table has, those of a name and of a cell that are not folded where there is room
#: for them, and those that the others are left with.
_UNBOUNDED, _NAME, _SHORT, _LEAST = 10_000, 20, 14, 8
_COUNT_UNITS = ("", "K", "M", "G", "T", "P", "E", "Z")


class _Console(Console):
    """A console that leaves a closed pipe to the caller."""

    def on_broken_pipe(self) -> None:
        """Not to exit from here."""
        raise BrokenPipeError


def console(stream: TextIO, width: int = 120) -> Console:
    """A console of the terminal's width, or of `width` columns in a file or pipe. Texts are printed
    as they are: what has a style is a `Text`. In a kernel of Jupyter they go to the stream too."""
    terminal = stream.isatty()
    made = partial(_Console, highlight=False, markup=False, emoji=False, force_jupyter=False)
    return made(file=stream, width=None if terminal else width, soft_wrap=not terminal)


def bytes_text(value: Any) -> str:
    """`12.35 GiB`; expressions as they are."""
    return _scaled(value, 1024, _BYTE_UNITS) if isinstance(value, int) else expression_text(value)


def expression_text(value: Any) -> str:
    """An expression for a table: a long `max` is only counted."""
    text = str(value)
    if len(text) > _LONG and "max(" in text:
        return f"a max of {text.count(', ') + 1} expressions (--json prints it)"
    return text


def ranks_text(ranks: int, mesh: Mapping[str, int]) -> str:
    """`512 ranks: pp 4 x dp 16 x tp 8`."""
    axes = " x ".join(f"{a} {n}" for a, n in mesh.items()) or "one device"
    return f"{counted(ranks, 'rank')}: {axes}"


def fit_text(fit: MemoryFit) -> str:
    """`peak 1.33 TiB of 77.80 GiB: does not fit, by 1.25 TiB`."""
    return f"peak {bytes_text(fit.peak)} of {verdict_text(fit)}"


def verdict_text(fit: MemoryFit) -> str:
    """`77.80 GiB: does not fit, by 1.25 TiB`."""
    verdict = "fits" if fit.fits else "does not fit"
    return f"{bytes_text(fit.room)}: {verdict}, by {bytes_text(abs(fit.by))}"


def count_text(value: Any, unit: str = "") -> str:
    """`8.03 G`; expressions as they are."""
    if isinstance(value, int):
        return (_scaled(value, 1000, _COUNT_UNITS) + unit).strip()
    return str(value)


def _scaled(value: int, base: int, units: tuple[str, ...]) -> str:
    scaled, index = float(value), 0
    while abs(scaled) >= base and index < len(units) - 1:
        scaled, index = scaled / base, index + 1
    return f"{value} {units[0]}" if index == 0 else f"{scaled:,.2f} {units[index]}"


class _Table(Table):
    """A table that gives up its margins before its words where a terminal is narrow: then a space
    parts its columns, and short cells are not folded. Where these have no room each row is a
    sentence: `batch 1, TTFT 119.66 ms, TPOT 16.06 ms`."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if isinstance(console.file, TableText):
            return (Text(line) for line in console.file.lines_of(self))
        wide = options.update_width(_UNBOUNDED)
        natural = self.__rich_measure__(console, wide).maximum
        if not console.is_terminal:
            if natural > max(options.max_width, _PIPED):
                natural = max(options.max_width, self._keep_names())
            options = options.update_width(natural)
        elif natural > options.max_width and not self._close_up(options.max_width):
            return self._sentences(options.max_width)
        lines = super().__rich_console__(console, options)
        return lines if console.color_system else _without_blanks_at_ends(lines)

    def _keep_names(self) -> int:
        """Fold no column of names and numbers, so that programs that read a file find them; the
        width that the table needs."""
        width = 0
        for column in self.columns:
            cells = [str(cell).strip() for cell in (column.header, *column.cells)]
            longest = max(map(len, cells))
            column.no_wrap = longest <= _LONGEST_NAME and not any(" " in c for c in cells[1:])
            width += (longest if column.no_wrap else _NAME) + 3
        return width

    def _close_up(self, width: int) -> bool:
        """Leave out margins; whether short cells have room on a line each."""
        self.padding, self.pad_edge, self.show_edge = 0, False, False
        short: list[Column] = []
        left = width - len(self.columns)
        for number, column in enumerate(self.columns):
            sizes = [len(line) for cell in column.cells for line in str(cell).splitlines()]
            size = max(sizes, default=0)
            if size > (_SHORT if number else _NAME):
                left -= _LEAST
                continue
            short.append(column)
            header = str(column.header)
            column.header = header if len(header) <= size else header.replace(" ", "\n")
            left -= max([size, *map(len, column.header.splitlines())])
        for column in short:
            column.no_wrap = True
        return left >= 0

    def _sentences(self, width: int) -> Iterator[Text]:
        if self.title:
            yield Text(str(self.title), style="bold")
        heads = [str(column.header).replace("\n", " ") for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            texts = map(str, cells)
            said = (f"{h} {t}".strip() for h, t in zip(heads, texts, strict=True) if t)
            yield Text(fill(", ".join(said), width, subsequent_indent="  "))


def _without_blanks_at_ends(rendered: RenderResult) -> Iterator[Segment]:
    segments = (segment for segment in rendered if isinstance(segment, Segment))
    for line in Segment.split_lines(segments):
        yield Segment("".join(segment.text for segment in line).rstrip() + "\n")


def table(
    title: str, *columns: str, rows: Iterable[Iterable[str]] = (), text_columns: int = 1
) -> Table:
    """A table of these rows, whose first columns are text and whose others are numbers."""
    made = _Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < text_columns else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
