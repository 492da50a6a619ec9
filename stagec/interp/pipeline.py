"""Runs the functions of all pipeline stages together: each stage executes its actions in the order
of the schedule, and they exchange messages. A stage waits for what it receives, so a deadlock is
detected.

Messages from one stage to another are matched in order, as communication libraries do: the first
receive that is posted gets the first value that is sent.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from stagec.interp.machine import DisagreementError, Interpreter, Locals, Meet, run_module, together
from stagec.ir.core import Operation, Value
from stagec.ir.expr import evaluate
from stagec.ir.layers import LayerStack, in_order
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.traits import Repeats
from stagec.ir.types import TensorType
from stagec.ir_spec.ops.pipeline import RecvOp, SendOp
from stagec.schedule.action import Action, Placement, steps
from stagec.schedule.attached import actions_of, placement_of, receives_of, regions_of, stages_of
from stagec.sharding.stages import stage_functions

_TOLERANCE = 1e-8
_K = TypeVar("_K")
#: sender and receiver
_Pair = tuple[int, int]


def run_named(
    module: Module, env: Mapping[str, int], inputs: Mapping[str, Array], meet: Meet | None = None
) -> dict[str, Array]:
    """Run a module, and return its results by name, the loss first; `meet` represents the other
    pod. For pipeline stages, the parts of stacked values are concatenated, and the losses of stages
    added. Raises `DisagreementError`."""
    if stage_functions(module):
        return _Job(module, env, meet).run(inputs)
    results = run_module(module, env, inputs, meet)
    arrays: dict[str, Array] = {}
    for value, result in zip(module.main.body.terminator.operands, results, strict=True):
        arrays[value.name if value.name not in arrays else f"{value.name}.{len(arrays)}"] = result
    return arrays


class _Job:
    def __init__(self, module: Module, env: Mapping[str, int], meet: Meet | None) -> None:
        self.meet = meet
        func = module.functions[0]
        placement = placement_of(module, func)
        if placement is None:
            raise ValueError("the functions are not pipeline stages")
        self.placement: Placement = placement
        self.over = func.text("over")
        self.env = {**env, self.over: module.env[self.over]}
        self.sent: dict[_Pair, list[tuple[int, Locals]]] = defaultdict(list)  # with their channels
        self.meetings: dict[tuple[tuple[int, ...], int], dict[int, Locals]] = defaultdict(dict)
        self._depth = {home: n % placement.depth for n, home in enumerate(placement.homes)}
        self.stages = {
            stage: _Stage(self, module, func, stage)
            for func in module.functions
            for stage in stages_of(func)
        }

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for stage in self.stages.values():
            stage.load(inputs)
        tasks = {number: stage.tasks() for number, stage in self.stages.items()}
        while tasks:
            moved = False
            for number, task in list(tasks.items()):
                for ready in task:  # as far as it goes
                    if not ready:
                        break
                    moved = True
                else:
                    del tasks[number]
                    moved = True
            if not moved:
                raise DisagreementError(f"stages {sorted(tasks)} wait for each other")
        return self._results()

    def start(self, base: str, stage: int, chunk: int) -> int:
        """The first layer of a stacked value in a chunk."""
        before = self.placement.homes[: self.depth(stage, chunk)]
        args = (self.stages[rank].parts.get((base, part)) for rank, part in before)
        return sum(evaluate(a.tensor.dims[0].size, self.env) for a in args if a is not None)

    def depth(self, stage: int, chunk: int) -> int:
        """The position of a chunk in the model."""
        return next(d for home, d in self._depth.items() if home == (stage, chunk))

    def _results(self) -> dict[str, Array]:
        stacked: dict[str, dict[int, Array]] = defaultdict(dict)
        whole: dict[str, Array] = {}  # the loss comes first: it is the first scalar
        for number, stage in self.stages.items():
            for name, part, value in stage.results():
                if part is not None:
                    _agree(name, stacked[part[0]], self.depth(number, part[1]), value)
                elif np.ndim(value):
                    _agree(name, whole, name, value)
                else:
                    whole[name] = whole.get(name, 0) + value
        joined = {
            n: np.concatenate([parts[d] for d in sorted(parts)]) for n, parts in stacked.items()
        }
        scalars = {n: v for n, v in whole.items() if not np.ndim(v)}
        return scalars | whole | joined


def _agree(name: str, known: dict[_K, Array], key: _K, value: Array) -> None:
    """Record a value. Raises `DisagreementError` if another stage has other numbers for it."""
    if key in known and not np.allclose(known[key], value, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise DisagreementError(f"stages disagree on %{name}")
    known[key] = value


class _Stage(Interpreter):
    """The ranks of one stage in lockstep."""

    def __init__(self, job: _Job, module: Module, func: Operation, stage: int) -> None:
        super().__init__(module, job.env, {job.over: stage}, job.meet)
        self._job, self._func, self._number = job, func, stage
        self._actions = actions_of(module, func, stage)
        self._receives = receives_of(module, func, stage)
        self._posted: dict[tuple[int, Operation], tuple[_Pair, int]] = {}
        self._running = 0  # microbatch of the action that runs
        self._met: dict[tuple[int, ...], int] = defaultdict(int)
        self.parts = {a.tensor.part: a for a in func.body.args if a.tensor.part is not None}

    def load(self, inputs: Mapping[str, Array]) -> None:
        """Take the stage's part of every input."""
        for arg in self._func.body.args:
            part = arg.tensor.part
            if part is None:
                whole = inputs[arg.name]
            else:
                start = self._job.start(part[0], self._number, part[1])
                count = evaluate(arg.tensor.dims[0].size, self.env)
                whole = inputs[part[0]][start : start + count]
            self._values[arg] = self.scatter(whole, arg.tensor)

    def results(self) -> Iterator[tuple[str, tuple[str, int] | None, Array]]:
        """The results of the stage as whole arrays, each with its name, and its part of a stacked
        value, or None."""
        body = self._func.body
        for value, type_ in zip(body.terminator.operands, body.returns, strict=True):
            part = type_.part if isinstance(type_, TensorType) else None
            yield value.name, part, self.gather(self._values[value], value.tensor, value.name)

    def tasks(self) -> Iterator[bool]:
        """A coroutine that runs the stage: yields true after progress, false while it has to
        wait."""
        for step in in_order(self._func.body):
            if not isinstance(step, LayerStack) and "schedule" in step.attrs:
                yield from self._scheduled(step)
            elif not isinstance(step, LayerStack) and step.flag("stages"):
                yield from self._meet(step)
            else:
                self._run(step)
                yield True

    def first_iteration(self, op: Operation) -> int:
        """Number layers through the whole model, so that their random masks are the same."""
        for value in _with_kept(op.operands):
            if value.tensor.part is not None:
                return self._job.start(value.tensor.part[0], self._number, value.tensor.part[1])
        return 0

    # -- actions -----------------------------------------------------------------------------------

    def _scheduled(self, op: Operation) -> Iterator[bool]:
        regions = {
            (inner.text("kind"), inner.integer("chunk")): inner
            for inner in op.body.ops
            if inner.region is not None
        }
        live: dict[int, dict[Value, Locals]] = defaultdict(dict)
        yielded: dict[Value, dict[int, Locals]] = defaultdict(dict)
        counts, place = Counter[_Pair](), 0
        for step in steps(self._actions):
            for action in self._receives.get(place, ()):
                self._post(regions.get(next(regions_of(action))), action.microbatch, counts)
            place += len(step)
            for action in step:
                for inner in filter(None, map(regions.get, regions_of(action))):
                    while not self._has_mail(inner, action.microbatch):
                        yield False
                    self._running = action.microbatch
                    self._bind(op, action)
                    self._values.update(live[action.microbatch])
                    made = dict(zip(inner.results, self._region(inner.body), strict=True))
                    live[action.microbatch].update(made)
                    for value in op.body.terminator.operands:
                        if value in made:
                            yielded[value][action.microbatch] = made[value]
                    yield True
        for value, result in zip(op.body.terminator.operands, op.results, strict=True):
            parts = yielded[value]
            self._values[result] = together(op, value, [parts[i] for i in sorted(parts)])
        self._microbatch = None

    def _bind(self, op: Operation, action: Action) -> None:
        """Bind the arguments to their parts for the microbatch of an action."""
        count, split = evaluate(op.expr("count"), self.env), op.text("split")
        self._bind_microbatch(
            op, op.body, [self._values[v] for v in op.operands], split, action.microbatch, count
        )

    # -- messages ----------------------------------------------------------------------------------

    def _op(self, op: Operation) -> None:
        if isinstance(op.definition, SendOp):
            pair = self._number, (self._number + op.integer("by")) % self.env[self._job.over]
            self._job.sent[pair].append((op.integer("channel", 0), self._values[op.operands[0]]))
        elif isinstance(op.definition, RecvOp):
            pair, number = self._posted[self._running, op]
            channel, parts = self._job.sent[pair][number]
            if channel != op.integer("channel", 0):
                raise DisagreementError(
                    f"stage {pair[1]} posts its receive {number} from stage {pair[0]} for "
                    f"%{op.result.name}, but another value is sent"
                )
            self._check_shapes(op, op.result, parts)
            self._values[op.result] = parts
        else:
            super()._op(op)

    def _post(self, action: Operation | None, microbatch: int, counts: Counter[_Pair]) -> None:
        """Post the receives of an action."""
        for op in _receives(action):
            pair = (self._number - op.integer("by")) % self.env[self._job.over], self._number
            self._posted[microbatch, op] = pair, counts[pair]
            counts[pair] += 1

    def _has_mail(self, action: Operation, microbatch: int) -> bool:
        tickets = (self._posted[microbatch, op] for op in _receives(action))
        return all(number < len(self._job.sent[pair]) for pair, number in tickets)

    # -- reductions over stages --------------------------------------------------------------------

    def _meet(self, op: Operation) -> Iterator[bool]:
        """A reduction over the stages of a group: waits until all have reached it."""
        last = self.env[self._job.over] - 1
        group = tuple(range(last + 1))
        if op.text("pairs") == "mirrored":
            group = tuple(sorted({self._number, last - self._number}))
        parts = [list(self._values[v]) for v in op.operands]
        for value, mine in zip(op.results, parts, strict=True):
            key = group, self._met[group]
            self._met[group] += 1
            meeting = self._job.meetings[key]
            meeting[self._number] = mine
            while len(meeting) < len(group):
                yield False
            total = meeting[group[0]]
            for other in group[1:]:
                total = _added(total, meeting[other])
            self._values[value] = total
            yield True


def _receives(action: Operation | None) -> list[Operation]:
    ops = action.body.ops if action is not None else ()
    return [op for op in ops if isinstance(op.definition, RecvOp)]


def _added(one: Locals | None, other: Sequence[Array]) -> Locals:
    if one is None:
        return list(other)
    if np.shape(one[0]) != np.shape(other[0]):
        raise DisagreementError("stages sum values of different shapes")
    return [a + b for a, b in zip(one, other, strict=True)]


def _with_kept(values: Iterable[Value]) -> Iterator[Value]:
    """Values, and the parameters from which a repeat before the microbatches has gathered them."""
    for value in values:
        yield value
        op = value.producer
        if op is not None and op.has(Repeats) and not op.integer("carry", 1):
            yield from op.operands
