"""The answer of `stagec serve`: latency and throughput of a server over batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from stagec.analysis.serving_rates import PodStep, ServingRates
from stagec.answers.intervals import TPOT, TTFT, StackErrors
from stagec.answers.time.table import costed_text, seconds_text
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.output.report import Report
from stagec.output.svg_text import SVGText
from stagec.output.tables import bytes_text, console, fit_text, table
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.analysis.memory_fit import MemoryFit
    from stagec.time.transfer import TransferTime

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """A batch: its rates, its steps of prefill and of decode, whether its memory fits, cautions,
    and the command that times its decode step. `prompts` is the memory of a separate prefill
    pod."""

    rates: ServingRates
    steps: tuple[PodStep, PodStep]
    ranks: int
    fit: MemoryFit
    cautions: tuple[str, ...]
    command: str
    prompts: MemoryFit | None = None

    @property
    def peak(self) -> int:
        """The peak of a rank in bytes."""
        return self.fit.peak

    @property
    def fits(self) -> bool:
        """Whether this fits, and so does a separate prefill pod."""
        return self.fit.fits and (self.prompts is None or self.prompts.fits)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        rates = {**asdict(self.rates), "per_user": self.rates.per_user}
        fit = {"memory_peak": self.peak, "fits": self.fits, "fit": self.fit.as_json()}
        return {**rates, **fit, "cautions": list(self.cautions)}


@dataclass(frozen=True)
class ServeAnswer(Report):
    """A server over batches: one pod, or one that prefills and one that decodes, with `prompt` and
    `output` tokens per request. `best` has the highest throughput per rank within the limits; None
    if no batch is within them. `limits` has those that were given, `ttft` and `tpot`, in seconds.
    `errors` has the prediction intervals of its stack. `costed_by`,
    which JSON calls `found`, counts the kernels and collectives of all steps by the source of
    their times; it is empty without measurements. `command` is the command line."""

    model: str
    machine: str
    stack: str
    ranks: Mapping[str, int]
    two_pods: bool
    prompt: int
    output: int
    handover: TransferTime | None
    points: Sequence[ServedBatch]
    best: ServedBatch | None
    limits: Mapping[str, float]
    errors: StackErrors | None
    costed_by: Mapping[str, int]
    command: str = ""

    @property
    def cautions(self) -> list[str]:
        """The assumptions and limitations of the figures."""
        return list(dict.fromkeys(text for point in self.points for text in point.cautions))

    @property
    def title(self) -> str:
        return f"{self.model} on {self.machine}"

    def page(self) -> str:
        """The curve of tokens per second, and a row for each batch."""
        from stagec.answers.serve_page import serve_page

        return serve_page(self)

    def plot(self) -> SVGText:
        from stagec.answers.serve_page import serve_plot

        return SVGText(serve_plot(self).svg())

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "machine": self.machine,
            "stack": self.stack,
            "ranks": dict(self.ranks),
            "apart": self.two_pods,
            "prompt": self.prompt,
            "output": self.output,
            **({"handover": asdict(self.handover)} if self.handover is not None else {}),
            **({} if (fit := self.points[0].prompts) is None else {"prefill_fit": fit.as_json()}),
            "points": [point.as_json() for point in self.points],
            "best": self.best.as_json() if self.best is not None else None,
            "cautions": self.cautions,
            **({} if self.errors is None else {"intervals": self.errors.as_json()}),
            **({"found": dict(self.costed_by)} if self.costed_by else {}),
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each batch."""
        return [point.as_json() for point in self.points]

    def print(self, stream: TextIO) -> None:
        _print(self, stream)


def _print(answer: ServeAnswer, stream: TextIO) -> None:
    out, ranks, best, two_pods = console(stream), answer.ranks, answer.best, answer.two_pods
    pods = f", {counted(ranks[DECODE], 'rank')}"
    if two_pods:
        pods = f", pods of {counted(ranks[PREFILL], 'rank')} and {counted(ranks[DECODE], 'rank')}"
    out.print(
        f"{answer.model} on {answer.machine}, stack {answer.stack}{pods}: prompts of "
        f"{answer.prompt:,} tokens, {answer.output:,} tokens come out"
    )
    if (sent := answer.handover) is not None:
        out.print(
            f"From prefill to decode: {bytes_text(sent.bytes)} of caches per prefill step in "
            f"{sent.messages:,} messages over {sent.level}, "
            f"{seconds_text(sent.alone_seconds)} alone, "
            f"{seconds_text(sent.exposed_seconds)} behind prefill, which TTFT has"
        )
    if (fit := answer.points[0].prompts) is not None:
        out.print(f"Pod that prefills: {fit_text(fit)}")
    titles = ["batch", "TTFT", "TPOT", "latency", "tokens/s", "per rank", "per user", "memory"]
    rows = table("Serving", *titles, *(["prefill pods"] if two_pods else []), text_columns=0)
    for row in answer.points:
        r = row.rates
        cells = [f"{r.batch:,}", *map(seconds_text, (r.ttft, r.tpot, r.latency))]
        cells += [f"{v:,.1f}" for v in (r.tokens_per_second, r.per_rank, r.per_user)]
        cells.append(bytes_text(row.peak) + ("" if row.fit.fits else " (too much)"))
        rows.add_row(*cells, *([f"{r.prefill_pods:.2f}"] if two_pods else []))
    out.print(rows)
    if best is None:
        fits = any(row.fits for row in answer.points)
        out.print(f"no batch is{limits_text(answer.limits)}" if fits else "no batch fits")
    else:
        r = best.rates
        out.print(
            f"highest throughput per rank{limits_text(answer.limits)}: batch {r.batch:,}, "
            f"{r.per_rank:,.1f} tokens/s per rank, "
            f"TTFT {seconds_text(r.ttft)}, TPOT {seconds_text(r.tpot)}; {fit_text(best.fit)}"
        )
    if costed := costed_text(answer.costed_by):
        out.print(costed)
    if answer.errors is not None:
        for kind in (TTFT, TPOT):
            out.print(_interval_text(answer.errors, kind))


def limits_text(limits: Mapping[str, float | None]) -> str:
    """` within TTFT 500.00 ms, TPOT 30.00 ms`; empty without limits."""
    given = (f"{n.upper()} {seconds_text(t)}" for n, t in limits.items() if t is not None)
    text = ", ".join(given)
    return f" within {text}" if text else ""


def _interval_text(errors: StackErrors, kind: str) -> str:
    """A sentence about the interval of measured times around a predicted one."""
    interval, rows = errors.intervals[kind], errors.rows_text(kind)
    if interval is None:
        return f"{kind.upper()} interval: unknown, {rows}"
    times = f"{interval.low:.2f} to {interval.high:.2f} times what is predicted"
    return f"{kind.upper()} interval: {times}, as 8 of 10 of {rows}"
