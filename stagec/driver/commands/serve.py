"""`stagec serve`: what users of a server would meet, and what its ranks give, over batches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from stagec.analysis.serving_rates import PodStep, ServingRates, colocated, disaggregated
from stagec.driver.job.builder import JobBuilder
from stagec.driver.job.pod_options import options_of_pod
from stagec.driver.job.pods import handing_over, one_group
from stagec.driver.output.common import kept_reports, reports_once, write_output
from stagec.driver.output.tables import bytes_text, console, fit_text, table
from stagec.driver.request.accepted import accepted_options, take_accepted
from stagec.driver.request.machine import machine_option, tell_cautions
from stagec.driver.request.options import JobOptions, job_options, take_options
from stagec.driver.request.ranges import is_range, values_of
from stagec.driver.request.result import PAGE_OR_PLOT, RESULT
from stagec.driver.request.sections import LongCommand
from stagec.driver.request.serving import DISAGGREGATED, PODS
from stagec.driver.request.times import TimeType
from stagec.driver.request.units import on_machine
from stagec.driver.sweep.page import page_of
from stagec.driver.sweep.plot import PlotAxis, PlotPoint, plot
from stagec.driver.time.table import seconds_text
from stagec.ir.serving import DECODE, PREFILL
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.files import write_file
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.analysis.memory_fit import MemoryFit
    from stagec.analysis.time_report import TimeReport
    from stagec.driver.job.figures import CompiledJob
    from stagec.ir.module import Module
    from stagec.machines import Machine
    from stagec.time.transfer import TransferTime

Found = TypeVar("Found")

SCHEMA = 1
_LARGEST = 1 << 16
_BATCH = re.compile("0*[1-9][0-9]{0,5}")


class Batches(click.ParamType[tuple[int, ...]]):
    """`1,2,4,8`, or `1..8`."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The batches, in order."""
        given = [p.strip() for p in str(value).split(",")]
        parts = [t for p in given for t in (values_of(p) if is_range(p) else (p,))]
        if not parts or not all(_BATCH.fullmatch(p) and int(p) <= _LARGEST for p in parts):
            self.fail(f"expects batches such as 1,8,64 or 1..64, found '{value}'", param, ctx)
        return tuple(sorted({int(p) for p in parts}))


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """A batch: what it gives, whether what a rank holds fits, and what to know of it."""

    rates: ServingRates
    ranks: int
    fit: MemoryFit
    cautions: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The bytes that a rank holds."""
        return self.fit.peak

    @property
    def fits(self) -> bool:
        """Whether these fit."""
        return self.fit.fits

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        found = {**asdict(self.rates), "per_user": self.rates.per_user}
        fit = {"memory_peak": self.peak, "fits": self.fits, "fit": self.fit.as_json()}
        return {**found, **fit, "cautions": list(self.cautions)}


@click.command("serve", cls=LongCommand)
@job_options
@machine_option("The machine that serves: a name that 'stagec machines' lists.", required=True)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens that each sequence makes.",
)
@click.option(
    "--batches",
    type=Batches(),
    help="Sequences in decode at any time, of all ranks together (default: 1, 2, 4, ... as fit;"
    " 1..64 doubles).",
)
@accepted_options
@click.option("--ttft", type=TimeType(), help="A limit of the time to the first token: 500ms.")
@click.option("--tpot", type=TimeType(), help="A limit of the time for each further token: 30ms.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html", type=PAGE_OR_PLOT, metavar="FILE", help="Write a page, or FILE.svg, with the curve."
)
@click.option(
    "-o", "--output", type=RESULT, metavar="FILE", help="Write the result here instead of stdout."
)
def command(**given: Any) -> int:
    """Tell what a server gives: time to the first token (TTFT), time for each further one (TPOT),
    and tokens a second, over batches.

    Sequences come with --prompt tokens and make --output-tokens each. The same ranks prefill and
    decode; with --serve disaggregated some pods prefill, with the strategy of --prefill, and others
    decode, with that of --decode. Engines capture steps as graphs, so hosts do not hold devices up.

        stagec serve llama3-8b --tp 2 --prompt 1024 --machine h100-sxm
    """
    machine: Machine = given.pop("machine")
    output = given["output_tokens"]
    asked = on_machine(take_options(given), machine)
    accepted = take_accepted(asked, given)
    options, apart = _options(asked), asked.serve == DISAGGREGATED
    with reports_once():
        target = None
        if apart:
            target = _at_least(options[DECODE], _Target.of)
        prefill, transfer = _prefill(options[PREFILL], machine, target)
        asking = output, given["batches"], accepted.tokens
        rows = list(_rows(options, machine, prefill, *asking, apart=apart))
    if not rows:
        raise error(
            "no batch fits the machine",
            remedy="split the model over more ranks, or give a shorter --prompt",
        )
    best = _best(rows, given["ttft"], given["tpot"])
    cautions = list(dict.fromkeys(text for row in rows for text in row.cautions))
    result = {
        "schema": SCHEMA,
        "model": options[PREFILL].model,
        "machine": machine.name,
        "ranks": {PREFILL: prefill.ranks, DECODE: rows[0].ranks},
        "apart": apart,
        "prompt": options[PREFILL].prompt,
        "output": output,
        **({"handover": asdict(transfer)} if transfer is not None else {}),
        "points": [row.as_json() for row in rows],
        "best": best.as_json() if best is not None else None,
        "cautions": cautions,
    }
    tell_cautions(cautions)
    if given["html"] is not None:
        _draw(given["html"], result, rows)
    if given["as_json"]:
        write_output(json.dumps(result, indent=1) + "\n", given["output"])
        return 0
    text = StringIO()
    _print(result, rows, best, text)
    write_output(text.getvalue(), given["output"])
    return 0


def _options(options: JobOptions) -> Mapping[str, JobOptions]:
    """The options of both steps. Raises `DiagnosticError`."""
    if options.preset and options.serve is not None:
        name = options.preset
        raise error(
            f"--preset {name} is one step of {options.serve}: 'stagec time' has it",
            remedy=f"write its strategy into a file, 'stagec presets {name} > {name}.stg', and "
            "give model and file",
        )
    if options.serve not in (None, DISAGGREGATED):
        raise error(
            f"--serve {options.serve} is one step: 'stagec time' has it",
            remedy="leave it out, or give --serve disaggregated",
        )
    if options.part:
        raise error(
            "--part makes several pods, and 'stagec serve' is of one or two",
            remedy="leave it out, or look at one batch with 'stagec time'",
        )
    if options.draft is not None:
        raise error(
            "--draft makes several pods, and 'stagec serve' is of one or two",
            remedy="leave it out, or look at one batch with 'stagec time --serve decode'",
        )
    if options.batch is not None:
        raise error("'stagec serve' goes over batches", remedy="give --batches 1,8,64")
    if options.prompt is None:
        raise error("expected --prompt: the tokens of each request", remedy="give --prompt 2048")
    if options.serve == DISAGGREGATED:
        found = {pod: options_of_pod(pod, options.changed(chunk=None)) for pod in PODS}
        return {**found, PREFILL: found[PREFILL].changed(chunk=options.chunk)}
    return {
        PREFILL: options.changed(serve=PREFILL, speculative=None),
        DECODE: options.changed(serve=DECODE, prompt=None, chunk=None, context=None),
    }


# -- steps -----------------------------------------------------------------------------------------


def _step(options: JobOptions, machine: Machine) -> tuple[CompiledJob, TimeReport]:
    """A step, whose launches are captured in a graph, and its time. Raises `DiagnosticError`."""
    from stagec.driver.job.figures import CompiledJob

    job = CompiledJob.of(options)
    return job, job.time(machine)


@dataclass(frozen=True, slots=True)
class _Target:
    """The pod that decodes, as those see it who send it caches, and its mesh."""

    text: str
    mesh: Mapping[str, int]

    @classmethod
    def of(cls, options: JobOptions) -> _Target:
        """The pod of these options. Raises `DiagnosticError`."""
        return cls(one_group(options), _mesh(JobBuilder(options).module))


def _sending(
    options: JobOptions, machine: Machine, target: _Target
) -> tuple[TimeReport, TransferTime]:
    """The time of a step of prefill by itself, and of the caches that it hands over. Raises
    `DiagnosticError`."""
    from stagec.time.costs.network import level_between_pods
    from stagec.time.transfer import transfer_time

    with TemporaryDirectory() as folder:
        text = Path(folder) / "decode.stg"
        text.write_text(target.text, encoding="utf-8")
        job, found = _step(handing_over(options, text), machine)
    level = level_between_pods(machine, [found.mesh, target.mesh])
    issued = job.compiled.issued(job.values)
    return found, transfer_time(issued, machine, level, found.step)


def _mesh(module: Module) -> Mapping[str, int]:
    """The axes of a mesh."""
    return {a: n or 1 for a, n in module.mesh.sizes.items()} if module.mesh else {}


def _sequences(options: JobOptions) -> Iterator[int]:
    """Numbers of sequences of which a strategy may take the least at once: the divisors of its
    ranks times its microbatches. Raises `DiagnosticError`."""
    module = JobBuilder(options.changed(batch=None)).module
    most = prod(_mesh(module).values()) * max(1, read_strategy(module).microbatches)
    yield from (n for n in range(1, most + 1) if most % n == 0)


def _at_least(options: JobOptions, look: Callable[[JobOptions], Found]) -> Found:
    """What is found of a step of as few sequences as the strategy takes at once. Raises
    `DiagnosticError`."""
    problem: DiagnosticError | None = None
    for batch in _sequences(options):
        try:
            return look(options.changed(batch=batch))
        except DiagnosticError as told:
            problem = problem or told
    raise problem or error("the strategy has no ranks")


def _prefill(
    options: JobOptions, machine: Machine, target: _Target | None
) -> tuple[PodStep, TransferTime | None]:
    """The step that prefills as few prompts as the strategy takes at once; with --chunk, its steps
    together. The last of them hands the caches over, if another pod decodes. Raises
    `DiagnosticError`."""

    def look(options: JobOptions) -> tuple[PodStep, TransferTime | None]:
        *before, last = _chunks(options)
        with kept_reports():  # the last chunk reaches the last position
            seconds = sum(_step(each, machine)[1].step_seconds for each in before)
        sequences = options.batch or 1
        if target is None:
            found = _step(last, machine)[1]
            return PodStep(sequences, seconds + found.step_seconds, found.ranks), None
        found, sent = _sending(last, machine, target)
        sending = sent.alone_seconds, sent.exposed_seconds
        return PodStep(sequences, seconds + found.step_seconds, found.ranks, *sending), sent

    return _at_least(options, look)


def _chunks(options: JobOptions) -> Iterator[JobOptions]:
    """The steps of a prompt: one, or one for each chunk."""
    prompt, past = options.prompt or 1, options.context or 0
    chunk = options.chunk or prompt
    for start in range(0, prompt, chunk):
        size = min(chunk, prompt - start)
        yield options.changed(prompt=size, chunk=None, context=past + start)


def _rows(
    options: Mapping[str, JobOptions],
    machine: Machine,
    prefill: PodStep,
    output: int,
    wanted: Sequence[int] | None,
    accepted: float,
    *,
    apart: bool,
) -> Iterator[ServedBatch]:
    """A row for each batch: those that are wanted, or as they double, while they fit. Of each
    sequence a step gives the tokens that are `accepted`."""
    rates = disaggregated if apart else colocated
    held = (options[PREFILL].context or 0) + (options[PREFILL].prompt or 0) + output // 2
    decode = options[DECODE].changed(context=held)
    problem: DiagnosticError | None = None
    found = False
    for batch in wanted or (1 << power for power in range(_LARGEST.bit_length())):
        try:
            job, report = _step(decode.changed(batch=batch), machine)
        except DiagnosticError as told:
            problem = problem or told
            if wanted:
                raise
            continue
        found, fit = True, job.fit(machine)
        if not fit.fits and not wanted:
            return
        engine = PodStep(batch, report.step_seconds / accepted, report.ranks)
        yield ServedBatch(rates(prefill, engine, output), report.ranks, fit, report.cautions)
    if not found and problem is not None:
        raise problem


def _best(
    rows: Sequence[ServedBatch], ttft: float | None, tpot: float | None
) -> ServedBatch | None:
    """The row that gives most for each rank within the limits."""
    within = [
        row
        for row in rows
        if row.fits
        and (ttft is None or row.rates.ttft <= ttft)
        and (tpot is None or row.rates.tpot <= tpot)
    ]
    return max(within, key=lambda row: row.rates.per_rank, default=None)


# -- what is shown ---------------------------------------------------------------------------------


def _print(
    result: Mapping[str, Any], rows: Sequence[ServedBatch], best: ServedBatch | None, stream: TextIO
) -> None:
    out = console(stream)
    ranks = result["ranks"]
    pods = f", {counted(ranks[DECODE], 'rank')}"
    if result["apart"]:
        pods = f", pods of {counted(ranks[PREFILL], 'rank')} and {counted(ranks[DECODE], 'rank')}"
    out.print(
        f"{result['model']} on {result['machine']}{pods}: prompts of {result['prompt']:,} tokens, "
        f"{result['output']:,} tokens come out",
        markup=False,
    )
    if sent := result.get("handover"):
        out.print(
            f"From prefill to decode: {bytes_text(sent['bytes'])} of caches a step of prefill in "
            f"{sent['messages']:,} messages over {sent['level']}, "
            f"{seconds_text(sent['alone_seconds'])} alone, "
            f"{seconds_text(sent['exposed_seconds'])} behind prefill, which TTFT has",
            markup=False,
        )
    apart = result["apart"]
    titles = ["batch", "TTFT", "TPOT", "a request", "tokens/s", "a rank", "a user", "memory"]
    made = table("Serving", *titles, *(["prefill pods"] if apart else []), text_columns=0)
    for row in rows:
        r = row.rates
        cells = [f"{r.batch:,}", *map(seconds_text, (r.ttft, r.tpot, r.latency))]
        cells += [f"{v:,.1f}" for v in (r.tokens_per_second, r.per_rank, r.per_user)]
        cells.append(bytes_text(row.peak) + ("" if row.fits else " (too much)"))
        made.add_row(*cells, *([f"{r.prefill_pods:.2f}"] if apart else []))
    out.print(made)
    if best is None:
        out.print("no batch is within the limits")
    else:
        r = best.rates
        out.print(
            f"most for each rank: batch {r.batch:,}, {r.per_rank:,.1f} tokens/s a rank, TTFT "
            f"{seconds_text(r.ttft)}, TPOT {seconds_text(r.tpot)}; {fit_text(best.fit)}",
            markup=False,
        )


def _draw(file: Path, result: Mapping[str, Any], rows: Sequence[ServedBatch]) -> None:
    """The curve: tokens of a rank over tokens of a user."""
    title = f"{result['model']} on {result['machine']}"
    points = [
        PlotPoint(row.rates.per_user, row.rates.per_rank, title, _about(row), row.fits)
        for row in rows
    ]
    x = PlotAxis("tokens/s of a user", lambda v: f"{v:,.3g}")
    y = PlotAxis("tokens/s of a rank", lambda v: f"{v:,.3g}")
    drawn = plot(points, x, y, joined=True)
    head = ["batch", "TTFT", "TPOT", "a request", "tokens/s a rank", "tokens/s a user", "memory"]
    cells = [
        [
            f"{r.batch:,}",
            *map(seconds_text, (r.ttft, r.tpot, r.latency)),
            f"{r.per_rank:,.1f}",
            f"{r.per_user:,.1f}",
            fit_text(fit),
        ]
        for r, fit in ((row.rates, row.fit) for row in rows)
    ]
    page = page_of(title, drawn, head, cells, result["cautions"])
    write_file(file, drawn if file.suffix == ".svg" else page)


def _about(row: ServedBatch) -> str:
    r = row.rates
    return (
        f"batch {r.batch:,}: TTFT {seconds_text(r.ttft)}, TPOT {seconds_text(r.tpot)}, "
        f"{r.per_rank:,.1f} tokens/s a rank, {fit_text(row.fit)}"
    )
