"""The steps of a function as they run, and the buffers that they allocate."""

from collections.abc import Sequence

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ONE, Expr, expand
from stagec.memory.buffers import Buffer, Lifetimes, Ref, RunOp, Shares, buffers_of
from stagec.support.limits import MAX_PLAN_STEPS, Budget


class Allocations:
    """Steps and buffers of a function, and the buffers of its values at the step at hand."""

    def __init__(self, body: Region) -> None:
        self.lives = Lifetimes()
        self._refs: dict[Value, Ref] = {}
        self._part: Operation | None = None
        self._static: dict[Value, Buffer] = {}
        self._kinds: dict[Value, str] = {}
        self._budget = Budget(
            MAX_PLAN_STEPS,
            "the memory plan",
            "shorten the program, or choose a smaller --fsdp-prefetch or --recompute-every; with "
            "--memory-events every iteration counts",
        )
        for arg in body.args:
            self._refs[arg] = self._fixed(arg)

    def _fixed(self, value: Value) -> Buffer:
        known = self._static
        return known.get(value) or known.setdefault(value, Buffer(value, static=True))

    def _step(self, op: Operation, made: Sequence[Value], *, counts: bool = True) -> int:
        """Append a step that allocates buffers for these values; returns its number."""
        number = len(self.lives.steps)
        self.lives.steps.append(RunOp(op, self._part, [], counts))
        for value in made:
            buffers = [self._make(value, number, number, space=s) for s in value.tensor.memories]
            self._refs[value] = buffers[0] if len(buffers) == 1 else Shares(buffers)
        return number

    def _make(
        self,
        value: Value,
        first: int,
        last: int,
        copies: Expr = ONE,
        *,
        space: str,
        added: bool = False,
    ) -> Buffer:
        """Allocate a buffer in step `first` of the current part."""
        where = False, self._part, first, {self._part: last}
        buffer = Buffer(
            value, copies, *where, {}, set(), space=space, added=added, kinds=self._kinds
        )
        self.lives.steps[first].made.append(buffer)
        self.lives.buffers.append(buffer)
        return buffer

    def _touch(
        self, ref: Ref, number: int, phase: str | None = None, *, alone: bool = False
    ) -> None:
        """Note that step `number` uses a value. With `alone` this holds only if the part runs by
        itself, and not for slices that no other part takes. A step that only passes the value on,
        such as a return, has no phase."""
        buffers = buffers_of(ref)
        self._budget.spend(len(buffers))
        for buffer in buffers:
            if not alone:
                buffer.last[self._part] = number
            elif buffer.last.keys() != {buffer.part}:
                buffer.split[self._part] = number
            if phase is not None:
                buffer.phases.add(phase)

    def _beside(self, refs: Sequence[Ref], start: int, end: int, copies: Expr) -> list[Buffer]:
        """Allocate `copies` more of each buffer of `refs` that was made in or after step
        `start`."""
        new = (b for ref in refs for b in buffers_of(ref) if b.first >= start and copies != 0)
        return [self._more(b, start, end, copies) for b in list(new)]

    def _more(self, buffer: Buffer, first: int, last: int, copies: Expr) -> Buffer:
        """Allocate `copies` more of a buffer."""
        size = expand(copies * buffer.copies)
        return self._make(buffer.value, first, last, size, space=buffer.space, added=buffer.added)
