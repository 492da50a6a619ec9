"""The answers of `stagec validate`: published and measured figures compared with ours."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from stagec.jobs.session import Session
from stagec.output.report import Report
from stagec.output.tables import console, table
from stagec.validation.bytes import BytesError, memory_errors, worst_errors
from stagec.validation.errors import StepError, Summary, summaries
from stagec.validation.figures import PublishedRow, published_rows
from stagec.validation.measured_servers import (
    ServerError,
    ServerSummary,
    measured_servers,
    server_summaries,
)
from stagec.validation.steps import chosen, predictions, sample

_WIDTH = 160


@dataclass(frozen=True)
class FiguresAnswer(Report):
    """Published figures and ours."""

    figures: Sequence[PublishedRow]

    @property
    def ok(self) -> bool:
        """Whether all figures agree."""
        return all(row.ok for row in self.figures)

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.figures]

    def print(self, stream: TextIO) -> None:
        shown = table(
            "Published and computed", "source", "row", "published", "ours", "", text_columns=2
        )
        for row in self.figures:
            verdict = "ok" if row.ok else Text("OFF", "red")
            shown.add_row(row.source, row.row, row.published, row.ours, verdict)
        console(stream, _WIDTH).print(shown)


@dataclass(frozen=True)
class StepsAnswer(Report):
    """Measured and predicted seconds of steps, and errors by source."""

    steps: Sequence[StepError]
    sources: Sequence[Summary]

    def as_json(self) -> dict[str, Any]:
        return {"rows": self.rows(), "sources": [asdict(s) for s in self.sources]}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each step."""
        return [_row(each) for each in self.steps]

    def print(self, stream: TextIO) -> None:
        columns = ("source", "row", "GPUs", "measured", "ours", "error", "")
        shown = table("Measured and predicted seconds", *columns, text_columns=2)
        for each in self.steps:
            step = each.step
            remark = "fitted" if step.fitted else "" if step.judged else "not judged"
            cells = (step.source, step.row, str(step.ranks), f"{step.seconds:.3f}")
            if each.predicted is None:
                shown.add_row(*cells, "", "", each.problem)
            else:
                shown.add_row(*cells, f"{each.predicted:.3f}", f"{each.error:+.1%}", remark)
        out = console(stream, _WIDTH)
        out.print(shown)
        errors = ("rows", "median", "p90", "left out", "bias", "Spearman", "regret")
        by_source = table("Errors by source", "source", *errors)
        for summary in self.sources:
            by_source.add_row(*_cells(summary))
        out.print(by_source)


@dataclass(frozen=True)
class MemoryAnswer(Report):
    """Measured and planned bytes, by category and moment."""

    errors: Sequence[BytesError]

    def as_json(self) -> dict[str, Any]:
        worst = [
            {"moment": moment, "category": category, "error": error}
            for (moment, category), error in worst_errors(self.errors).items()
        ]
        return {"rows": self.rows(), "worst": worst}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each category and the total, of each moment of each step."""
        return [each.as_json() for each in self.errors]

    def print(self, stream: TextIO) -> None:
        categories = list(dict.fromkeys(each.category for each in self.errors))
        shown = table(
            "Bytes: ours over measured, less one", "step", "moment", *categories, text_columns=2
        )
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for each in self.errors:
            text = "" if each.error is None else f"{each.error:+.3%}"
            cells.setdefault((each.row, each.moment), {})[each.category] = text
        for (row, moment), errors in cells.items():
            shown.add_row(row, moment.replace("_", " "), *(errors[c] for c in categories))
        console(stream, _WIDTH).print(shown)


def validate_memory(source: str | None, session: Session) -> MemoryAnswer:
    """Plan the steps whose bytes were measured, of a source or of all. Raises `DiagnosticError`."""
    return MemoryAnswer(memory_errors(source, session))


@dataclass(frozen=True)
class ServersAnswer(Report):
    """Measured and predicted times of servers, and errors by engine and machine."""

    servers: Sequence[ServerError]
    engines: Sequence[ServerSummary]

    def as_json(self) -> dict[str, Any]:
        return {"rows": self.rows(), "engines": [asdict(each) for each in self.engines]}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each server."""
        return [_server_row(each) for each in self.servers]

    def print(self, stream: TextIO) -> None:
        columns = ("engine", "machine", "row", "TTFT", "ours", "error", "TPOT", "ours", "error", "")
        shown = table("Measured and predicted milliseconds", *columns, text_columns=3)
        for each in self.servers:
            server = each.server
            remark = "fitted" if server.fitted else "" if server.judged else "not judged"
            cells = [server.stack, server.machine, server.row]
            if isinstance(each.result, str) or each.errors is None:
                first, between = ([f"{s * 1e3:.2f}", "", ""] for s in (server.ttft, server.tpot))
                remark = each.problem
            else:
                measured = zip((server.ttft, server.tpot), each.result, each.errors, strict=True)
                first, between = (
                    [f"{s * 1e3:.2f}", f"{p * 1e3:.2f}", f"{e:+.1%}"] for s, p, e in measured
                )
            shown.add_row(*cells, *first, *between, remark)
        out = console(stream, _WIDTH)
        out.print(shown)
        errors = ("rows", "TPOT median", "p90", "left out", "bias", "TTFT to batch 8", "TTFT")
        by_engine = table(
            "Errors by engine and machine", "engine", "machine", *errors, text_columns=2
        )
        for one in self.engines:
            by_engine.add_row(
                *(one.engine, one.machine, str(one.rows), f"{one.median:.1%}", f"{one.p90:.1%}"),
                "" if one.left_out is None else f"{one.left_out:.1%}",
                f"{one.bias:+.1%}",
                "" if one.ttft is None else f"{one.ttft:.1%}",
                f"{one.ttft_all:.1%}",
            )
        out.print(by_engine)


def validate_servers(source: str | None, session: Session, *, everything: bool) -> ServersAnswer:
    """Predict the measured servers of a source or of all: a sample, or `everything`. Raises
    `DiagnosticError` for an unknown source."""
    servers = measured_servers(source)
    if not everything:
        servers = sample(servers)
    errors = list(map(ServerError, servers, predictions(servers, session, "servers")))
    return ServersAnswer(errors, server_summaries(errors))


def validate_figures() -> FiguresAnswer:
    """Compile the models of all published figures. Raises `DiagnosticError`."""
    return FiguresAnswer(published_rows())


def validate_steps(source: str | None, session: Session, *, everything: bool) -> StepsAnswer:
    """Predict the measured steps of a source or of all: samples of long sources, or `everything`.
    Raises `DiagnosticError` for an unknown source."""
    steps = chosen(source, everything=everything)
    errors = list(map(StepError, steps, predictions(steps, session, "steps")))
    return StepsAnswer(errors, summaries(errors))


def _cells(summary: Summary) -> list[str]:
    ranking = ("", "")
    if summary.spearman is not None and summary.regret is not None:
        ranking = (f"{summary.spearman:.2f}", f"{summary.regret:.1%}")
    return [
        summary.source,
        str(summary.rows),
        f"{summary.median:.1%}",
        f"{summary.p90:.1%}",
        "" if summary.left_out is None else f"{summary.left_out:.1%}",
        f"{summary.bias:+.1%}",
        *ranking,
    ]


def _row(each: StepError) -> dict[str, Any]:
    step = each.step
    row: dict[str, Any] = {
        "source": step.source,
        "row": step.row,
        "sweep": step.sweep,
        "gpus": step.ranks,
        "machine": step.machine,
        "model": Path(step.model).name,
        "sizes": dict(step.sizes),
        "flags": {n: v if isinstance(v, int | str) else str(v) for n, v in step.flags.items()},
        "fitted": step.fitted,
        "judged": step.judged,
        "measured_seconds": step.seconds,
    }
    if each.predicted is None:
        return {**row, "problem": each.problem}
    return {**row, "predicted_seconds": each.predicted, "error": each.error}


def _server_row(each: ServerError) -> dict[str, Any]:
    server = each.server
    row: dict[str, Any] = {
        "source": server.source,
        "row": server.row,
        "engine": server.stack,
        "machine": server.machine,
        "model": server.model,
        "batch": server.batch,
        "fitted": server.fitted,
        "judged": server.judged,
        "measured": {"ttft": server.ttft, "tpot": server.tpot},
    }
    if isinstance(each.result, str) or each.errors is None:
        return {**row, "problem": each.problem}
    named = ("ttft", "tpot")
    predicted, errors = (dict(zip(named, v, strict=True)) for v in (each.result, each.errors))
    return {**row, "predicted": predicted, "errors": errors}
