"""The space of a search: values of knobs, the default space of a model, and the jobs of its
points."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, TypeVar, cast

from stagec.ir.module import BATCH
from stagec.ir_spec.strategy.axes import AXES, DATA_AXES, EXPERTS, expert_parts, whole_experts
from stagec.ir_spec.strategy.mesh_flags import MESH_ORDER, OF_MESH
from stagec.ir_spec.strategy.statement import Flag
from stagec.jobs.legal import count_of, needless, rules
from stagec.jobs.request.combine import complete, in_usual_order
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.flags import FLAGS, OF_ONE_MESH, type_of
from stagec.jobs.request.option import CommandOption, Kind
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.ranges import RULE, doubled_texts, is_range
from stagec.machines import Machine
from stagec.searches.explore.memo import MemoByReads, NotedValues, Reads
from stagec.searches.explore.space import Point, Space, doubled
from stagec.searches.points import Jobs
from stagec.support.diagnostics import Diagnostic, DiagnosticError

R = TypeVar("R")
#: The beginning of the reason for a point that does not compile.
REFUSED = "refused by the compiler: "
#: A knob that is not a flag: the sequences of a microbatch on a rank. It determines
#: `--microbatches`.
MICROBATCH = "microbatch_size"
MICROBATCH_FLAG = Flag(MICROBATCH, "Sequences of a microbatch on a rank.", "int", 0, least=1)
RANKS = Flag("ranks", "All ranks.", "int", 0, least=1)
BATCHES = Flag("batch", "The global batch in sequences.", "int", 0, least=1)
KNOBS: Mapping[str, Flag] = {**OF_ONE_MESH, MICROBATCH: MICROBATCH_FLAG}
#: The kinds of flags whose values contain commas: alternatives are separated by bars.
_WITH_COMMAS = ("names", "patterns", "order", "layers", "loads")
_MOST_VALUES = 1000


# -- values ----------------------------------------------------------------------------------------


class Values(Kind[tuple[Any, ...]]):
    """`1,2,4`, or `1..8`: doubled from 1 up to 8."""

    name = "VALUES"

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def read(self, text: str) -> tuple[Any, ...]:
        """The values, each of the type of the flag."""
        parts = text.split("|" if self._flag.kind in _WITH_COMMAS else ",")
        values: list[Any] = []
        for part in (p.strip() for p in parts):
            if self._flag.kind == "int" and is_range(part):
                values += self._range(part)
            elif not part and self._flag.kind not in _WITH_COMMAS:
                raise ValueError(
                    f"'{text}' has an empty value, expected values such as 1,2,4 or 1..8"
                )
            else:
                values.append(type_of(self._flag).read(part))
        if len(values) > _MOST_VALUES:
            raise ValueError(f"expects at most {_MOST_VALUES} values, found {len(values)}")
        return tuple(dict.fromkeys(values))

    def text(self, value: Sequence[Any]) -> str:
        return ("|" if self._flag.kind in _WITH_COMMAS else ",").join(map(_text, value))

    def _range(self, part: str) -> Iterator[int]:
        if not (texts := doubled_texts(part)):
            raise ValueError(f"'{part}' has no values: {RULE}")
        return (type_of(self._flag).read(text) for text in texts)


def knob_option(flag: Flag) -> CommandOption:
    """The option of a search for the values of a flag."""
    switch = flag.kind == "switch"
    metavar, alone = ("on,off", "on") if switch else ("VALUES", "")
    return CommandOption(flag.name, Values(flag), "", metavar=metavar, alone=alone, rare=flag.rare)


def values_text(name: str, values: Sequence[Any]) -> str:
    """`1,2,4`: values in the form of the option."""
    between = "|" if KNOBS[name].kind in _WITH_COMMAS else ","
    return between.join(_text(v) for v in values)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, cast("tuple[object, ...]", value)))
    return str(value)


# -- default space ---------------------------------------------------------------------------------

#: The length of sequences from which more context parallelism is tried.
_LONG = 32_768


def default_space(sizes: Mapping[str, int], layers: int, ranks: int, machine: Machine) -> Space:
    """The degrees and flags that practitioners vary for a model that is dense, has experts, or has
    a long context; `layers` is the number of layers that a pipeline may divide."""
    node = machine.network[0].ranks or ranks
    knobs: dict[str, tuple[Any, ...]] = {
        "pp": doubled(1, min(64 if ranks >= 2048 else 16, ranks, layers)),
        "tp": doubled(1, min(8, node, ranks)),
        "cp": doubled(1, min(16 if sizes.get("S", 0) >= _LONG else 2, ranks)),
        "sp": (True,),
        "zero": (0, 1, 2, 3),
        "schedule": ("1f1b", "interleaved"),
        "chunks": (0, 4, 8),
        MICROBATCH: (1, 2, 4, 8),
        "recompute": ("none", "selective", "full"),
        "cp_mode": ("ring", "ulysses"),
    }
    if experts := sizes.get(EXPERTS):
        knobs["ep"] = doubled(1, min(experts, 64, ranks))
        knobs["etp"] = (0, 1)
    return Space(knobs)


# -- points ----------------------------------------------------------------------------------------

#: The knobs that determine the mesh.
_MESH = frozenset((*AXES, "etp", *OF_MESH))


#: Points by the values of their first knobs.
_Groups = Sequence[tuple[Point, Sequence[Point]]]
#: Rules, and for flags the function that says whether they have no effect, each with the node of
#: its memo that shared values lead to.
_Checks = tuple[
    Sequence[tuple[MemoByReads[Diagnostic | None], Reads["Diagnostic | None"]]],
    Sequence[tuple[Flag, MemoByReads[bool], Reads[bool]]],
]


@dataclass(slots=True)
class JobList:
    """The jobs of a space of `points` points. `refused` counts the points that rules refuse, by
    message; `same` counts the points that are the same job as an earlier one."""

    points: int
    jobs: Jobs
    refused: Counter[str]
    same: int = 0


def list_jobs(
    space: Space, base: JobOptions, sizes: Mapping[str, int], layers: int | None = None
) -> JobList:
    """All legal jobs of a space. `base` has the model, its sizes and the ranks; `sizes` are the
    sizes of all symbols, `layers` is the number of layers that a pipeline may divide. Points that a
    rule of combination refuses are left out. Flags without effect get their defaults, so that no
    job is listed twice."""
    return _Listing(space, base, sizes, layers).job_list()


class _Listing:
    def __init__(
        self, space: Space, base: JobOptions, sizes: Mapping[str, int], layers: int | None
    ) -> None:
        # flags of the stack, which hold where the rules allow them
        self._defaults = [n for n in FLAGS if n in base.explicit - space.knobs.keys()]
        names = {*space.knobs, *AXES, "microbatches", *self._defaults} - {MICROBATCH}
        self._names = [n for n in FLAGS if n in names]
        self._row = itemgetter(*self._names)
        self._space, self._base, self._sizes = space, base, sizes
        every = [_parts_of_experts, *rules(sizes, layers or None)]
        asked = (MemoByReads(_on_options(rule)) for rule in every)
        needless = [
            (flag, MemoByReads(_on_options(partial(_is_needless, flag, sizes))))
            for flag in FLAGS.values()
            if flag.needs and flag.name in names
        ]
        self._ranks = MemoByReads(_on_options(data_ranks))
        self._order = MemoByReads(_on_options(_order_of))
        self._job_list = JobList(space.count, Jobs(base, self._names), Counter())
        self._varying = {*space.knobs} - _MESH | {"microbatches", *self._defaults}
        self._whole: _Checks = (
            [(rule, rule.first) for rule in asked],
            [(flag, idle, idle.first) for flag, idle in needless],
        )
        self._seen: set[tuple[Any, ...]] = set()
        self._insides: dict[frozenset[str], tuple[_Groups, int]] = {}

    def job_list(self) -> JobList:
        knobs = self._space.knobs
        outer, inner = self._space.part(_MESH), self._space.part(frozenset(knobs) - _MESH)
        for axes in outer:
            if not _sized(self._base, axes):
                self._refuse("the ranks do not divide over the axes", inner.count)
                continue
            try:
                meshed = vars(complete(self._base.changed(**axes)))
            except DiagnosticError as problem:
                self._refuse(problem.diagnostics[0].message, inner.count)
                continue
            lacking = {axis for axis in AXES if meshed[axis] == 1}
            idle = (n for n in inner.knobs if n in FLAGS and _needs_one(FLAGS[n], lacking))
            groups, times = self._inside(frozenset(idle))
            common = {n: v for n, v in meshed.items() if n not in self._varying}
            of_mesh = self._checks(common, self._whole)
            for values, points in groups:
                checks = self._checks({**common, **values}, of_mesh)
                values_of = {**meshed, **values}  # one object for all points, which are many
                for rest in points:
                    values_of.update(rest)
                    self._take(values_of, times, checks)
        return self._job_list

    def _checks(self, shared: Mapping[str, Any], known: _Checks) -> _Checks:
        """The rules and flags of `known` to check for points that share these values: without the
        rules that accept all of them and the flags that have an effect in all."""
        rules = ((rule, rule.reads_of(shared, node)) for rule, node in known[0])
        needless = ((flag, idle, idle.reads_of(shared, node)) for flag, idle, node in known[1])
        return (
            [(rule, node) for rule, node in rules if node.answer != [None]],
            [(flag, idle, node) for flag, idle, node in needless if node.answer != [False]],
        )

    def _inside(self, idle: frozenset[str]) -> tuple[_Groups, int]:
        """The points for a mesh on which the knobs `idle` have no effect, by their values of the
        first knobs, and the number of points of the space that each stands for."""
        inside = self._insides.get(idle)
        if inside is None:
            knobs = self._space.knobs
            live = [n for n in knobs if n not in _MESH | idle]
            place = live.index(MICROBATCH) if MICROBATCH in live else len(live) // 2
            outer, inner = map(self._space.part, map(frozenset, (live[:place], live[place:])))
            default, points = {n: FLAGS[n].default for n in idle}, list(inner)
            groups = [({**default, **values}, points) for values in outer]
            inside = self._insides[idle] = groups, prod(len(knobs[n]) for n in idle)
        return inside

    def _take(self, values: dict[str, Any], times: int, checks: _Checks) -> None:
        """Add a point that stands for `times` points of the space."""
        size = values.get(MICROBATCH, 0)
        if size:
            count, rest = divmod(self._sizes.get(BATCH, 0), self._ranks(values) * size)
            if rest or not count:
                self._refuse("the batch does not divide over microbatches of this size", times)
                return
            values["microbatches"] = count
        values = {**values} if self._defaults else values
        for _ in range(3):  # a flag without effect may leave another one without effect
            rules, needless = checks
            for rule, node in rules:
                if (problem := rule(values, node)) is not None and not self._without(rule, values):
                    self._refuse(problem.message, times)
                    return
            idle = [flag for flag, is_idle, node in needless if is_idle(values, node)]
            if not idle:
                break
            values = values | {flag.name: flag.default for flag in idle}
            checks = self._whole
        if values[MESH_ORDER.name]:
            values = values | {MESH_ORDER.name: self._order(values)}
        row = self._row(values)
        self._job_list.same += times - (row not in self._seen)
        if row in self._seen:
            return
        self._seen.add(row)
        self._job_list.jobs.rows.append(row)

    def _without(self, rule: MemoByReads[Diagnostic | None], values: dict[str, Any]) -> bool:
        """Drop the flags of a stack that a rule refuses together with others, as `apply_stack` does
        for statements. Returns whether the rule then accepts the values."""
        left_out: dict[str, Any] = {}
        problem = rule(values)
        for name in self._defaults:
            trial = {**left_out, name: FLAGS[name].default}
            other = rule({**values, **trial})
            if other is None:
                values |= trial
                return True
            if problem is None or other.message != problem.message:
                left_out, problem = trial, other
        return False

    def _refuse(self, message: str, times: int) -> None:
        self._job_list.refused[message] += times


def _parts_of_experts(options: JobOptions) -> Diagnostic | None:
    """A rule that refuses experts over some ranks of tensor parallelism, whose cost is that over
    all of them."""
    some = expert_parts(partial(getattr, options)) > 1
    return Diagnostic("experts over some ranks of --tp are not searched") if some else None


def _on_options(function: Callable[[JobOptions], R]) -> Callable[[NotedValues], R]:
    """A function of options as a function of `NotedValues`, which have the same attributes."""
    return lambda values: function(cast("JobOptions", values))


def without_axes(knobs: Mapping[str, tuple[Any, ...]]) -> set[str]:
    """The knobs without effect, since an axis that they need has one rank in all points."""
    ones = {a for a in AXES if knobs.get(a, (1,)) == (1,) and a not in DATA_AXES}
    return {n for n in knobs if n in FLAGS and _needs_one(FLAGS[n], ones)}


def _needs_one(flag: Flag, axes: AbstractSet[str]) -> bool:
    """Whether a flag has no effect without one of these axes."""
    return any(({need} if isinstance(need, str) else {*need}) <= axes for need in flag.needs)


def _order_of(options: JobOptions) -> str:
    """The axes of the mesh of a job in their order; empty for the usual order."""
    axes = mesh_axes(options)
    return "" if in_usual_order(axes) else ",".join(axes)


def _is_needless(flag: Flag, sizes: Mapping[str, int], options: JobOptions) -> bool:
    """Whether a flag has no effect, or experts are whole without it."""
    if flag.name == "etp" and options.etp:
        left_out = whole_experts(lambda name: 0 if name == flag.name else getattr(options, name))
        return left_out or needless(flag, options, sizes)
    return needless(flag, options, sizes)


def _sized(base: JobOptions, axes: Point) -> bool:
    """Whether the ranks are a multiple of the product of the axes."""
    ranks = 1
    for axis in (a for a in AXES if a != "ep"):
        ranks *= int(axes.get(axis, getattr(base, axis)))
    return base.ranks is None or base.ranks % ranks == 0


def data_ranks(options: JobOptions) -> int:
    """The number of ranks over which the batch is split."""
    ranks = 1
    for axis in DATA_AXES:
        ranks *= int(getattr(options, axis))
    return ranks


def microbatch_of(options: JobOptions, sizes: Mapping[str, int]) -> int:
    """The sequences of a microbatch on a rank; 0 if the batch is not known."""
    return sizes.get(BATCH, 0) // (data_ranks(options) * count_of(options))


def base_options(options: JobOptions, sizes: Mapping[str, int]) -> JobOptions:
    """A job whose batch is set in its sizes."""
    return options.changed(sizes={**options.sizes, BATCH: sizes[BATCH]})
