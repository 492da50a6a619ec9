"""plan-memory: lifetimes of buffers made explicit, and the bytes of each category on one rank.

Gradient buffers are held through the whole step, as frameworks with persistent gradient buffers do,
or where the strategy frees them, from backward on.
The peak is the static state and the worst moment of everything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stagec.api import (
    Builder,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Value,
    made_by,
    total,
)
from stagec.ir.builder import RawAttr
from stagec.ir.loads import planned_env
from stagec.ir.queries import TrackedValues
from stagec.ir.traits import Repeats
from stagec.ir.types import CACHED, WEIGHTS
from stagec.ir_spec.ops.pipeline import ACTIONS, ActionOp
from stagec.memory.buffers import STASH, Buffer
from stagec.memory.lifetimes import lifetimes
from stagec.memory.liveness import Roots, classify, device_bytes, last_users, value_bytes
from stagec.memory.step import (
    ActionInState,
    Planner,
    after_work,
    first_run,
    first_runs,
    is_first_run,
    turns,
)
from stagec.memory.worst import on_device, total_of, worst_of
from stagec.schedule.attached import actions_of, stages_of

PASS = "plan-memory"


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Insert `stg.free` where buffers die, and a `stg.memory` that states the bytes of each
    category.

    Before:
        stg.func @f(%x: bf16[B, F | rep]) {
          %a = stg.gelu(%x) : bf16[B, F | rep]
          %b = stg.gelu(%a) : bf16[B, F | rep]
          %c = stg.gelu(%b) : bf16[B, F | rep]
          stg.return(%c)
        }
    After:
        stg.func @f (%x: bf16[B, F | rep]) {
          %a = stg.gelu(%x) : bf16[B, F | rep]
          %b = stg.gelu(%a) : bf16[B, F | rep]
          stg.free(%a)
          %c = stg.gelu(%b) : bf16[B, F | rep]
          stg.free(%b)
          stg.return(%c)
        }
        stg.memory[parameters = 0, gradients = 0, optimizer = 0, stash = 0,
            transient = 4*B*F, peak = 4*B*F]
    """

    name = PASS
    needs = Phase.PARTITIONED
    gives = Phase.PLANNED

    def run(self, module: Module) -> None:
        plan_memory(module)


def plan_memory(module: Module) -> None:
    """Insert `stg.free` after each buffer's last user and a `stg.memory` with the bytes on one
    rank."""
    for func in module.functions:
        _Plan(module, func).state()


def _is_transient(buffer: Buffer) -> bool:
    return on_device(buffer) and buffer.category != STASH


def _on_host(buffer: Buffer) -> bool:
    return not on_device(buffer)


class _Plan:
    """The plan of one function."""

    def __init__(self, module: Module, func: Operation) -> None:
        self._module, self._func, self._body = module, func, func.body
        self._env, self._roots = planned_env(module), Roots()
        self._sets = classify(self._body, self._roots)
        # What lifetimes depend on is noted: of sizes that answer alike, the plan is kept.
        noted = module.decisions
        seen = self._env if noted is None else TrackedValues(self._env, noted)
        self._planner = Planner(lifetimes(self._body, seen, known=(self._roots, self._sets)))
        module.notes[self._body] = self._planner
        counts = (op.expr("count") for op in self._body.walk() if op.has(Repeats))
        axes = module.mesh.axes if module.mesh else ()
        self._long = frozenset(n for c in counts for n in c.symbols) - frozenset(axes)

    def state(self) -> None:
        """Put what is planned into the module."""
        b = Builder(
            self._module.registry, self._module.root.body, loc=made_by(PASS, self._func.loc)
        )
        attrs = self._whole()
        staged = any(isinstance(op.definition, ActionOp) for op in self._body.walk())
        if staged:
            stages = self._func.attrs["stages"]
            attrs |= {"stages": stages, "around": total_of(self._planner.around())}
        keep = self._sets.gradients | self._sets.freed | self._sets.static
        _insert_frees(self._module, self._body, keep, self._roots)
        b.op("stg.memory", (), attrs, types=())
        for work in self._works() if staged else ():
            b.op("stg.working", (), self._of_work(work), types=())

    def _whole(self) -> dict[str, RawAttr]:
        """What the plan states of the function. If the function has actions, this is about the
        step around them."""
        args, outside = self._body.args, self._planner.run(None)
        parts = {
            "parameters": _bytes(v for v in args if v.tensor.role in WEIGHTS),
            "gradients": _bytes(self._sets.gradients),
            "optimizer": _bytes(v for v in args if v.tensor.role == "state"),
        }
        if buckets := [v for v in args if v.tensor.role == "bucket"]:
            parts["buckets"] = _bytes(buckets)
        caches = [v for v in args if v.tensor.role in CACHED]
        if caches:
            parts["caches"] = _bytes(caches)
        runs = [*self._planner.alone(), outside]
        plan: dict[str, RawAttr] = {
            **parts,
            "stash": total(value_bytes(v) for v in _sorted(self._sets.stash)),
            "transient": worst_of(runs, self._env, self._long, _is_transient),
            "peak": total(parts.values()) + worst_of([outside], self._env, self._long),
        }
        kept = {*args, *self._sets.gradients, *self._sets.freed}
        kept |= self._sets.stash if len(runs) == 1 else set()  # the rest actions state
        host = total(v.tensor.bytes_in("host") for v in _sorted(kept))
        return plan | ({"host": host} if host != 0 else {})

    def _works(self) -> list[ActionInState]:
        """All works of the stages that run the function, in the order in which they first occur."""
        works: dict[ActionInState, None] = {}
        for stage in stages_of(self._func):
            order = actions_of(self._module, self._func, stage)
            known = self._planner.regions, self._planner.summed
            for turn in turns(order, *known, holds=lambda _: False):
                works.update(dict.fromkeys(w for w in turn.works if w[0]))
        return list(works)

    def _of_work(self, work: ActionInState) -> dict[str, RawAttr]:
        """What the plan states of some actions that run one after the other."""
        runs, before = work
        regions = [r for r in runs if not is_first_run(r)]
        firsts = tuple(kind for kind, c in regions if first_run((kind, c)) in runs)
        peak = worst_of([self._planner.run(work)], self._env, self._long)
        now, then = self._planner.kept(before), self._planner.kept(after_work(work))
        sums = tuple(total_of(self._planner.kept(s)) for s in first_runs(work))
        left, host = (
            total_of(then - now, w) - total_of(now - then, w) for w in (on_device, _on_host)
        )
        done = {kind: tuple(sorted(c for k, c in before if k == kind)) for kind in ACTIONS}
        return {
            "runs": tuple(kind for kind, _ in regions),
            "chunk": runs[0][1],
            **({"first": firsts, "sums": sums} if sums else {}),
            **{kind: chunks for kind, chunks in done.items() if chunks},
            "peak": peak,
            "left": left,
            **({"host": host} if host != 0 else {}),
            "stages": self._func.attrs["stages"],
        }


def _bytes(values: Iterable[Value]) -> Expr:
    return total(device_bytes(v) for v in _sorted(values))


def _sorted(values: Iterable[Value]) -> list[Value]:
    return sorted(values, key=lambda v: v.name)


def _insert_frees(module: Module, body: Region, keep: set[Value], roots: Roots) -> None:
    """One `stg.free` after each op, naming the buffers that die there."""
    users = last_users(body, roots)
    carried = {a for region in users for a in region.args if _is_carried(region.owner, a)}
    keep |= {a for region in users for a in region.args} - carried
    dying: dict[Operation, list[Value]] = {}
    for region, last in users.items():
        for value, user in last.items():
            if value not in keep and user is not region.terminator and roots(value) is value:
                dying.setdefault(user, []).append(value)
    for op, values in dying.items():
        Builder.after(module.registry, op).op("stg.free", values, types=())


def _is_carried(op: Operation, arg: Value) -> bool:
    return op.has(Repeats) and arg.index < op.integer("carry", 1)
