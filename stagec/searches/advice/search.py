"""A search for changes of a job, one to three at a time, that reduce its memory.

Every single change is compiled (of sizes the two nearest ones), then combinations that are expected
to fit, cheapest first, until none is left that is expected to cost less than the best ones, or the
budget is spent. Every suggestion was compiled: a wrong expectation can only miss some.

Jobs are compiled by the caller.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import TypeAlias

from stagec.analysis.figures import Figures
from stagec.jobs.request.options import JobOptions
from stagec.searches.advice.knobs import Change, KnobSpace, in_order
from stagec.searches.advice.prediction import Combination, Prediction, cost, further

MOST_CHANGES = 3
#: The most jobs that are compiled in a search, and at a time.
BUDGET, AT_A_TIME = 64, 4
#: A combination is tried if its expected peak is at most this factor above the limit.
_SLACK = 1.05
#: How often the smallest combinations are tried if none is expected to fit.
_LAST_TRIES = 1

#: Whether the numerics of training change, the cost, and the number of changes; less is better.
Preference: TypeAlias = tuple[bool, float, int]
#: Compiles jobs: their figures, in order; None for options that are not a valid job.
Evaluate: TypeAlias = Callable[[Sequence[JobOptions]], Sequence[Figures | None]]
#: The bytes that a rank of a job on a mesh may hold.
Room: TypeAlias = Callable[[Mapping[str, int]], int]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Changes, the job with them, its figures, and its additional cost in FLOPs."""

    changes: tuple[Change, ...]
    options: JobOptions
    figures: Figures
    cost: float

    @property
    def text(self) -> str:
        """`--sp --microbatches 16`."""
        return " ".join(s.text for s in self.changes)

    @property
    def order(self) -> Preference:
        """Cheapest first; changes of the numerics of training come last."""
        return _numerics(frozenset(self.changes)), self.cost, len(self.changes)


@dataclass(frozen=True, slots=True)
class Advice:
    """The combinations that fit, cheapest first, and the one with the smallest peak.

    `tried` of `count` combinations were compiled. `left` of the others may still be better than
    the suggestions: they were not tried only because the budget was spent.
    """

    before: Figures
    suggestions: tuple[Suggestion, ...]
    smallest: Suggestion
    tried: int
    count: int
    left: int


def advise(
    options: JobOptions,
    before: Figures,
    sizes: Mapping[str, int],
    room: Room,
    evaluate: Evaluate,
    *,
    wanted: int = 6,
    budget: int = BUDGET,
) -> Advice:
    """Search for changes with which a job of flags, whose batch is given, fits its limit. It ends
    when no better ones than the best `wanted` suggestions are expected.

    `before` are the figures of the job, `sizes` the sizes of the model's symbols. At most `budget`
    other jobs are compiled. Ranks and batch stay.
    """
    jobs = dict(_combinations(KnobSpace(options, sizes)))
    search = _Search(jobs, before, room, evaluate, wanted, budget)
    for numerics in (False, True):
        search.widen(numerics)
        while batch := search.next():
            search.compile(batch)
    return search.advice()


def _combinations(space: KnobSpace) -> Iterator[tuple[Combination, JobOptions]]:
    """All legal combinations, the empty one among them, with their jobs."""
    single = space.changes()
    for size in range(MOST_CHANGES + 1):
        for chosen in combinations(single, size):
            if len({s.knob for s in chosen}) == size and (job := space.job(chosen)) is not None:
                yield frozenset(chosen), job


def _first(combinations: Iterable[Combination]) -> list[Combination]:
    """The smallest combination with each change; for sizes, with the two nearest in each
    direction."""
    smallest: dict[Change, Combination] = {}
    for combination in sorted(combinations, key=len):
        for change in combination:
            smallest.setdefault(change, combination)
    ordered = sorted(smallest, key=_direction)
    by_level = (sorted(g, key=lambda s: abs(s.level)) for _, g in groupby(ordered, key=_direction))
    chosen = (s for g in by_level for s in (g if g[0].factor is None else g[:2]))
    return list(dict.fromkeys(smallest[s] for s in chosen))


def _direction(change: Change) -> tuple[str, bool]:
    return change.knob, change.level > 0


class _Search:
    """The combinations compiled so far, and the expectation of the others."""

    def __init__(
        self,
        jobs: dict[Combination, JobOptions],
        before: Figures,
        room: Room,
        evaluate: Evaluate,
        wanted: int,
        budget: int,
    ) -> None:
        self._jobs, self._room, self._evaluate = jobs, room, evaluate
        self._wanted, self._budget = wanted, budget
        self._before = before
        self._known: dict[Combination, Figures] = {frozenset(): before}
        self._open: set[Combination] = set()
        self._tried: set[Combination] = set()
        self._expected = Prediction(jobs, self._known)
        self._most = (before.peak - before.missing(room)) * _SLACK

    def widen(self, numerics: bool) -> None:
        """Add the combinations that change the numerics of training, or those that do not, unless
        there are enough suggestions."""
        if len(self._suggestions()) >= self._wanted:
            return
        more = [c for c in self._jobs if c and _numerics(c) == numerics]
        self._open.update(more)
        self.compile(_first(more))
        self._expected = Prediction(self._jobs, self._known)
        self._last_tries = _LAST_TRIES

    def compile(self, batch: Sequence[Combination]) -> None:
        """Compile combinations within the budget, and learn from them."""
        batch = [c for c in batch if c not in self._tried][: self._budget - len(self._tried)]
        self._tried.update(batch)
        jobs = [self._jobs[c] for c in batch]
        figures_by_job = dict(zip(batch, self._evaluate(jobs), strict=True))
        for combination, figures in figures_by_job.items():
            if figures is not None:
                self._known[combination] = figures
                self._expected.correct(combination, figures)
        for combination, figures in figures_by_job.items():
            if figures is None or figures == self._before:
                self._drop(combination)

    def _drop(self, combination: Combination) -> None:
        """Remove the combinations that extend an invalid one, or one without effect, except those
        that were compiled."""
        for other in [c for c in self._jobs if c > combination and c not in self._known]:
            del self._jobs[other]
            self._open.discard(other)

    def next(self) -> list[Combination]:
        """The combinations to compile next; empty if none is expected to be better."""
        if len(self._tried) == self._budget:
            return []
        if promising := self._promising():
            return _distinct(sorted(promising, key=promising.__getitem__))
        if self._suggestions() or not self._last_tries:
            return []
        self._last_tries -= 1
        peaks = {c: peak for c, peak, _ in self._untried()}
        return _distinct(sorted(peaks, key=peaks.__getitem__))

    def _untried(self) -> Iterator[tuple[Combination, float, float]]:
        """The combinations that were not compiled, with their expected peaks and costs."""
        for candidate in self._expected.all():
            if candidate[0] in self._open and candidate[0] not in self._tried:
                yield candidate

    def _promising(self) -> dict[Combination, Preference]:
        """The combinations that are expected to fit and to be better than the suggestions, with
        their order."""
        suggestions, usual = self._suggestions(), cost(self._before)
        bar = suggestions[self._wanted - 1].order if len(suggestions) >= self._wanted else None
        promising: dict[Combination, Preference] = {}
        for c, peak, expected in self._untried():
            order = _numerics(c), expected - usual, len(c)
            if peak > self._most or (bar is not None and order >= bar):
                continue
            if not any(order >= s.order and _covers(s, c) for s in suggestions):
                promising[c] = order
        return promising

    def _suggestions(self) -> list[Suggestion]:
        """The combinations that fit, best first, without those that extend a better one or change
        the same knobs."""
        fitting = [c for c, f in self._known.items() if f.missing(self._room) <= 0]
        suggestions: list[Suggestion] = []
        for each in sorted(map(self._suggestion, fitting), key=lambda s: s.order):
            if not any(_covers(s, frozenset(each.changes)) for s in suggestions):
                suggestions.append(each)
        return suggestions

    def _suggestion(self, combination: Combination) -> Suggestion:
        figures = self._known[combination]
        more = cost(figures) - cost(self._before)
        return Suggestion(in_order(combination), self._jobs[combination], figures, more)

    def advice(self) -> Advice:
        """The result of the search."""
        smallest = min(self._known, key=lambda c: self._known[c].peak)
        return Advice(
            self._before,
            tuple(self._suggestions()[: self._wanted]),
            self._suggestion(smallest),
            len(self._tried),
            len(self._jobs) - 1,
            len(self._promising()),
        )


def _covers(suggestion: Suggestion, combination: Combination) -> bool:
    """Whether a combination extends a suggestion, or changes the same knobs."""
    chosen = frozenset(suggestion.changes)
    return further(combination, chosen) or _knobs(combination) == _knobs(chosen)


def _knobs(combination: Combination) -> set[str]:
    return {change.knob for change in combination}


def _distinct(ordered: Iterable[Combination]) -> list[Combination]:
    """The first `AT_A_TIME` combinations of which none extends another one."""
    chosen: list[Combination] = []
    for combination in ordered:
        if not any(further(combination, c) for c in chosen):
            chosen.append(combination)
        if len(chosen) == AT_A_TIME:
            break
    return chosen


def _numerics(combination: Combination) -> bool:
    return any(s.numerics for s in combination)
