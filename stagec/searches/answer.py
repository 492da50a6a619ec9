"""The answer of a search: the best strategies that fit, and why the others are behind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from stagec.output.report import Report
from stagec.support.processors import processors

if TYPE_CHECKING:
    from stagec.searches.jobs import Run
    from stagec.searches.run import Answer, Question


@dataclass(frozen=True)
class RankedStrategy:
    """One of the best strategies: its flags, and the command that compiles it. `row` has all its
    figures."""

    row: Mapping[str, Any]

    @property
    def strategy(self) -> str:
        """The flags of the strategy."""
        return str(self.row["strategy"])

    @property
    def command(self) -> str:
        """The command that compiles it."""
        return str(self.row["command"])

    @property
    def step_seconds(self) -> float:
        """The time of a step in seconds."""
        return float(self.row["step_seconds"])

    @property
    def memory_peak(self) -> int:
        """The peak of a rank in bytes."""
        return int(self.row["memory_peak"])


@dataclass(frozen=True)
class SearchAnswer(Report):
    """The object of `stagec search --json`, and the command of the search."""

    data: Mapping[str, Any]
    command: str = ""

    @property
    def best(self) -> Sequence[RankedStrategy]:
        """The best strategies, the first one first."""
        return [RankedStrategy(row) for row in self.data["best"]]

    @property
    def proven(self) -> bool:
        """Whether no other point of the space can be better; False if the search was
        interrupted."""
        return bool(self.data["proven"])

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each strategy that was evaluated."""
        return [dict(row) for row in self.data["evaluations"]]

    def page(self) -> str:
        """A page with charts of the evaluated strategies; a table if none fits."""
        from stagec.searches.search_page import search_page

        return search_page(self.data, self.command) or super().page()

    def as_csv(self) -> str:
        from stagec.searches.table import best_csv

        return best_csv(self.data)

    def print(self, stream: TextIO) -> None:
        from stagec.searches.table import print_answer

        print_answer(self.data, stream)


def search(
    asked: list[Question],
    given: Mapping[str, Any],
    progress: Callable[[str], None] = lambda text: None,
) -> SearchAnswer:
    """The answer to the questions of `questions(given)`; `given` also has the options of workers
    and of reports on the best. `progress` is called with messages. Raises `DiagnosticError`, and
    `KeyboardInterrupt` if that comes before there is any answer."""
    from stagec.searches.cache import cached

    return SearchAnswer(cached(given, asked, lambda: _searched(asked, given, progress)))


def _searched(
    asked: list[Question], given: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """The answers as plain data."""
    from stagec.searches.run import search
    from stagec.searches.sensitivity import nearest, neighbours, sensitivity
    from stagec.searches.table import as_json, least
    from stagec.searches.tried import tried

    answers: list[Answer] = []
    with _crew(given) as (run, at_a_time):
        for question in asked:
            try:
                answers.append(search(question, run, at_a_time, progress))
            except KeyboardInterrupt:
                if not answers:
                    raise
                answers[-1].interrupted = True
            if answers[-1].interrupted:
                break
        answer_json = as_json(answers)
        first = min((a for a in answers if a.best), key=least, default=None)
        if first is None:
            answer_json["nearest"] = nearest(answers)
        if first is not None and not first.interrupted:
            try:
                if given["levers"]:
                    answer_json["tried"] = tried(first, run, progress)
                answer_json["neighbours"] = neighbours(first, run if given["neighbours"] else None)
                if given["sensitivity"]:
                    answer_json["sensitivity"] = sensitivity(first, run)
            except KeyboardInterrupt:  # the best are reported, but not cached
                answer_json["proven"] = False
    return answer_json


@contextmanager
def _crew(given: Mapping[str, Any]) -> Generator[tuple[Run, int]]:
    """The function that runs jobs in workers, and the number of jobs at a time."""
    from stagec.searches.jobs import kind_of, work

    if given["scheduler"] is not None:
        from stagec.traces.cluster import cluster

        with cluster(given["scheduler"], given["jobs"]) as run:
            yield partial(run, work), 64
        return
    from stagec.traces.workers import crew

    processes = given["jobs"] or processors()
    with crew(work, processes, kind_of) as local:
        yield local, processes
