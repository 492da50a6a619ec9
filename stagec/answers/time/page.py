"""The page of `stagec time --html`: one file that loads nothing from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from stagec.analysis.time_report import TimeReport
from stagec.answers.time.table import seconds_text
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.machine import used_text
from stagec.output.page import part, render
from stagec.output.tables import bytes_text, count_text, verdict_text
from stagec.support.words import counted

if TYPE_CHECKING:
    from stagec.answers.time.timed import Timed

_SCRIPTS = "answers/time/data.js", "answers/time/lanes.js", "answers/time/page.js"


def step_page(timed: Timed, report: TimeReport) -> str:
    """The text of the page of a step whose memory was planned, with the levers of `report`."""
    from stagec.analysis.time_picture import time_picture

    machine = timed.machine
    words = ["stagec", "time", *job_words(timed.options), "--machine", machine.name]
    if used := {level.name: level.used for level in machine.network if level.used is not None}:
        words += ["--used-ranks", used_text(used)]
    command = shlex.join([*words, *([] if timed.overlap else ["--no-overlap"])])
    picture = time_picture(timed.issued, timed.step, timed.plans)
    return time_page(report, picture, command, machine.title, machine.memory.capacity.value)


def time_page(
    found: TimeReport, picture: Mapping[str, Any], command: str, title: str, capacity: float
) -> str:
    """The text of the page of a job, whose machine is called `title` and has so many bytes of
    memory."""
    mesh = " x ".join(f"{a} {n}" for a, n in found.mesh.items()) or "one device"
    about = f"{counted(found.ranks, 'rank')}: {mesh}. "
    about += " ".join(_left_out(picture, levers=bool(found.levers)))
    body = "".join(f'<p class="about">{escape(text)}</p>' for text in (about, *found.cautions))
    body += f"<div><code>{escape(command)}</code></div>"
    told = found.as_json()
    data = {
        "facts": list(_facts(found)),
        "capacity": round(capacity),
        "levers": sorted(told["levers"], key=lambda each: float(each["step_seconds"])),
        "path": told["critical_path"],
        "picture": picture,
    }
    name = f"{found.model} on {title}"
    return render(
        name, body + part("answers/time/page.html"), ("answers/time/page.css",), _SCRIPTS, data
    )


def _facts(found: TimeReport) -> Iterator[tuple[str, str]]:
    yield "a step", seconds_text(found.step_seconds)
    if found.tokens_per_second is not None and found.tokens_per_second_per_rank is not None:
        yield "tokens/s", f"{found.tokens_per_second:,.0f}"
        yield "tokens/s per rank", f"{found.tokens_per_second_per_rank:,.1f}"
    if found.mfu is not None:
        yield "MFU", f"{found.mfu:.1%}"
    yield f"HFU, of {count_text(round(found.peak_flops), 'FLOP/s')}", f"{found.hfu:.1%}"
    if found.fit is not None:
        yield f"peak memory, of {verdict_text(found.fit)}", bytes_text(found.fit.peak)


def _left_out(picture: Mapping[str, Any], *, levers: bool) -> Iterator[str]:
    """What the page does not show."""
    classes = picture["classes"]
    if picture["coarse"]:
        names = [classes[i]["name"] for i in picture["coarse"]]
        yield f"Of {len(names)} of {len(classes)} classes computations are shown by kind only."
    without = sum(1 for each in classes if each["memory"] is None)
    if without:
        yield f"The memory of {without} of {len(classes)} classes is left out."
    if not levers:
        yield "What would help was not tried: --levers does."
