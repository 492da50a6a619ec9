"""Builders of operations: an insertion point, a location and a phase; result types are inferred."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from stagec.ir.core import Attr, Operation, Quoted, Region, Value
from stagec.ir.expr import Expr, const
from stagec.ir.opdef import Registry
from stagec.ir.param import Param
from stagec.ir.types import Type
from stagec.support.source import UNKNOWN, Loc

RawAttr = Attr | int | Sequence[int]


class Builder:
    """Creates operations one after the other before a place in a region. The place stays valid when
    operations are inserted around it."""

    def __init__(
        self,
        registry: Registry,
        region: Region,
        index: int | None = None,
        *,
        loc: Loc = UNKNOWN,
        phase: str = "forward",
    ) -> None:
        self.registry, self.region, self.loc, self.phase = registry, region, loc, phase
        self._next = region.ops[index] if index is not None and index < len(region.ops) else None
        #: Called with each new op, to place its results.
        self.finish: Callable[[Operation], None] | None = None

    @classmethod
    def before(
        cls, registry: Registry, op: Operation, *, loc: Loc | None = None, phase: str | None = None
    ) -> Builder:
        """A builder that inserts directly before `op`. Raises ValueError if it is in no region."""
        return cls(registry, op.home, op.position(), loc=loc or op.loc, phase=phase or op.phase)

    @classmethod
    def after(
        cls, registry: Registry, op: Operation, *, loc: Loc | None = None, phase: str | None = None
    ) -> Builder:
        """A builder that inserts directly after `op`. Raises ValueError if it is in no region."""
        place = op.position() + 1
        return cls(registry, op.home, place, loc=loc or op.loc, phase=phase or op.phase)

    @classmethod
    def behind(cls, registry: Registry, value: Value, loc: Loc) -> Builder:
        """A builder that inserts directly after a value is made, or where its region begins."""
        if isinstance(value.owner, Region):
            return cls(registry, value.owner, 0, loc=loc)
        return cls.after(registry, value.owner, loc=loc)

    def op(
        self,
        name: str,
        operands: Iterable[Value] = (),
        attrs: Mapping[str, RawAttr] | None = None,
        *,
        types: Sequence[Type] | None = None,
        names: Sequence[str] = (),
        symbol: str | None = None,
    ) -> Operation:
        """Insert an operation; without `types` its definition infers them. A parameter of kind
        `str`, such as a rule, is given as a plain string."""
        definition = self.registry[name]
        given = {k: _attr(v, definition.params_by_name.get(k)) for k, v in (attrs or {}).items()}
        op = Operation(definition, operands, given, symbol=symbol, loc=self.loc)
        self.insert(op)
        for i, type_ in enumerate(definition.infer(op) if types is None else types):
            op.add_result(names[i] if i < len(names) else f"t{i}" if i else "t", type_)
        if self.finish is not None:
            self.finish(op)
        return op

    def value(
        self,
        name: str,
        operands: Iterable[Value] = (),
        attrs: Mapping[str, RawAttr] | None = None,
        *,
        type: Type | None = None,
        hint: str = "t",
    ) -> Value:
        """Insert an operation and return its first result."""
        op = self.op(name, operands, attrs, types=None if type is None else [type], names=[hint])
        return op.results[0]

    def insert(self, op: Operation) -> Operation:
        """Insert an existing operation at the insertion point, in the phase of the builder."""
        place = len(self.region.ops) if self._next is None else self._next.position()
        self.region.insert(place, op)
        around = op.parent_op.phase if op.parent_op else "forward"
        if around != self.phase and op.definition.params_by_name["phase"].choices:
            op.attrs["phase"] = self.phase
        return op


def _attr(value: RawAttr, param: Param | None = None) -> Attr:
    if isinstance(value, str) and param is not None and param.kind == "str":
        return Quoted(value)
    if isinstance(value, (bool, str, Expr)):
        return value
    if isinstance(value, int):
        return const(value)
    if isinstance(value, (tuple, list)):
        return tuple(_attr(v) for v in value)
    return value  # type: ignore[return-value]
