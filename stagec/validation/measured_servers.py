"""Measured servers: times to the first token and between tokens, each with its job.
docs/accuracy.md shows the errors of predictions."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from stagec.jobs.request.option import values_of
from stagec.jobs.request.options import JOB, JobOptions
from stagec.jobs.session import Session
from stagec.machines import load_machine
from stagec.validation.closed_loop import ClosedLoop
from stagec.validation.formula import sizes_of
from stagec.validation.sources import MeasuredRow, ValidationSource, filled, validation_sources

#: The largest small batch, for errors of times to the first token.
SMALL: Final = 8


@dataclass(frozen=True, slots=True)
class ServeRow(MeasuredRow):
    """A row of a source in the form of its files.

    `ttft` and `tpot` are in milliseconds; `batch` is the number of concurrent sequences. Prompts
    and outputs have `lengths` times the given tokens on average. The server gets `rounds` times
    `batch` requests, of which the first `batch` arrive at once (0: unknown).
    """

    row: str
    model: str
    machine: str
    ttft: str
    tpot: str
    prompt: str
    output: str
    batch: str
    lengths: str = "1"
    rounds: str = "0"


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A measured server: `ttft` and `tpot` in seconds, and the job for `stagec serve`. Constants of
    its stack were fitted to rows that are `fitted`."""

    source: str
    row: str
    ttft: float
    tpot: float
    machine: str
    model: str
    batch: int
    output: int
    rounds: int
    lengths: float
    sizes: Mapping[str, int]
    flags: Mapping[str, Any]
    judged: bool = True
    fitted: bool = False

    @property
    def stack(self) -> str:
        """The engine."""
        return str(self.flags.get("stack", "ideal"))

    def predicted(self) -> tuple[float, float]:
        """The predicted seconds to the first token and between tokens: those of simulated requests
        if their arrivals are known, else of a steady load. Raises `DiagnosticError`."""
        from stagec.answers.serve import QUESTION, serve
        from stagec.answers.serve_answer import ServeAnswer

        explicit = frozenset(self.flags)  # so that default values override the stack too
        options = JobOptions(self.model, sizes=self.sizes, explicit=explicit, **self.flags)
        machine = load_machine(self.machine)
        if self.rounds:
            lengths = int(self.flags["prompt"]), self.output
            loop = ClosedLoop(options, machine, self.batch, *lengths, self.lengths, self.rounds)
            return loop.means()
        how = {"output_tokens": self.output, "batches": str(self.batch)}
        given, _ = values_of(QUESTION.options, how)
        answer = serve(options, machine, given, Session())
        assert isinstance(answer, ServeAnswer), "no requests over time"
        rates = answer.points[0].rates
        return rates.ttft, rates.tpot


@dataclass(frozen=True, slots=True)
class ServerError:
    """A measured server, and its predicted seconds or the reason for their absence."""

    server: MeasuredServer
    result: tuple[float, float] | str

    @property
    def problem(self) -> str:
        """The reason for the absence of seconds."""
        return self.result if isinstance(self.result, str) else ""

    @property
    def errors(self) -> tuple[float, float] | None:
        """The relative errors of the seconds to the first token and between tokens."""
        if isinstance(self.result, str):
            return None
        return self.result[0] / self.server.ttft - 1, self.result[1] / self.server.tpot - 1


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """The errors of the judged rows of an engine on a machine. TPOT has `median`, `p90`, `left_out`
    (the median of rows that were not used in a fit) and `bias`, the median of signed errors; TTFT
    has the median `ttft` of batches up to `SMALL`, None without such rows, and `ttft_all`."""

    engine: str
    machine: str
    rows: int
    median: float
    p90: float
    left_out: float | None
    bias: float
    ttft: float | None
    ttft_all: float


def measured_servers(source: str | None = None) -> list[MeasuredServer]:
    """The measured servers of a source, or of all. Raises `DiagnosticError` for an unknown
    source."""
    sources = validation_sources(source, kind="serve")
    return [row for each in sources for row in each.measured(ServeRow, partial(_server, each))]


def _server(source: ValidationSource, row: ServeRow, judged: bool, fitted: bool) -> MeasuredServer:
    share = float(row.lengths)
    flags = {**row.flags, "prompt": max(1, round(int(row.prompt) * share))}
    values, _ = values_of(JOB, flags)
    ttft, tpot = float(row.ttft) * 1e-3, float(row.tpot) * 1e-3
    if not (ttft > 0 and tpot > 0):
        raise ValueError(f"'ttft' and 'tpot' cannot be {row.ttft} and {row.tpot} ms")
    return MeasuredServer(
        source=source.name,
        row=filled(row.row, {**row.sizes, **row.flags, **row.notes}),
        ttft=ttft,
        tpot=tpot,
        machine=row.machine,
        model=row.model,
        batch=int(row.batch),
        output=max(2, round(int(row.output) * share)),
        rounds=int(row.rounds),
        lengths=share,
        sizes=sizes_of(row.sizes),
        flags={name: values[name] for name in flags},
        judged=judged,
        fitted=fitted,
    )


def server_summaries(errors: Iterable[ServerError]) -> list[ServerSummary]:
    """The errors by engine and machine, over judged rows with a prediction."""
    groups: defaultdict[tuple[str, str], list[ServerError]] = defaultdict(list)
    for each in errors:
        if each.server.judged and each.errors is not None:
            groups[each.server.stack, each.server.machine].append(each)
    return [_summary(*key, groups[key]) for key in sorted(groups)]


def _summary(engine: str, machine: str, rows: Sequence[ServerError]) -> ServerSummary:
    first, between = np.array([each.errors for each in rows]).T
    small = np.array([each.server.batch <= SMALL for each in rows])
    others = np.array([not each.server.fitted for each in rows])
    sizes = np.abs(between)
    return ServerSummary(
        engine,
        machine,
        len(rows),
        float(np.median(sizes)),
        float(np.quantile(sizes, 0.9)),
        float(np.median(sizes[others])) if others.any() else None,
        float(np.median(between)),
        float(np.median(np.abs(first[small]))) if small.any() else None,
        float(np.median(np.abs(first))),
    )
