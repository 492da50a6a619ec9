"""A step of serving for the definitions of ops: the number of new tokens, and state between steps.

`OpDef.serve` rewrites an op for such a step. For a key `%k`

%keys = step.append(%k)

are the rows that queries may see, the new ones last. The pass `to-serving` adds the arguments for
such state (`passes/serving/caches.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Value
from stagec.ir.expr import ONE, ZERO, Expr, same
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.types import TensorType

#: The kind of tokens in a step: of prompts or parts of these, tokens chosen last, or both.
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
MODES = (PREFILL, DECODE, MIXED)
#: The symbol of the tokens of each sequence that are cached before a step.
PAST = "past"


@dataclass(slots=True)
class ServingStep:
    """A step that adds `new` tokens to each sequence, of which `past` are cached before.

    `new` is a size (a symbol) of the module; `past` is 0 if nothing is cached. `b` inserts before
    the op that is rewritten.
    """

    mode: str
    new: Expr
    past: Expr
    b: Builder

    @property
    def seen(self) -> Expr:
        """The tokens of a sequence after the step."""
        return self.past + self.new

    @property
    def rows(self) -> Expr:
        """The rows of a cache of all seen tokens."""
        return self.seen

    def is_tokens(self, size: Expr) -> bool:
        """Whether a dimension of this size has one element per new token."""
        return size == self.new

    def is_seen(self, size: Expr) -> bool:
        """Whether a dimension of this size has one element per new token, or per seen token."""
        return self.is_tokens(size) or (self.past != ZERO and same(size, self.seen))

    def mixes(self, op: Operation) -> bool:
        """Whether an op combines several tokens of a sequence: by its rule, a dimension of tokens
        is not preserved in its results."""
        rule = op.definition.rule(op)
        if rule is None:
            return False
        sizes = factor_sizes(op, rule)
        tokens = {f for f, size in sizes.items() if self.is_seen(size)}
        separate = tokens - rule.whole - rule.special - rule.exchanged
        lost = (f for i in range(len(rule.results)) for f in tokens & rule.contracted(i))
        return separate != tokens or any(True for _ in lost)

    def past_attr(self) -> dict[str, Expr]:
        """The parameter `past` of an op that depends on positions; empty if nothing is cached."""
        return {} if self.past == ZERO else {"past": self.past}

    # -- state -------------------------------------------------------------------------------------

    def append(
        self, new: Value, *, dim: int = 1, span: Expr | None = None, rate: Expr = ONE
    ) -> Value:
        """Cache a value with the new tokens along dimension `dim`. Returns the rows that the
        queries of the step may see, [.., T, ..] with T = past + S, or T = min(past + S, span - 1 +
        S) if a query sees only `span` keys up to its own. Rows of `rate` tokens each are written
        from that of the first new token on. A value is cached once."""
        raise NotImplementedError

    def rows_of_latent(self, values: Sequence[Value]) -> list[Value] | None:
        """All rows of values that are computed token by token from values with the flag `cached`;
        None if they are not.

        Raises `DiagnosticError` for values that also depend on values which are not cached.
        """
        raise NotImplementedError

    def once(self, value: Value) -> Value:
        """Cache a value that is equal in all steps of a sequence, such as keys of an encoder: the
        prefill of the first tokens computes it, all other steps have it as an argument."""
        raise NotImplementedError

    def carry(self, op: Operation, type_: TensorType) -> list[Value]:
        """Build the op with its flag `state`: its last operand is a state of this type, and its
        last result the updated state. Returns the other results."""
        raise NotImplementedError
