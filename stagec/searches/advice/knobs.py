"""Changes of a job that may reduce its memory: single changes, and the jobs of several.

A change keeps the work (the model and the global batch) and the number of ranks: where an axis of
the mesh grows, the data-parallel axis shrinks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from stagec.ir.module import BATCH
from stagec.ir_spec.strategy.axes import AXES, DATA_AXES, EXPERTS
from stagec.ir_spec.strategy.statement import Flag
from stagec.jobs.legal import checked, count_of, size_of
from stagec.jobs.request.combine import flag, without_effect
from stagec.jobs.request.flags import FLAGS, SHORTHANDS
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import Diagnostic, DiagnosticError

MICROBATCHES = "microbatches"
#: The order of flags in a list of changes: axes, then the others.
_ORDER = (*AXES, *SHORTHANDS)
_FEWER, _MORE = (2, 4), (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Change:
    """One change: `knob` is the option, `value` its new value.

    `level` is the number of steps from the value of the job, negative for smaller sizes. `factor`
    is the new size over the old one, None if the knob is not a size.
    """

    knob: str
    value: Any
    level: int
    factor: float | None = None
    numerics: bool = False

    @property
    def text(self) -> str:
        """`--zero 3`."""
        if isinstance(self.value, bool):
            return flag(self.knob) if self.value else f"without {flag(self.knob)}"
        return f"{flag(self.knob)} {self.value}"


class KnobSpace:
    """The changes of a job of flags with a fixed number of ranks and batch; `sizes` are the sizes
    of the model's symbols."""

    def __init__(self, options: JobOptions, sizes: Mapping[str, int]) -> None:
        self.options, self._sizes = options, sizes
        self._data = _data_axis(options)
        self._without_effect = self._check(options)

    # -- single changes ----------------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """All single changes; some may be impossible."""
        alike = [c for f in FLAGS.values() if not f.numerics for c in self._switches(f)]
        types = [c for f in FLAGS.values() if f.numerics for c in self._switches(f)]
        return [*alike, *types, *self._axes(), *self._microbatches()]

    def _switches(self, flag: Flag) -> Iterator[Change]:
        now = getattr(self.options, flag.name)
        for level, value in enumerate(_values(flag, now), 1):
            yield Change(flag.name, value, level, numerics=flag.numerics)

    def _axes(self) -> Iterator[Change]:
        for axis in ("tp", "cp", "pp", *(("ep",) if EXPERTS in self._sizes else ())):
            old = size_of(self.options, axis)
            for level, factor in enumerate(_MORE, 1):
                yield Change(axis, old * factor, level, factor)
            for level, factor in enumerate(_FEWER if axis == "tp" else (), 1):
                if old % factor == 0:
                    yield Change(axis, old // factor, -level, 1 / factor)

    def _microbatches(self) -> Iterator[Change]:
        count, batch, level = count_of(self.options), self._sizes.get(BATCH) or 1, 1
        while batch % (count * 2**level) == 0:
            yield Change(MICROBATCHES, count * 2**level, level, 2**level)
            level += 1

    # -- jobs --------------------------------------------------------------------------------------

    def job(self, chosen: Collection[Change]) -> JobOptions | None:
        """The job after some changes. None if its ranks or its batch do not divide, if a rule of
        combination refuses it, or if a flag that had an effect has none in it."""
        sizes = {s.knob: s.value for s in chosen if s.knob in AXES}
        given: dict[str, Any] = {s.knob: s.value for s in chosen if s.knob not in AXES}
        if sizes and not self._resize(sizes):
            return None
        if sizes.get("pp") and self.options.microbatches:
            given.setdefault(MICROBATCHES, max(self.options.microbatches, 2 * sizes["pp"]))
        if self.options.mesh is not None and sizes:
            mesh = {**self.options.mesh, **sizes}
            given["mesh"] = {a: mesh[a] for a in sorted(mesh, key=_order)}
        else:
            given |= sizes
        usual = {n for n, value in given.items() if n in FLAGS and FLAGS[n].is_default(value)}
        job = self.options.changed(**given, explicit=self.options.explicit - usual)
        return job if self._allows(job) else None

    def _resize(self, sizes: dict[str, int]) -> bool:
        """Give the data-parallel axis the ranks that others leave; False if they do not divide.

        Flags fold expert parallelism into it, in a mesh its axis is one of its own.
        """
        others = [a for a in sizes if a != "ep" or self.options.mesh is not None]
        ranks = size_of(self.options, self._data) * prod(size_of(self.options, a) for a in others)
        sizes[self._data], rest = divmod(ranks, prod(sizes[a] for a in others))
        return rest == 0

    def _allows(self, job: JobOptions) -> bool:
        try:
            return self._check(job) <= self._without_effect
        except DiagnosticError:
            return False

    def _check(self, job: JobOptions) -> set[Diagnostic]:
        """The flags without effect in a job. Raises `DiagnosticError` if a rule of combination
        refuses it."""
        return set(without_effect(checked(job, self._sizes)))


def _values(flag: Flag, now: Any) -> Sequence[Any]:
    """The values to try in place of the present one, each likely to need less memory than the one
    before."""
    if flag.kind in ("names", "patterns"):
        return _supersets(now, flag.choices)
    if now in flag.tries:
        return flag.tries[flag.tries.index(now) + 1 :]
    return () if flag.numerics else flag.tries[-1:]  # instead of a list of ops: the last value


def _supersets(now: str, choices: Sequence[str]) -> list[str]:
    """The present choice with one more name, and with all names."""
    chosen = {n.strip() for n in now.split(",") if n.strip()}
    more = [{n} for n in choices if n not in chosen]
    more += [set(choices)] if len(more) > 1 else []
    return [",".join(n for n in choices if n in chosen | what) for what in more]


def _data_axis(options: JobOptions) -> str:
    """The data-parallel axis, which gives ranks to the others."""
    if options.mesh is not None:
        return next((a for a in reversed(DATA_AXES) if a in options.mesh), "dp")
    return "dp_shard" if options.dp == 1 and options.dp_shard > 1 else "dp"


def _order(axis: str) -> int:
    return AXES.index(axis) if axis in AXES else len(AXES)


def stretch(options: JobOptions) -> float:
    """The factor by which the bubble of a pipeline makes a step longer, estimated as that of
    1F1B."""
    return 1 + (size_of(options, "pp") - 1) / count_of(options)


def in_order(chosen: Iterable[Change]) -> tuple[Change, ...]:
    """Changes in the order of the flags."""
    return tuple(sorted(chosen, key=lambda s: _ORDER.index(s.knob)))
