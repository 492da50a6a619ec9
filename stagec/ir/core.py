"""Operations, values and regions: the mutable part of the IR.

An operation has at most one region, a region is one straight list of operations. A region's
arguments may be bound to the operands of its operation (`%h = %x`): argument i then stands for
operand i.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagec.ir.expr import Expr, substitute
from stagec.ir.facts import Relation
from stagec.ir.order import LayerOrder, Multiple
from stagec.ir.types import TensorType, Type
from stagec.support.diagnostics import Located
from stagec.support.source import UNKNOWN, Loc

if TYPE_CHECKING:
    from stagec.ir.opdef import OpDef
    from stagec.ir.traits import Trait

#: The phases of a training step to which ops belong.
PHASES = ("forward", "backward", "recompute", "gradient", "optimizer")


@dataclass(frozen=True, slots=True)
class SymbolRef:
    """`@name`."""

    name: str

    def __str__(self) -> str:
        return "@" + self.name


@dataclass(frozen=True, slots=True)
class Quoted:
    """A string that prints in quotes (a plain `str` attribute is a bare name)."""

    text: str

    def __str__(self) -> str:
        return f'"{self.text}"'


@dataclass(frozen=True, slots=True)
class NamedAttr:
    """`name = value` in a list: one of the parameters that a call passes to an op of a block."""

    name: str
    value: Attr

    def __str__(self) -> str:
        return f"{self.name} = {self.value}"


Attr = (
    bool
    | str
    | Expr
    | Relation
    | SymbolRef
    | Quoted
    | LayerOrder
    | Multiple
    | NamedAttr
    | tuple["Attr", ...]
)


class NotATensorError(TypeError):
    """A tensor was expected, but the value has another type."""

    def __init__(self, value: Value) -> None:
        self.value = value
        super().__init__(f"%{value.name} has no tensor type")


class Value(Located):
    """An SSA value: a result of an operation or an argument of a region."""

    __slots__ = ("index", "loc", "name", "owner", "type", "uses")

    def __init__(
        self,
        name: str,
        type: Type | None,
        owner: Operation | Region,
        index: int,
        loc: Loc = UNKNOWN,
    ) -> None:
        self.name, self.type, self.owner, self.index, self.loc = name, type, owner, index, loc
        self.uses: list[tuple[Operation, int]] = []

    @property
    def producer(self) -> Operation | None:
        """The operation that this is a result of; None for a region's argument."""
        return self.owner if isinstance(self.owner, Operation) else None

    @property
    def tensor(self) -> TensorType:
        """The type, which must be a tensor type. Raises `NotATensorError`."""
        if not isinstance(self.type, TensorType):
            raise NotATensorError(self)
        return self.type

    @property
    def region(self) -> Region:
        """The region in which it is defined."""
        if isinstance(self.owner, Region):
            return self.owner
        if self.owner.parent is None:
            raise ValueError(f"%{self.name} is not in a region")
        return self.owner.parent

    def is_called(self, name: str) -> bool:
        """Whether a text may refer to the value by this name: its name, or the end of its path.

        | value            | name    |     |
        |------------------|---------|-----|
        | `%layers/mla/wq` | `wq`    | yes |
        | `%wq`            | `wq`    | yes |
        | `%layers/mla/wq` | `mla`   | no  |
        """
        return self.name == name or self.name.endswith("/" + name)

    def prefixed(self, prefix: str) -> str:
        """A name for a derived value, with the same path: `layers/mla/d_wq`."""
        path, slash, name = self.name.rpartition("/")
        return f"{path}{slash}{prefix}{name}"

    def replace_with(
        self, other: Value, uses: Iterable[tuple[Operation, int]] | None = None
    ) -> None:
        """Make all users use `other` but the op that computes `other` from this value, or only
        those in `uses` (if several ops do, the users before these)."""
        others = [use for use in self.uses if use[0] is not other.producer]
        for op, index in others if uses is None else uses:
            op.set_operand(index, other)

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


def renumber(values: Iterable[Value]) -> None:
    """Set the indices of the results of an operation, or of the arguments of a region, after some
    were removed or moved."""
    for index, value in enumerate(values):
        value.index = index


class Region:
    """A list of operations with arguments; `returns` is the declared result types of a function."""

    __slots__ = ("args", "ops", "owner", "returns")

    def __init__(self, owner: Operation) -> None:
        self.owner = owner
        self.args: list[Value] = []
        self.ops: list[Operation] = []
        self.returns: tuple[Type, ...] = ()

    def add_arg(self, name: str, type: Type | None, loc: Loc = UNKNOWN) -> Value:
        """Append an argument."""
        arg = Value(name, type, self, len(self.args), loc)
        self.args.append(arg)
        return arg

    def insert(self, index: int, op: Operation) -> Operation:
        """Insert an operation that is in no region yet."""
        self.ops.insert(index, op)
        op.parent = self
        return op

    def append(self, op: Operation) -> Operation:
        """Insert at the end."""
        return self.insert(len(self.ops), op)

    @property
    def terminator(self) -> Operation:
        """The last operation (a yield or a return)."""
        return self.ops[-1]

    def walk(self) -> Iterator[Operation]:
        """All operations below, outer before inner, in order."""
        pending = [iter([*self.ops])]
        while pending:
            for op in pending[-1]:
                yield op
                if op.region:
                    pending.append(iter([*op.region.ops]))
                    break
            else:
                pending.pop()

    def ancestors(self, values: Iterable[Value]) -> set[Operation]:
        """All operations of this region on which these values depend."""
        reached: set[Operation] = set()
        pending = list(values)
        while pending:
            op = pending.pop().producer
            if op is not None and op.parent is self and op not in reached:
                reached.add(op)
                pending += op.reads()
        return reached

    def values(self) -> Iterator[Value]:
        """All values below: arguments, and results of operations with those of their regions."""
        yield from self.args
        for op in self.walk():
            yield from op.results
            yield from op.region.args if op.region else ()


class Operation(Located):
    """`results = name @symbol [attrs] (operands) region`.

    `operands` are the used values; only the methods below change them, because values know their
    uses. `origin` is the operation from which it was lowered, if that still exists; it is not
    printed.
    """

    __slots__ = (
        "attrs",
        "definition",
        "loc",
        "name",
        "operands",
        "origin",
        "parent",
        "region",
        "results",
        "symbol",
    )

    def __init__(
        self,
        definition: OpDef,
        operands: Iterable[Value] = (),
        attrs: Mapping[str, Attr] | None = None,
        *,
        symbol: str | None = None,
        loc: Loc = UNKNOWN,
    ) -> None:
        self.definition, self.name, self.symbol, self.loc = definition, definition.name, symbol, loc
        self.attrs: dict[str, Attr] = dict(attrs or {})
        self.results: list[Value] = []
        self.region: Region | None = None
        self.parent: Region | None = None
        self.origin: Operation | None = None
        self.operands: tuple[Value, ...] = ()
        self.set_operands(operands)

    def has(self, trait: type[Trait]) -> bool:
        """Whether the definition has the trait, or a subclass of it."""
        return trait in self.definition.kinds

    def add_operand(self, value: Value) -> None:
        """Append an operand."""
        value.uses.append((self, len(self.operands)))
        self.operands = (*self.operands, value)

    def set_operand(self, index: int, value: Value) -> None:
        """Use another value as operand `index`."""
        self.operands[index].uses.remove((self, index))
        self.operands = (*self.operands[:index], value, *self.operands[index + 1 :])
        value.uses.append((self, index))

    def set_operands(self, values: Iterable[Value]) -> None:
        """Replace all operands by these values."""
        self.drop_operands()
        self.operands = tuple(values)
        for index, value in enumerate(self.operands):
            value.uses.append((self, index))

    def drop_operands(self) -> None:
        """Remove all operands."""
        for index, value in enumerate(self.operands):
            value.uses.remove((self, index))
        self.operands = ()

    def add_result(self, name: str, type: Type | None = None, loc: Loc | None = None) -> Value:
        """Append a result."""
        value = Value(name, type, self, len(self.results), loc or self.loc)
        self.results.append(value)
        return value

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    @property
    def body(self) -> Region:
        """The region, which must exist. Raises ValueError."""
        if self.region is None:
            raise ValueError(f"'{self.name}' has no region")
        return self.region

    def make_region(self) -> Region:
        """Give the operation an empty region."""
        self.region = Region(self)
        return self.region

    @property
    def parent_op(self) -> Operation | None:
        """The operation that contains this one in its region, or None."""
        return self.parent.owner if self.parent else None

    @property
    def phase(self) -> str:
        """The phase, one of `PHASES`: the own attribute, or the phase of the parent."""
        op = self
        while True:
            own = op.attrs.get("phase")
            if own is not None and isinstance(own, str) and own in PHASES:
                return own
            if (parent := op.parent) is None:
                return "forward"
            op = parent.owner

    def flag(self, name: str) -> bool:
        """Whether a flag attribute is set."""
        return self.attrs.get(name) is True

    def expr(self, name: str, default: Expr | None = None) -> Expr:
        """An attribute that is a size; if it is missing, `default`. Raises TypeError for another
        kind, KeyError without a default."""
        value = self.attrs[name] if default is None else self.attrs.get(name, default)
        if not isinstance(value, Expr):
            raise TypeError(f"'{self.name}' attribute {name} is not a size")
        return value

    def exprs(self, name: str) -> tuple[Expr, ...]:
        """An attribute that is a list of sizes; empty if it is missing."""
        value = self.attrs.get(name, ())
        items = value if isinstance(value, tuple) else (value,)
        return tuple(v for v in items if isinstance(v, Expr))

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute that is a list of integer constants; empty if it is missing."""
        return tuple(v.value or 0 for v in self.exprs(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """An attribute that is an integer constant. Raises TypeError for another kind."""
        value = self.attrs.get(name)
        if value is None and default is not None:
            return default
        number = value.value if isinstance(value, Expr) else None
        if number is None:
            raise TypeError(f"'{self.name}' attribute {name} is not an integer")
        return number

    def text(self, name: str, default: str = "") -> str:
        """An attribute that is a name or a string; if it is missing, `default` or the default of
        the definition."""
        value = self.attrs.get(name)
        if value is None:
            return default or self.definition.default(name)
        return value.text if isinstance(value, Quoted) else str(value)

    def names(self, name: str) -> tuple[str, ...]:
        """An attribute that is a list of names or strings, such as axes."""
        value = self.attrs.get(name, ())
        items = value if isinstance(value, tuple) else (value,)
        return tuple(v.text if isinstance(v, Quoted) else str(v) for v in items)

    def infer(self) -> None:
        """Give the results the types that follow from those of the operands."""
        if self.results:
            for result, type_ in zip(self.results, self.definition.infer(self), strict=False):
                result.type = type_

    def walk(self) -> Iterator[Operation]:
        """The operation and all below, outer before inner, in order."""
        yield self
        if self.region is not None:
            yield from self.region.walk()

    def reads(self) -> Iterator[Value]:
        """The values that the operation and those in its region use, including values of the
        region."""
        return (value for op in self.walk() for value in op.operands)

    def erase(self) -> None:
        """Remove the operation; its results must not be used."""
        for op in self.walk():
            op.drop_operands()
        if self.parent:
            self.parent.ops.remove(self)
            self.parent = None
        self.decompose()

    def decompose(self) -> None:
        """Cut the references between all operations below, so that their memory is freed without
        the garbage collector. Attributes and parents stay for those who still refer to an
        operation."""
        for op in [*self.walk()]:
            op.results, op.operands = [], ()
            if op.region is not None:
                op.region.args, op.region.ops, op.region = [], [], None

    def position(self) -> int:
        """The index in the region. Raises ValueError if it is in no region."""
        if self.parent is None:
            raise ValueError(f"'{self.name}' is not in a region")
        return self.parent.ops.index(self)

    def __repr__(self) -> str:
        return f"<{self.name} {self.attrs}>"


def substitute_attr(value: Attr, env: Mapping[str, Expr]) -> Attr:
    """An attribute with the symbols of its sizes and relations replaced."""
    if isinstance(value, Expr):
        return substitute(value, env)
    if isinstance(value, Relation):
        return value.substitute(env)
    if isinstance(value, NamedAttr):
        return NamedAttr(value.name, substitute_attr(value.value, env))
    if isinstance(value, tuple):
        return tuple(substitute_attr(v, env) for v in value)
    return value
