"""Rank classes of a job of several steps: each runs the steps one after the other, as one program.

Each step is a lowered module. It continues with the caches of the previous step, and with the
tokens that an earlier step has sampled. With pipeline stages, the last stage sends them to the
first one, one message per step, and a step starts before the previous one has finished: it waits
only for the tokens of the step that is `after` steps back.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stagec.ir.core import Operation
from stagec.ir.expr import const
from stagec.ir.queries import Queries, TrackedValues, plain
from stagec.program.classes import RankClass
from stagec.program.columns import Columns
from stagec.program.groups import GroupAxes
from stagec.program.join import SizedStep, StepProgram, joined
from stagec.program.nodes import OUTSIDE, Node, Program
from stagec.program.unroll import unroll_step
from stagec.support.diagnostics import error

#: The name of the tokens that a step samples and a later one takes.
SAMPLED = "sampled"
#: Bytes of a token.
_TOKEN = 4
#: The suffix of the cache of one class of sequences in a mixed step; the classes share one cache.
_CLASS = re.compile(r"_\d+_cache")


@dataclass(frozen=True)
class Sequel:
    """The order of steps. `order` has for each step the index of its distinct step. `after[i]` is
    how many steps before step i its tokens were sampled, 0 if they exist from the start. `sampled`
    is the number of tokens that each distinct step samples on a rank."""

    order: Sequence[int]
    after: Sequence[int]
    sampled: Sequence[int]

    def taken(self) -> Iterator[tuple[int, list[int]]]:
        """Each step, with the steps whose tokens it is the first to wait for."""
        last = 0
        for number, back in enumerate(self.after):
            upto = number - back + 1 if back else last
            yield number, list(range(last, max(last, upto)))
            last = max(last, upto)


@dataclass(frozen=True, eq=False)
class SteppedClass(RankClass):
    """A rank class of a job of several steps. `steps` are the classes of its ranks in the module of
    each distinct step; the other fields are those of the first one. `sequel` is the order of the
    steps. `stages` are the stage that samples, the one that takes tokens, and the number of
    stages."""

    steps: Sequence[RankClass]
    sequel: Sequel
    stages: tuple[int, int, int]

    @cached_property
    def groups(self) -> list[GroupAxes]:
        """The groups of the collectives of all steps."""
        return list(dict.fromkeys(g for step in self.steps for g in step.groups))

    def program(self) -> Program:
        """The program of each of its ranks. Raises `DiagnosticError` for too many nodes."""
        units = list(_sized_steps(self.steps))
        sampler, taker, count = self.stages
        if sampler == taker:
            return joined(self.name, units, [(n, i) for i, n in enumerate(self.sequel.order)])
        mine = self.stage
        axis = self.graph.text("over")
        by = (taker - sampler) % count
        sizes = list(dict.fromkeys(_TOKEN * n for n in self.sequel.sampled))
        first = {kind: len(units) + i * len(sizes) for i, kind in enumerate(("send", "recv"))}
        for kind in first:
            ends = (_message(kind, axis, by, size, self._channel) for size in sizes)
            units += map(SizedStep, ends)
        order: list[tuple[int, int]] = []
        places = {number: sizes.index(_TOKEN * n) for number, n in enumerate(self.sequel.sampled)}
        kinds = self.sequel.order
        wanted = {n for _, steps in self.sequel.taken() for n in steps if self._samples(n)}
        for number, steps in self.sequel.taken():
            if mine == taker:
                order += [(first["recv"] + places[kinds[n]], n) for n in steps if n in wanted]
            order.append((kinds[number], number))
            if mine == sampler and number in wanted:
                order.append((first["send"] + places[kinds[number]], number))
        return joined(self.name, units, order)

    def _samples(self, number: int) -> bool:
        return self.sequel.sampled[self.sequel.order[number]] > 0

    @property
    def _channel(self) -> int:
        """A channel that no stream of messages in the steps uses."""
        used = (channel[2] for step in self.steps for channel in step.channels)
        return 1 + max(used, default=0)


def _sized_steps(steps: Sequence[RankClass]) -> Iterator[SizedStep]:
    """The programs of steps. Steps with the same nodes, which differ only in sizes, are unrolled
    once. If sizes differ by layer, every step is unrolled."""
    forms: dict[tuple[Operation, tuple[int, ...]], list[tuple[Queries, StepProgram]]] = {}
    for step in steps:
        values = plain(step.env)
        known = forms.setdefault((step.graph, tuple(step.coords.values())), [])
        form = next((f for decisions, f in known if decisions.same(values)), None)
        if form is not None and not step.loads:
            yield SizedStep(form, values)
            continue
        decisions = Queries()
        form = step_program(replace(step, env=TrackedValues(values, decisions)))
        known.append((decisions, form))
        yield SizedStep(form)


def step_program(step: RankClass) -> StepProgram:
    """The program of one step. Raises `DiagnosticError` as `unroll` does."""
    graph = step.graph
    args, ends = graph.body.args, graph.body.terminator.operands
    caches = [args[i].name for i in graph.integers("caches")]
    pools = [_CLASS.sub("_cache", name) for name in caches]
    takes = {args[i].name: SAMPLED for i in graph.integers("inputs")}
    takes |= zip(caches, pools, strict=True)
    leaves = [SAMPLED] * (len(ends) - len(pools)) + pools
    return unroll_step(graph, step.name, *step.given(), takes, leaves)


def _message(kind: str, axis: str, by: int, size: int, number: int) -> StepProgram:
    """A step that consists of one message with sampled tokens."""
    columns, channel = Columns(), (axis, const(by), number)
    name = f"forward/{SAMPLED}.{kind}" if kind == "send" else f"forward/{SAMPLED}"
    message = Node(kind, name, "forward", size, scope="forward/", over=axis, by=by)
    outside = Node(OUTSIDE, SAMPLED, "", 0)
    order = [outside, message] if kind == "send" else [message, outside]
    order[1].deps = (order[0],)
    for node in order:
        columns.add_node(node)
    program = columns.program(name, order, [])
    heads, tails = ([SAMPLED_0], []) if kind == "send" else ([], [SAMPLED_0])
    return StepProgram(program, heads, tails, {channel: 0})


#: The name of the placeholder for the sampled tokens, which are a single node.
SAMPLED_0 = f"{SAMPLED}/0"


def stepped_classes(modules: Sequence[Sequence[RankClass]], sequel: Sequel) -> list[SteppedClass]:
    """The classes of a job of several steps; `modules` are the rank classes of each distinct step.
    Raises `DiagnosticError` if no stage takes tokens."""
    groups = [(dict(c.coords), [c]) for c in modules[0]]
    for classes in modules[1:]:
        groups = [
            ({**coords, **c.coords}, [*steps, c])
            for coords, steps in groups
            for c in classes
            if all(c.coords.get(a, i) == i for a, i in coords.items())
        ]
    stages = _stages(c for classes in modules for c in classes)
    return [_stepped(coords, steps, sequel, stages) for coords, steps in groups]


def _stepped(
    coords: Mapping[str, int],
    steps: Sequence[RankClass],
    sequel: Sequel,
    stages: tuple[int, int, int],
) -> SteppedClass:
    c = steps[0]
    own = c.module, c.graph, coords, c.env, c.inner, c.channels, c.loads, c.templates
    return SteppedClass(*own, steps, sequel, stages)


def _stages(classes: Iterable[RankClass]) -> tuple[int, int, int]:
    """The stage that samples, the one that takes tokens, and the number of stages."""
    sampler = taker = None
    count = 1
    for each in classes:
        sampler = each.stage if _samples(each) else sampler
        taker = each.stage if "inputs" in each.graph.attrs else taker
        count = each.env.get(each.graph.text("over"), 1)
    if taker is None:
        raise error("no pipeline stage has tokens as an argument", remedy="serve a language model")
    return taker if sampler is None else sampler, taker, count


def _samples(step: RankClass) -> bool:
    graph = step.graph
    return len(graph.body.terminator.operands) > len(graph.integers("caches"))
