"""The page of `stagec time --html`: one file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from stagec.analysis.time_report import TimeReport
from stagec.driver.output.page import part, render
from stagec.driver.output.tables import bytes_text, count_text, verdict_text
from stagec.driver.time.table import seconds_text
from stagec.support.words import counted

_SCRIPTS = "time/data.js", "time/lanes.js", "time/page.js"


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
    return render(name, body + part("time/page.html"), ("time/page.css",), _SCRIPTS, data)


def _facts(found: TimeReport) -> Iterator[tuple[str, str]]:
    yield "a step", seconds_text(found.step_seconds)
    if found.tokens_per_second is not None and found.tokens_per_second_per_rank is not None:
        yield "tokens/s", f"{found.tokens_per_second:,.0f}"
        yield "tokens/s a rank", f"{found.tokens_per_second_per_rank:,.1f}"
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
