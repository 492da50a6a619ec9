"""The page of `stagec time --html`, a self-contained file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagec.analysis.memory_fit import room_of
from stagec.analysis.time_report import TimeReport
from stagec.answers.time.table import seconds_text
from stagec.answers.time.timed import Timed
from stagec.jobs.request.command_line import step_command
from stagec.output.bars import Bar, Bars
from stagec.output.page import TableRow, command, facts, figures, page, paragraphs, part, table
from stagec.output.plot import PlotAxis
from stagec.output.tables import bytes_text, count_text, ranks_text, verdict_text

_SCRIPTS = (
    *("output/moment.js", "answers/time/data.js", "answers/time/lanes.js"),
    "answers/time/page.js",
)
#: The largest number of classes in the chart of parts, and of lines of the critical path.
_MOST_CLASSES = 128
_PARTS = """<div class="rows" tabindex="0">
<table id="parts" aria-label="parts of the step"></table></div>"""


def step_page(timed: Timed, report: TimeReport) -> str:
    """The page of a step whose memory was planned, with the levers of `report`."""
    commands = [_command(timed), f"{step_command(timed.options, None)} --html memory.html"]
    rooms = [
        room_of(job.software.machine_of(timed.machine), job.mesh)
        for job in timed.each.values()
        for _ in job.programs
    ]
    return time_page(report, _picture(timed), commands, _machines(timed), rooms)


def step_plot(timed: Timed, report: TimeReport) -> Bars:
    """The chart of the page that is also written alone: the breakdown of each class."""
    return _parts(_picture(timed), f"{report.model} on {_machines(timed)}", _command(timed))


def _machines(timed: Timed) -> str:
    """The titles of the machines of all pods."""
    each = (job.software.machine_of(timed.machine) for job in timed.each.values())
    return " and ".join(dict.fromkeys(machine.title for machine in each))


def _command(timed: Timed) -> str:
    return step_command(timed.options, timed.machine, overlap=timed.replay.overlap)


def _picture(timed: Timed) -> Mapping[str, Any]:
    from stagec.analysis.time_picture import time_picture

    return time_picture(timed.issued, timed.step, timed.plans)


def time_page(
    report: TimeReport,
    picture: Mapping[str, Any],
    commands: Sequence[str],
    title: str,
    rooms: Sequence[int],
) -> str:
    """The page of a job; `title` is that of its machines, `rooms` has the bytes that a rank of each
    class may use, and `commands` are those of its time and of its memory."""
    about = f"{ranks_text(report.ranks, report.mesh)}. "
    about += " ".join(_left_out(picture, levers=bool(report.levers)))
    name = f"{report.model} on {title}"
    charts = [_parts(picture, name, commands[0])]
    if report.levers:
        charts.append(levers(report, name, commands[0]))
    body = [
        *paragraphs([about, *report.cautions], "quiet"),
        *map(command, commands, ("", "each buffer:")),
        facts(step_facts(report)),
        part("answers/time/page.html"),
        figures(charts),
        _PARTS,
        "<h2>Critical path</h2>",
        *paragraphs(
            ["What the step is made of, from its start to its end, with the waits before each."],
            "quiet",
        ),
        path_table(report),
    ]
    data = {"about": [name, commands[0]], "rooms": rooms, "picture": picture}
    return page(name, body, _SCRIPTS, data)


def _parts(picture: Mapping[str, Any], about: str, command_text: str) -> Bars:
    """The breakdown of the time of each class, without the bubble."""
    bars = [
        Bar(
            each["name"],
            {picture["parts"][p]: time / 1e12 for p, time in each["breakdown"] if p},
            key=f"class{n}",
        )
        for n, each in enumerate(picture["classes"])
    ]
    sums = {n: sum(bar.parts.get(n, 0) for bar in bars) for bar in bars for n in bar.parts}
    order = sorted(sums, key=lambda n: -sums[n])
    bars = [replace(b, parts={n: b.parts[n] for n in order if n in b.parts}) for b in bars]
    return Bars(
        title="Where the time of each class goes",
        about=about,
        command=command_text,
        bars=bars,
        axis=PlotAxis("time without the bubble", seconds_text),
        most=_MOST_CLASSES,
        limit=(picture["step"] / 1e12, "the step"),
    )


def levers(report: TimeReport, about: str, command_text: str) -> Bars:
    """The time of the step on machines that are better in one respect."""
    rows = [("as it is", report.step_seconds, 1.0)]
    rows += sorted(
        ((each.name, each.step_seconds, each.speedup) for each in report.levers),
        key=lambda row: row[1],
    )
    bars = [
        Bar(f"{name} ({speedup - 1:.1%} faster)" if n else name, {"step time": seconds})
        for n, (name, seconds, speedup) in enumerate(rows)
    ]
    return Bars(
        title="What would help: machines that are better in one respect",
        about=about,
        command=command_text,
        bars=bars,
        axis=PlotAxis("step time", seconds_text),
    )


def path_table(report: TimeReport, name: str = "path") -> str:
    """The critical path of the step, from its start to its end."""
    heads = ["class", "phase", "op", "counts as", "nodes", "time", "share of the step"]
    rows = [
        TableRow(
            [p.cls, p.phase, p.op, p.part, p.nodes, p.seconds, p.seconds / report.step_seconds],
            [
                *(p.cls, p.phase, p.op, p.part, f"{p.nodes:,}", seconds_text(p.seconds)),
                f"{p.seconds / report.step_seconds:.1%}",
            ],
        )
        for p in report.critical_path[:_MOST_CLASSES]
    ]
    return table(heads, rows, name)


def step_facts(report: TimeReport) -> Iterator[tuple[str, str]]:
    """The figures of a step, each with its name."""
    yield "step time", seconds_text(report.step_seconds)
    if report.tokens_per_second is not None and report.tokens_per_second_per_rank is not None:
        yield "tokens/s", f"{report.tokens_per_second:,.0f}"
        yield "tokens/s per rank", f"{report.tokens_per_second_per_rank:,.1f}"
    if report.mfu is not None:
        yield "MFU", f"{report.mfu:.1%}"
    yield f"HFU, of {count_text(round(report.peak_flops), 'FLOP/s')}", f"{report.hfu:.1%}"
    if report.fit is not None:
        yield f"peak memory, of {verdict_text(report.fit)}", bytes_text(report.fit.peak)


def _left_out(picture: Mapping[str, Any], *, levers: bool) -> Iterator[str]:
    """Sentences about parts that the page leaves out."""
    classes = picture["classes"]
    if picture["coarse"]:
        names = [classes[i]["name"] for i in picture["coarse"]]
        yield f"{len(names)} of {len(classes)} classes show their computations by kind only."
    without = sum(1 for each in classes if each["memory"] is None)
    if without:
        yield f"The memory of {without} of {len(classes)} classes is left out."
    if not levers:
        yield "What would help was not timed: use --levers."
