"""The page of `stagec memory --html`: a self-contained file.

It has its data as JSON, which the scripts beside this file draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stagec.analysis.picture import Band, Picture
from stagec.machines import Machine
from stagec.memory.timeline import ALL
from stagec.output.chart import COLORS
from stagec.output.page import page as render
from stagec.output.page import paragraphs

#: The total number of columns of the pictures of a page, and the bounds for each picture.
ALL_COLUMNS, FEWEST, MOST = 24_000, 120, 1_500
_SCRIPTS = "output/moment.js", "answers/memory/chart.js", "answers/memory/page.js"
_BODY = """<form class="bar" id="controls" autocomplete="off"></form>
<div id="jobs"></div>"""


@dataclass(frozen=True, slots=True)
class JobPictures:
    """The pictures of a job or of a pod: its title, the commands of its memory and of its time (""
    if it has none), the stage to show first, and a picture for each stage; `before` precedes the
    names of stages. `limit`, in bytes per rank, is a line."""

    title: str
    command: str
    time: str
    shown: int
    pictures: Sequence[Picture]
    before: str = ""
    limit: int | None = None


def columns_for(classes: int) -> int:
    """The columns of each picture on a page with this number of pictures."""
    return min(MOST, max(FEWEST, ALL_COLUMNS // classes))


def page(title: str, jobs: Sequence[JobPictures], machine: Machine) -> str:
    """The text of the page. Jobs are drawn below each other, on the same scales."""
    used = {b.category for job in jobs for p in job.pictures for b in p.bands}
    categories = [c for c in ALL if c in used]
    data = {
        "categories": categories,
        "colors": [ALL.index(c) % COLORS for c in categories],
        "jobs": [_job(job, categories) for job in jobs],
    }
    return render(title, [*paragraphs([_about(machine)], "quiet"), _BODY], _SCRIPTS, data)


def _about(machine: Machine) -> str:
    rate, bandwidth = machine.compute.vector["f32"].value, machine.memory.bandwidth.value
    return (
        f"What one rank holds over a step. The axis is the time of the computations alone: a "
        f"roofline of {rate / 1e12:g} TFLOP/s and {bandwidth / 1e9:g} GB/s. Communication, "
        "copies to the host and launches take no time here; 'stagec time --html' draws memory over "
        "the time of the whole step. Each column shows its highest moment. Point at the picture "
        "for a buffer, click for a list."
    )


def _job(job: JobPictures, categories: Sequence[str]) -> dict[str, Any]:
    stages = [picture.stage for picture in job.pictures]
    return {
        "title": job.title,
        "command": job.command,
        "time": job.time,
        "shown": stages.index(job.shown),
        "limit": job.limit,
        "classes": [_class(picture, job.before, categories) for picture in job.pictures],
    }


def _class(picture: Picture, before: str, categories: Sequence[str]) -> dict[str, Any]:
    texts: dict[tuple[str, str, str], int] = {}
    whats = [(m.title, m.operation, m.phase) for m in picture.moments]
    return {
        "name": f"{before}stage{picture.stage}",
        "ranks": picture.ranks,
        "peak": picture.peak,
        "time": picture.time,
        "starts": _steps([m.start for m in picture.moments]),
        "what": [texts.setdefault(what, len(texts)) for what in whats],
        "texts": list(texts),
        "bands": [_band(band, categories) for band in picture.bands],
    }


def _band(band: Band, categories: Sequence[str]) -> dict[str, Any]:
    places = [place for place, _ in band.changes]
    counts = [count for _, count in band.changes]
    return {
        "name": band.name,
        "type": band.type,
        "category": categories.index(band.category),
        "line": band.line,
        "each": band.each,
        "changes": [n for change in zip(_steps(places), counts, strict=True) for n in change],
    }


def _steps(numbers: Sequence[int]) -> list[int]:
    """The differences of successive numbers, which are shorter to write."""
    return [b - a for a, b in pairwise([0, *numbers])]
