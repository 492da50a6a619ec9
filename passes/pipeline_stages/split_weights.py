"""Splits backward in two, as zero-bubble schedules need it: the gradients of activations, on which
the previous stage waits, and those of parameters, which can come later.

Each backward repeat becomes two; what the second needs of the first is handed over stacked.
"""

from __future__ import annotations

from stagec.api import Module, Operation, Region, Value, made_by
from stagec.ir.rewrite import carried
from stagec.passes.pipeline_stages.sections import ancestors

PASS = "split-stages"


def split_weights(module: Module, body: Region, critical: set[Operation]) -> None:
    """Split every backward repeat of a region, in place; the `critical` operations wait for what
    they use of it."""
    for op in list(body.ops):
        if op.region is not None and op.phase != "forward" and carried(op):
            _Split(module, op, op.region, critical).run()


class _Split:
    def __init__(
        self, module: Module, op: Operation, region: Region, critical: set[Operation]
    ) -> None:
        self._module, self._op, self._region = module, op, region
        self._carry = carried(op)
        self._end = region.terminator
        stacked = zip(op.results[self._carry :], self._end.operands[self._carry :], strict=True)
        awaited = [y for r, y in stacked if any(user in critical for user, _ in r.uses)]
        first = ancestors((*self._end.operands[: self._carry], *awaited), region)
        self._later = [o for o in region.ops[:-1] if o not in first]
        self._inside: dict[Value, Value] = {}

    def run(self) -> None:
        if not self._later:
            return
        op, registry = self._op, self._module.registry
        count = op.expr("count")
        loc = made_by(PASS, op.loc)
        second = Operation(
            op.definition, (), {**op.attrs, "carry": count - count, "phase": op.phase}, loc=loc
        )
        new = second.make_region()
        yielded = list(self._end.operands)
        moved = [i for i, v in enumerate(yielded) if v.producer in self._later]
        for inner in self._later:
            self._region.ops.remove(inner)
            new.append(inner)
        for inner in list(new.walk()):
            for index, value in enumerate(inner.operands):
                if value.region is self._region:
                    inner.set_operand(index, self._bound(second, value))
        new.append(Operation(registry["stg.yield"], [yielded[i] for i in moved], loc=loc))
        for i in moved:
            old = op.results[i]
            old.replace_with(second.add_result(old.name, old.type, old.loc))
        kept = [i for i in range(len(yielded)) if i not in moved]
        kept += range(len(yielded), len(self._end.operands))  # what is handed over
        self._end.set_operands([self._end.operands[i] for i in kept])
        op.results[:] = [op.results[i] for i in kept]
        for index, result in enumerate(op.results):
            result.index = index
        self._insert(second)

    def _bound(self, second: Operation, value: Value) -> Value:
        """The argument of the second repeat that stands for a value of the first."""
        if value not in self._inside:
            if isinstance(value.owner, Region) and value.index >= self._carry:
                outer = self._op.operands[value.index]
            else:
                self._end.add_operand(value)
                stacked = value.tensor.stacked(self._op.expr("count"))
                outer = self._op.add_result(f"hand_{value.name}", stacked, value.loc)
            second.add_operand(outer)
            self._inside[value] = second.body.add_arg(value.name, value.tensor, value.loc)
        return self._inside[value]

    def _insert(self, second: Operation) -> None:
        """At the end of the region: its users are, too."""
        body = self._op.parent
        if body is None:
            return
        body.insert(self._op.position() + 1, second)
