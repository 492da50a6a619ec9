"""The state of a step of serving: arguments of the function with the role `cache` or `recurrent`,
updated in place. For a key `%k` in a repeat of L layers

    %keys = step.append(%k)

adds an argument `%k_cache: bf16[L, B, past + S, G, K | cache]`, binds it to the repeat, writes the
S new rows after the cached ones, returns the result from the repeat as a stack and from the
function. `%keys` are the rows that queries may see, the new ones last.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

from stagec.api import Dim, Expr, Operation, Region, TensorType, Value, call, const, evaluate
from stagec.ir.expr import ONE, ZERO
from stagec.ir.rewrite import stacked
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.masks import whole_rows
from stagec.passes.serving.latent import rows_of_latent


@dataclass(slots=True)
class CachingStep(ServingStep):
    """A step of a function with this `body`. `env` has the known values of symbols. Rows of caches
    have the element type `dtype`, or that of the cached value if it is empty. Each of `parts` ranks
    has whole pages of `page` tokens. `over` is the number of ranks that split the tokens."""

    body: Region
    env: Mapping[str, int]
    dtype: str = ""
    page: int = 1
    parts: Expr = ONE
    over: Expr = ONE
    sequences: Expr | None = None  # of a class of a mixed step, and what names of it end with
    ending: str = ""
    kept: list[tuple[Value, Value]] = field(default_factory=list[tuple[Value, Value]])
    _appended: dict[tuple[Value, int, Expr | None], Value] = field(
        default_factory=dict[tuple[Value, int, "Expr | None"], Value]
    )

    @property
    def rows(self) -> Expr:
        return self._rows(None)

    def append(
        self, new: Value, *, dim: int = 1, span: Expr | None = None, rate: Expr = ONE
    ) -> Value:
        if (new, dim, span) not in self._appended:
            self._appended[new, dim, span] = self._append(new, dim, span, rate)
        return self._appended[new, dim, span]

    def _append(self, new: Value, dim: int, span: Expr | None, rate: Expr) -> Value:
        if rate != ONE and self.over != ONE:
            raise new.error(
                f"%{new.name} has rows of several tokens, which are not cached in parts of a "
                f"sequence: the strategy splits its tokens over {self.over} ranks",
                remedy="leave out --cp and --dcp: --tp and --dp split the work of a step too",
            )
        new, past = self._typed(new), whole_rows(self.past, rate)
        added = new.tensor.shape[dim]
        rows = self._rows(span) if rate == ONE else self._whole_pages(past + added, rate)
        whole = new.tensor.with_dim(dim, Dim(rows))
        cache = self.cache(new.name + "_cache", TensorType(new.tensor.dtype, whole.dims))
        attrs = {"dim": const(dim)}
        if past != ZERO or rows != added:
            attrs["past"] = past
        if span is not None:
            attrs["span"] = span
        if rate != ONE:
            attrs["rate"] = rate
        if self.page > 1:
            attrs["page"] = const(self.page)
        updated = self.b.value("stg.append", [cache, new], attrs, hint=f"{new.name}_rows")
        self.keep(cache, updated)
        return updated

    def _typed(self, new: Value) -> Value:
        """A value cast to the element type of caches."""
        if not self.dtype or new.tensor.dtype == self.dtype:
            return new
        return self.b.value("stg.cast", [new], {"to": self.dtype}, hint=new.name)

    def _rows(self, span: Expr | None) -> Expr:
        """The number of rows of a cache: whole pages on each of the ranks that split it."""
        rows = self.seen
        if span is not None and self.past != ZERO:
            rows = call("min", [rows, span - 1 + self.new])
        return self._whole_pages(rows)

    def _whole_pages(self, rows: Expr, rate: Expr = ONE) -> Expr:
        """A number of rows of `rate` tokens each, rounded up to whole pages of tokens."""
        if rate != ONE:
            whole = self._whole_pages(rows * rate)
            return rows if whole == rows * rate else call("ceildiv", [whole, rate])
        unit = self.parts * self.page
        known = (rows % unit).symbols <= self.env.keys()
        if unit == ONE or (known and evaluate(rows % unit, self.env) == 0):
            return rows
        return call("ceildiv", [rows, unit]) * unit

    def rows_of_latent(self, values: Sequence[Value]) -> list[Value] | None:
        return rows_of_latent(self, values)

    def once(self, value: Value) -> Value:
        value = self._typed(value)
        type_ = value.tensor
        if self.sequences is not None:
            type_ = replace(type_, dims=(Dim(self.sequences), *type_.dims[1:]))
        row = cache = self.cache(f"{value.name}{self.ending}_cache", type_)
        if self.mode != "decode" and self.past == ZERO:
            row = self.b.value("stg.append", [cache, value], hint=f"{value.name}_rows")
        self.keep(cache, row)
        return row

    def carry(self, op: Operation, type_: TensorType) -> list[Value]:
        name = op.results[0].name
        cache = self.state(f"{name}_state", type_)
        names = [*(r.name for r in op.results), f"{name}_next"]
        made = self.b.op(op.name, [*op.operands, cache], {**op.attrs, "state": True}, names=names)
        self.keep(cache, made.results[-1])
        return made.results[:-1]

    def state(self, name: str, type_: TensorType) -> Value:
        """State whose size does not depend on the context, such as that of a scan: like `cache`,
        with the role `recurrent`. It is 0 before the first token."""
        return self.cache(name, type_, "recurrent")

    def cache(self, name: str, type_: TensorType, role: str = "cache") -> Value:
        """Rows of tokens, with this type at the op: an argument of the function, of which repeats
        around the op take one slice per layer. `keep` defines its updated value."""
        repeats = list(_around(self.b.region))
        whole = type_.unplaced()
        for op in repeats:
            whole = whole.stacked(op.expr("count"))
        taken = {a.name for a in self.body.args}
        names = chain([name], (f"{name}{number}" for number in count(2)))
        name = next(each for each in names if each not in taken)
        value = self.body.add_arg(name, replace(whole, role=role), self.b.loc)
        for op in reversed(repeats):
            op.add_operand(value)
            value = op.body.add_arg(f"{name}_i", value.tensor.inner.sliced(), self.b.loc)
        return value

    def keep(self, cache: Value, updated: Value) -> None:
        """Define the updated value of state, of the type of `cache`; once for each state."""
        self.kept.append((cache, updated))

    def hand_out(self) -> list[Value]:
        """Return updated state from repeats. Gives the values that the function returns, one for
        each argument with the role `cache`, in their order."""
        self.kept.sort(key=lambda pair: _argument(pair[0]).index)
        return [_handed_out(updated, cache) for cache, updated in self.kept]


def _argument(cache: Value) -> Value:
    """The argument of the function of which state is a slice."""
    while (op := cache.region.owner).has(Repeats):
        cache = op.operands[cache.index]
    return cache


def _around(region: Region) -> Iterable[Operation]:
    """The repeats around a region, the innermost first."""
    if region.owner.has(Repeats):
        yield region.owner
        if region.owner.parent is not None:
            yield from _around(region.owner.parent)


def _handed_out(value: Value, cache: Value) -> Value:
    for op in _around(cache.region):
        value = stacked(op, value, value.name)
    return value
