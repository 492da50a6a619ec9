"""The memory plan of a function: the buffers that exist from start to end, and those that its
actions allocate, keep and free."""

from collections.abc import Iterable

from stagec.ir.core import Operation, Value
from stagec.ir.expr import Expr, total
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.queries import TrackedValues
from stagec.ir.types import CACHED, WEIGHTS
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.memory.lifetimes import lifetimes
from stagec.memory.liveness import Roots, classify, device_bytes
from stagec.memory.step import ActionInState, Planner, turns
from stagec.schedule.attached import actions_of, stages_of


class FunctionPlan:
    """The memory plan of a function of a module. It is equal for all sizes with equal lifetimes;
    the decisions on which lifetimes depend are noted in `module.decisions`, if the module records
    them. Raises `DiagnosticError` if the plan has too many steps."""

    def __init__(self, module: Module, func: Operation) -> None:
        self._module, self._func, self._body = module, func, func.body
        self.env, self.roots = planned_env(module), Roots()
        self.sets = classify(self._body, self.roots)
        noted = module.decisions
        seen = self.env if noted is None else TrackedValues(self.env, noted)
        self.planner = Planner(lifetimes(self._body, seen, known=(self.roots, self.sets)))
        self.staged = any(isinstance(op.definition, ActionOp) for op in self._body.walk())

    def parts(self) -> dict[str, Expr]:
        """Bytes on the device that exist from start to end, by category."""
        args = self._body.args
        parts = {
            "parameters": _bytes(v for v in args if v.tensor.role in WEIGHTS),
            "gradients": _bytes(self.sets.gradients),
            "optimizer": _bytes(v for v in args if v.tensor.role == "state"),
        }
        if buckets := [v for v in args if v.tensor.role == "bucket"]:
            parts["buckets"] = _bytes(buckets)
        if caches := [v for v in args if v.tensor.role in CACHED]:
            parts["caches"] = _bytes(caches)
        return parts

    def host(self) -> Expr:
        """Bytes in host memory, without those that microbatches keep there."""
        kept = {*self._body.args, *self.sets.gradients, *self.sets.freed}
        if not self.planner.regions:  # else actions state what they hold
            kept |= self.sets.stash
        return total(v.tensor.bytes_in("host") for v in by_name(kept))

    def works(self) -> list[ActionInState]:
        """The distinct works of all stages that run the function, in the order in which they first
        occur; empty if the function has no actions."""
        works: dict[ActionInState, None] = {}
        for stage in stages_of(self._func) if self.staged else ():
            order = actions_of(self._module, self._func, stage)
            known = self.planner.regions, self.planner.summed
            for turn in turns(order, *known, holds=lambda _: False):
                works.update(dict.fromkeys(w for w in turn.works if w[0]))
        return [*works]


def _bytes(values: Iterable[Value]) -> Expr:
    return total(device_bytes(v) for v in by_name(values))


def by_name(values: Iterable[Value]) -> list[Value]:
    """Values in the order of their names."""
    return sorted(values, key=lambda v: v.name)
