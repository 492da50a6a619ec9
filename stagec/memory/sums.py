"""Values that are written into the buffers of others: gradients, updated parameters and state, and
the sums of gradients over microbatches.

    accumulation of 2        the sums are there from its start on
      %g = einsum(...)         written to the sum of the gradient: no buffer of its own
      %r = reduce_scatter(%h)  a collective makes a buffer, which is added to the sum
"""

from stagec.ir.core import Value
from stagec.ir_spec.ops.comm import Collective
from stagec.memory.buffers import Buffer
from stagec.memory.liveness import Roots, Sets, heirs


class MicrobatchSums:
    """The values of a function that are written into the buffers of others.

    `at_once` are sums that exist when their accumulation starts, `late` those that the first
    microbatch allocates. `several` states that the code at hand runs for several microbatches.
    """

    def __init__(self, roots: Roots, sets: Sets) -> None:
        self._roots, self._sets = roots, sets
        self._known: dict[Value, Value | None] = {}
        self.at_once: dict[Value, Buffer] = {}
        self.late: set[Value] = set()
        self.several = False

    def home(self, value: Value) -> Value | None:
        """The value into whose static buffer this one is written, a gradient or the operand of an
        update; None if it has a buffer of its own.

        The result of a collective in one of several microbatches has its own: it is added to the
        sum afterwards.
        """
        path: list[Value] = []
        base: Value | None = None
        while value not in self._known:
            path.append(value)
            base = self._base(value)
            heir = next(heirs(value), None) if not (base or self._is_added(value)) else None
            if heir is None:
                break
            value = heir
        else:
            base = self._known[value]
        self._known.update(dict.fromkeys(path, base))
        return base

    def _base(self, value: Value) -> Value | None:
        """The root of a value if its buffer is static, else None."""
        base = self._roots(value)
        updated = base in self._sets.static and base.producer is not None
        known = base in self.at_once or base in self._sets.gradients or updated
        known = known or (base in self.late and base not in self._sets.freed)
        return base if known else None

    def _is_added(self, value: Value) -> bool:
        op = value.producer
        return self.several and op is not None and isinstance(op.definition, Collective)
