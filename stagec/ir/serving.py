"""A step of serving, as the definition of an op sees it: what the step holds, and the state that it
keeps from step to step.

`OpDef.serve` rewrites an op for such a step. It asks here for state, an argument of the function
with the role `cache` or `recurrent` that is updated in place. Of a key `%k` in a repeat of L layers

    %keys = step.append(%k)

makes an argument `%k_cache: bf16[L, B, past + S, G, K | cache]`, binds it to the repeat, writes
the S new rows behind those that are cached, hands the result out of the repeat as a stack and
returns it from the function. `%keys` are the rows that queries may see, the new ones last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from stagec.ir.builder import Builder
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import ONE, ZERO, Expr, call, const, evaluate, same
from stagec.ir.opdef import Registry, factor_sizes
from stagec.ir.traits import Repeats
from stagec.ir.types import Dim, TensorType

#: What a step holds of each sequence: its prompt, or a part of it; or the tokens last chosen.
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
MODES = (PREFILL, DECODE, MIXED)
#: The symbol of the tokens of each sequence that are cached before a step.
PAST = "past"


@dataclass(slots=True)
class ServingStep:
    """A step that adds `new` tokens to each sequence, of which `past` are cached before.

    `new` is a size (a symbol) of the module; `past` is 0 where nothing is cached; `env` has the
    values that are known. Rows of caches are of `dtype`, or as they are made; there are whole pages
    of `page` tokens on each of `parts` ranks. `b` inserts before the op that is rewritten.
    `appends` names the op that writes rows behind those of a cache, `casts` the one that changes
    an element type.
    """

    registry: Registry
    body: Region
    env: Mapping[str, int]
    mode: str
    new: Expr
    past: Expr
    b: Builder
    appends: str
    casts: str
    dtype: str = ""
    page: int = 1
    parts: Expr = ONE
    kept: list[tuple[Value, Value]] = field(default_factory=list[tuple[Value, Value]])
    _appended: dict[tuple[Value, int, Expr | None], Value] = field(
        default_factory=dict[tuple[Value, int, "Expr | None"], Value]
    )

    @property
    def seen(self) -> Expr:
        """The tokens of a sequence after the step."""
        return self.past + self.new

    def is_tokens(self, size: Expr) -> bool:
        """Whether a dimension of this size has an element for each new token."""
        return size == self.new

    def is_seen(self, size: Expr) -> bool:
        """Whether it has one for each new token, or for each token that is seen."""
        return self.is_tokens(size) or (self.past != ZERO and same(size, self.seen))

    def mixes(self, op: Operation) -> bool:
        """Whether an op makes something of several tokens of a sequence: by its rule a dimension of
        tokens is not the same in its results."""
        rule = op.definition.rule(op)
        if rule is None:
            return False
        sizes = factor_sizes(op, rule)
        tokens = {f for f, size in sizes.items() if self.is_seen(size)}
        apart = tokens - rule.whole - rule.special - rule.exchanged
        lost = (f for i in range(len(rule.results)) for f in tokens & rule.contracted(i))
        return apart != tokens or any(True for _ in lost)

    def past_attr(self) -> dict[str, Expr]:
        """The parameter `past` of an op that depends on positions; none where nothing is cached."""
        return {} if self.past == ZERO else {"past": self.past}

    # -- state -------------------------------------------------------------------------------------

    def append(self, new: Value, *, dim: int = 1, span: Expr | None = None) -> Value:
        """Cache a value that has the new tokens along a dimension: the rows that the queries of the
        step may see, [.., T, ..] with T = past + S, or min(past + S, span - 1 + S) where a query
        sees only `span` keys up to its own. A value is cached once."""
        if (new, dim, span) not in self._appended:
            self._appended[new, dim, span] = self._append(new, dim, span)
        return self._appended[new, dim, span]

    def _append(self, new: Value, dim: int, span: Expr | None) -> Value:
        rows, new = self._rows(span), self._typed(new)
        dims = list(new.tensor.dims)
        dims[dim] = Dim(rows)
        cache = self.cache(new.name + "_cache", TensorType(new.tensor.dtype, tuple(dims)))
        attrs = {"dim": const(dim), **self.past_attr()}
        if rows != self.new and self.past == ZERO:
            attrs["past"] = ZERO
        if span is not None:
            attrs["span"] = span
        if self.page > 1:
            attrs["page"] = const(self.page)
        updated = self.b.value(self.appends, [cache, new], attrs, hint=f"{new.name}_rows")
        self.keep(cache, updated)
        return updated

    def _typed(self, new: Value) -> Value:
        """What is cached, in the element type of caches."""
        if not self.dtype or new.tensor.dtype == self.dtype:
            return new
        return self.b.value(self.casts, [new], {"to": self.dtype}, hint=new.name)

    def _rows(self, span: Expr | None) -> Expr:
        """The rows of a cache, whole pages on each of the ranks that split it."""
        rows, unit = self.seen, self.parts * self.page
        if span is not None and self.past != ZERO:
            rows = call("min", [rows, span - 1 + self.new])
        known = (rows % unit).symbols <= self.env.keys()
        if unit == ONE or (known and evaluate(rows % unit, self.env) == 0):
            return rows
        return call("ceildiv", [rows, unit]) * unit

    def once(self, value: Value) -> Value:
        """Cache a value that is the same in all steps of a sequence, such as keys of an encoder:
        a prefill of the first tokens computes and keeps it, all others have it as an argument."""
        value = self._typed(value)
        held = cache = self.cache(value.name + "_cache", value.tensor)
        if self.mode != "decode" and self.past == ZERO:
            held = self.b.value(self.appends, [cache, value], hint=f"{value.name}_rows")
        self.keep(cache, held)
        return held

    def carry(self, op: Operation, type_: TensorType) -> list[Value]:
        """The op with its flag `state`: the last operand is a state of this type, the last result
        what becomes of it. Returns the other results."""
        name = op.results[0].name
        cache = self.state(f"{name}_state", type_)
        names = [*(r.name for r in op.results), f"{name}_next"]
        made = self.b.op(op.name, [*op.operands, cache], {**op.attrs, "state": True}, names=names)
        self.keep(cache, made.results[-1])
        return made.results[:-1]

    def state(self, name: str, type_: TensorType) -> Value:
        """State of a size that does not grow with the context, such as that of a scan: as `cache`,
        with the role `recurrent`. It is 0 before the first token."""
        return self.cache(name, type_, "recurrent")

    def cache(self, name: str, type_: TensorType, role: str = "cache") -> Value:
        """Rows of tokens, of this type at the op: an argument of the function, of which repeats
        around the op have a slice for each layer. What it becomes is told by `keep`."""
        repeats = list(_around(self.b.region))
        whole = type_.unplaced()
        for op in repeats:
            whole = whole.stacked(op.expr("count"))
        taken = {a.name for a in self.body.args}
        name = next(n for n in _numbered(name) if n not in taken)
        value = self.body.add_arg(name, replace(whole, role=role), self.b.loc)
        for op in reversed(repeats):
            op.add_operand(value)
            value = op.body.add_arg(f"{name}_i", value.tensor.inner.sliced(), self.b.loc)
        return value

    def keep(self, cache: Value, updated: Value) -> None:
        """What state becomes in the step: its type is that of `cache`. All state is kept once."""
        self.kept.append((cache, updated))

    def hand_out(self) -> list[Value]:
        """Hand what is kept out of repeats: what the function returns, one value for each argument
        with the role `cache`, in their order."""
        self.kept.sort(key=lambda pair: _argument(pair[0]).index)
        return [_handed_out(updated, cache) for cache, updated in self.kept]


def _argument(cache: Value) -> Value:
    """The argument of the function that state is a slice of."""
    while (op := cache.region.owner).has(Repeats):
        cache = op.operands[cache.index]
    return cache


def _around(region: Region) -> Iterable[Operation]:
    """The repeats around a region, the innermost first."""
    op = region.owner
    while op.has(Repeats):
        yield op
        if op.parent is None:
            return
        op = op.parent.owner


def _handed_out(value: Value, cache: Value) -> Value:
    for op in _around(cache.region):
        op.body.terminator.add_operand(value)
        value = op.add_result(value.name, value.tensor.stacked(op.expr("count")))
    return value


def _numbered(name: str) -> Iterable[str]:
    yield name
    number = 2
    while True:
        yield f"{name}{number}"
        number += 1
