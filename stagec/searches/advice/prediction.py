"""The expected cost of combinations of changes, from the cost of each change alone.

Sizes are logarithms: the effects of changes add up, and a combination that was compiled corrects
all that extend it. Microbatches count as they are in the job, since a pipeline brings several. The
effect of a size that was not compiled is interpolated linearly between the two nearest ones.

    alone                 --sp: x 0.42, --microbatches 16: x 0.11      966 GiB before
    expected together     966 * 0.42 * 0.11 = 45 GiB                   compiled: 73 GiB
    corrected             all that go further than these two: x 73/45
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.analysis.figures import Figures
from stagec.jobs.legal import count_of
from stagec.jobs.request.options import JobOptions
from stagec.searches.advice.knobs import MICROBATCHES, Change, in_order, stretch

#: The cost in FLOPs of a byte that is sent, or copied to or from the host: while an H100 computes
#: 400 TFLOP/s, its network moves 100 GB/s, between the 50 of its NIC and the 450 of NVLink.
FLOPS_PER_BYTE = 4_000

Combination: TypeAlias = frozenset[Change]
#: Logarithms of FLOPs, bytes sent, bytes copied, and of the bytes of each category of memory.
_Sizes: TypeAlias = NDArray[np.float64]
#: The place of the first category of memory in `_Sizes`.
_MOVED = 3
#: Errors of logarithms below this one are not learned.
_EXACT = 1e-9


class _Part(NamedTuple):
    """A change for the purpose of effects: the knob and the direction, and the factor."""

    kind: tuple[str, bool]
    factor: float
    is_size: bool


def cost(figures: Figures) -> float:
    """The cost of a step in FLOPs: computation and the bytes sent and copied, stretched by the
    bubble of the pipeline."""
    moved = figures.sent + figures.copied
    return (figures.flops + FLOPS_PER_BYTE * moved) / float(1 - figures.idle)


def further(one: Combination, other: Combination) -> bool:
    """Whether a combination extends another one: has each change of it, as far or further in the
    same direction."""
    levels = {change.knob: change.level for change in one}
    return all(
        0 < s.level <= levels.get(s.knob, 0) or levels.get(s.knob, 0) <= s.level < 0 for s in other
    )


class Prediction:
    """The expected sizes of all combinations, learned from those that were compiled."""

    def __init__(
        self, jobs: Mapping[Combination, JobOptions], known: Mapping[Combination, Figures]
    ) -> None:
        count, before = count_of(jobs[frozenset()]), _sizes(known[frozenset()])
        parts = {c: _parts(c, count_of(job) / count) for c, job in jobs.items()}
        effects = _Effects({tuple(parts[c]): _sizes(f) - before for c, f in known.items()})
        self._rows = {c: row for row, c in enumerate(jobs)}
        self._sizes = np.array([before + effects.sum(parts[c]) for c in jobs])
        self._stretch = np.array([stretch(job) for job in jobs.values()])
        for combination in sorted(known, key=len):
            self.correct(combination, known[combination])

    def correct(self, combination: Combination, figures: Figures) -> None:
        """Learn the figures of a combination, and correct all that extend it."""
        error = _sizes(figures) - self._sizes[self._rows[combination]]
        if np.abs(error).max() > _EXACT:
            rows = [row for c, row in self._rows.items() if further(c, combination)]
            self._sizes[rows] += error

    def all(self) -> Iterator[tuple[Combination, float, float]]:
        """The expected peak of each combination in bytes, and its expected cost in FLOPs."""
        sizes = np.expm1(self._sizes)
        peaks = sizes[:, _MOVED:].sum(axis=1)
        costs = (sizes[:, 0] + FLOPS_PER_BYTE * sizes[:, 1:_MOVED].sum(axis=1)) * self._stretch
        yield from zip(self._rows, peaks.tolist(), costs.tolist(), strict=True)


def _sizes(figures: Figures) -> _Sizes:
    sizes = figures.flops, figures.sent, figures.copied, *figures.memory.values()
    return np.log1p(np.array(sizes, dtype=np.float64))


def _parts(combination: Combination, times: float) -> list[_Part]:
    """The changes of a combination, with the factor by which the number of microbatches grows."""
    parts = [
        _Part((s.knob, s.level > 0), s.factor or s.level, s.factor is not None)
        for s in in_order(combination)
        if s.knob != MICROBATCHES
    ]
    return parts + ([_Part((MICROBATCHES, times > 1), times, True)] if times != 1 else [])


class _Effects:
    """The effect of each change on the logarithms of sizes."""

    def __init__(self, known: Mapping[tuple[_Part, ...], _Sizes]) -> None:
        self._none = np.zeros_like(known[()])
        self._known: dict[tuple[str, bool], dict[float, _Sizes]] = {}
        for parts in sorted(known, key=lambda p: sum(i.kind[0] != MICROBATCHES for i in p)):
            self._learn(parts, known[parts])

    def sum(self, parts: Iterable[_Part]) -> _Sizes:
        """The sum of the effects of several changes; unknown ones count as 0."""
        effects = (self._of(part) for part in parts)
        return sum((f for f in effects if f is not None), self._none)

    def _learn(self, parts: tuple[_Part, ...], total: _Sizes) -> None:
        """Attribute what known effects do not explain to the new changes, in equal parts; without
        new ones to the first change whose effect is only interpolated."""
        new = [p for p in parts if self._of(p) is None] or [
            p for p in parts if p.factor not in self._known[p.kind]
        ][:1]
        rest = total - self.sum(p for p in parts if p not in new)
        for part in new:
            self._known.setdefault(part.kind, {})[part.factor] = rest / len(new)

    def _of(self, part: _Part) -> _Sizes | None:
        points = self._known.get(part.kind, {})
        if part.factor in points or not part.is_size:
            return points.get(part.factor)
        two = sorted({1.0: self._none, **points}.items(), key=lambda p: abs(p[0] - part.factor))[:2]
        return _on_line(part.factor, *two) if len(two) == 2 else None


def _on_line(at: float, one: tuple[float, _Sizes], two: tuple[float, _Sizes]) -> _Sizes:
    """The logarithm of a size, interpolated between two: linear in 1/n where it falls, else in
    n."""
    (x, low), (y, high) = sorted((one, two), key=lambda p: p[0])
    first, second = np.exp(low), np.exp(high)
    falling = second + (first - second) * ((1 / at - 1 / y) / (1 / x - 1 / y))
    rising = second + (second - first) * ((at - y) / (y - x))
    ratio = np.where(second < first, falling, rising)
    return np.asarray(np.log(np.maximum(ratio, np.finfo(np.float64).tiny)))
