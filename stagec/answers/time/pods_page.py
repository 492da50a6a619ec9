"""The page of the steps of two pods: one that prefills and one that decodes."""

from collections.abc import Iterator
from dataclasses import replace

from stagec.answers.time.pods_answer import PodsTime
from stagec.answers.time.table import seconds_text
from stagec.answers.time.time_page import levers, path_table, step_facts
from stagec.output.bars import Bar, Bars
from stagec.output.page import command, facts, figures, page, paragraphs
from stagec.output.plot import PlotAxis
from stagec.output.tables import bytes_text, ranks_text


def pods_page(answer: PodsTime) -> str:
    """The text of the page."""
    body = [
        command(answer.command),
        facts(_facts(answer)),
        figures([pods_plot(answer)]),
        *(part for pod in answer.pods for part in _pod(answer, pod)),
    ]
    return page(answer.title, body)


def pods_plot(answer: PodsTime) -> Bars:
    """The breakdown of the time of each class of each pod, without the bubble."""
    bars = [
        Bar(f"{pod} {each.name}", {n: s for n, s in each.breakdown.items() if n != "bubble"})
        for pod, report in answer.pods.items()
        for each in report.classes
    ]
    return Bars(
        title="Where the time of each class goes",
        about=answer.title,
        command=answer.command,
        bars=bars,
        axis=PlotAxis("time without the bubble", seconds_text),
    )


def _facts(answer: PodsTime) -> Iterator[tuple[str, str]]:
    transfer = answer.transfer
    yield "TTFT", seconds_text(answer.ttft)
    yield "TPOT", seconds_text(answer.tpot)
    yield f"of caches and tokens sent over {transfer.level}", bytes_text(transfer.bytes)
    yield "their time after prefill", seconds_text(transfer.exposed_seconds)


def _pod(answer: PodsTime, pod: str) -> Iterator[str]:
    report = answer.pods[pod]
    yield f"<h2>{pod.capitalize()}</h2>"
    yield from paragraphs([f"{ranks_text(report.ranks, report.mesh)}.", *report.cautions], "quiet")
    yield facts(step_facts(report))
    if report.levers:
        chart = levers(report, f"{pod} of {answer.title}", answer.command)
        yield figures([replace(chart, title=f"{pod.capitalize()}. {chart.title}")])
    yield "<h3>Critical path</h3>"
    yield path_table(report, f"path-{pod}")
