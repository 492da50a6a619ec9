"""Types: tensors with symbolic sizes and a placement for each dimension.

Types are refined: a result first has no type, then one with a shape, then one with a placement. All
types are immutable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

from stagec.ir.expr import ZERO, Expr, call, const, product, substitute, symbol

#: The memory in which computations run, and the share that is a whole tensor.
DEVICE, WHOLE = "device", Fraction(1)
#: Bytes per element. Two 4-bit elements share a byte, 128 elements of `f8e4m3s` an f32 scale, and
#: 16 of `f4e2m1s` an 8-bit scale.
DTYPE_BYTES: Mapping[str, int | Fraction] = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "f8e4m3": 1,
    "f8e4m3s": Fraction(33, 32),
    "f8e5m2": 1,
    "f4e2m1": Fraction(1, 2),
    "f4e2m1s": Fraction(9, 16),
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "i4": Fraction(1, 2),
    "u8": 1,
    "i1": 1,
}
#: The types in which products of elements with scales compute.
WITHOUT_SCALES: Mapping[str, str] = {"f8e4m3s": "f8e4m3", "f4e2m1s": "f4e2m1"}
EIGHT_BITS = frozenset({"f8e4m3", "f8e4m3s", "f8e5m2"})
FOUR_BITS = frozenset({"f4e2m1", "f4e2m1s"})
#: Floating-point types of values. Only these have gradients.
FLOATS = frozenset({"f64", "f32", "bf16", "f16", "f4e2m1s"}) | EIGHT_BITS
ROLES = ("param", "frozen", "scale", "state", "bucket", "cache", "recurrent")
#: The roles of state of sequences in serving: rows of tokens, and state of fixed size.
CACHED = frozenset({"cache", "recurrent"})
#: The roles of parameters: trained ones, and others.
PARAMETERS = frozenset({"param", "frozen"})
#: The roles of weights of the model: parameters, and the scales of blocks of few bits.
WEIGHTS = PARAMETERS | {"scale"}
Interned = TypeVar("Interned", "Dim", "TensorType")
# A module has few distinct shapes, each many times.
_memo = lru_cache(maxsize=1 << 14)


@dataclass(frozen=True, slots=True)
class AxisUse:
    """A mesh axis that splits a dimension. Priority 0 is a placement for computation, 1 and 2 are
    placements at rest."""

    axis: str
    priority: int = 0

    def __str__(self) -> str:
        return f"{self.axis}!{self.priority}" if self.priority else self.axis


@dataclass(frozen=True, slots=True)
class Load:
    """The rows of a dimension differ between the parts of another dimension `of`, that of experts.

    A part has `load` times its even share of rows, a number that is 1 on average and differs
    between layers; the layers of a repeat are counted from `first`. The symbol of the load appears
    only in local sizes, and only if `of` is split.
    """

    of: str
    first: int = 0

    @property
    def names(self) -> tuple[str, str, str]:
        """The names of its symbols: the load of the part of a rank in one layer (`E_load`, in later
        repeats `E_load58`), the largest load of all parts in that layer, and the share of the
        experts of the rank that get rows."""
        name = f"{self.of}_load{self.first or ''}"
        return name, f"{name}_most", f"{name}_used"

    @property
    def symbol(self) -> Expr:
        """The load of the part of a rank."""
        return symbol(self.names[0])

    @property
    def fullest(self) -> Expr:
        """The largest load of all parts."""
        return symbol(self.names[1])

    @property
    def used(self) -> Expr:
        """The share of the experts of a rank that get rows."""
        return symbol(self.names[2])


@dataclass(frozen=True, slots=True)
class Routed:
    """A router distributes the rows of a dimension: each token goes to `k` of `of` experts. A small
    number of tokens does not reach all experts, and reaches fewer if tokens choose some experts
    more often (`spread`)."""

    of: Expr
    k: Expr
    spread: bool = False


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Dim:
    """One dimension: its global size, and the axes that split it, major first.

    `size` is the size under even load. With `load` the size differs between ranks, with `routed` a
    router distributes the rows. Equal dimensions are one object.
    """

    size: Expr
    split: tuple[AxisUse, ...] = ()
    open: bool = False
    load: Load | None = None
    routed: Routed | None = None

    def __new__(
        cls,
        size: Expr,
        split: tuple[AxisUse, ...] = (),
        open: bool = False,
        load: Load | None = None,
        routed: Routed | None = None,
    ) -> Dim:
        return _once(cls, (size, split, open, load, routed))

    def __reduce__(self) -> tuple[type[Dim], tuple[Any, ...]]:
        return Dim, (self.size, self.split, self.open, self.load, self.routed)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that split the dimension."""
        return tuple([use.axis for use in self.split]) if self.split else ()

    def without(self, axes: Collection[str]) -> Dim:
        """The dimension without the splits over these axes."""
        return replace(self, split=tuple(u for u in self.split if u.axis not in axes))

    @property
    def local(self) -> Expr:
        """Elements on one rank."""
        return self.size / axis_size(self.axes) if self.split else self.size

    def split_over(self, split: tuple[AxisUse, ...]) -> Dim:
        """The dimension with this split, which is final."""
        if self.split == split and not self.open:
            return self
        return Dim(self.size, split, False, self.load, self.routed)

    def __str__(self) -> str:
        text = str(self.size)
        if self.split:
            atom = text if text.isidentifier() or text.isdigit() else f"({text})"
            axes = ", ".join(map(str, self.split))
            return f"{atom}@({axes})" if len(self.split) > 1 else f"{atom}@{axes}"
        return text + "?" if self.open else text


def _once(
    cls: type[Interned], given: tuple[Any, ...], key: tuple[Any, ...] | None = None
) -> Interned:
    """The unique object of a class with these fields, by `key` (default: the fields). Safe for
    threads."""
    known: dict[tuple[Any, ...], Interned] = _made[cls]
    made = known.get(key or given)
    if made is not None:
        return made
    new = object.__new__(cls)
    for each, value in zip(fields(cls), given, strict=True):
        object.__setattr__(new, each.name, value)
    return known.setdefault(key or given, new)


#: All dimensions and types of tensors, by their fields.
_made: defaultdict[type, dict[tuple[Any, ...], Any]] = defaultdict(dict)


def axis_size(axes: Iterable[str]) -> Expr:
    """The number of ranks along these axes."""
    return _axis_size(tuple(axes))


@_memo
def _axis_size(axes: tuple[str, ...]) -> Expr:
    return product(symbol(a) for a in axes)


def index_name(axis: str) -> str:
    """The symbol for the coordinate of a rank along an axis, in lowered sizes."""
    return f"{axis}_index"


def axis_index(axes: Iterable[str]) -> Expr:
    """The number of a rank along these axes, from 0."""
    index = const(0)
    for axis in axes:
        index = index * symbol(axis) + symbol(index_name(axis))
    return index


def bytes_of(elements: Expr, dtype: str) -> Expr:
    """The bytes of this number of elements, rounded up to whole bytes."""
    above, below = DTYPE_BYTES[dtype].as_integer_ratio()
    return elements * above if below == 1 else call("ceildiv", [elements * above, const(below)])


@_memo
def _loads(dims: tuple[Dim, ...]) -> tuple[Load | None, ...]:
    """The load of each dimension; None if every rank has all of its parts."""
    whole = {d.size.symbol_name for d in dims if not d.split}
    return tuple(d.load if d.load and d.load.of not in whole else None for d in dims)


@_memo
def _local_shape(dims: tuple[Dim, ...], fullest: bool = False) -> tuple[Expr, ...]:
    loads = zip(dims, _loads(dims), strict=True)
    return tuple(
        d.local * (load.fullest if fullest else load.symbol) if load else d.local
        for d, load in loads
    )


@_memo
def _elements(dims: tuple[Dim, ...]) -> Expr:
    return product(d.size for d in dims)


@_memo
def _local_elements(dims: tuple[Dim, ...]) -> Expr:
    return product(_local_shape(dims))


@_memo
def _local_bytes(dims: tuple[Dim, ...], dtype: str) -> Expr:
    return bytes_of(_local_elements(dims), dtype)


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is partial: reducing it by `kind` (sum or max) over `axes` gives the complete
    value."""

    kind: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.axes)})"


@dataclass(frozen=True, slots=True, eq=False, init=False)
class TensorType:
    """A tensor in global view. `placed` distinguishes a replicated tensor from one without
    placement.

    Only arguments and results of functions have `role` and `part`. A part is the share of one chunk
    of a pipeline stage in a value of the whole step: the name of the value, and the number of the
    chunk. `share` is the fraction of the tensor in `memory`; the rest is on the device. Equal types
    are one object, so that comparing and hashing them is cheap.
    """

    dtype: str
    dims: tuple[Dim, ...] = ()
    partial: Partial | None = None
    placed: bool = False
    memory: str = DEVICE
    stage: tuple[str, int] | None = None
    role: str = ""
    part: tuple[str, int] | None = None
    share: Fraction = WHOLE

    def __new__(
        cls,
        dtype: str,
        dims: tuple[Dim, ...] = (),
        partial: Partial | None = None,
        placed: bool = False,
        memory: str = DEVICE,
        stage: tuple[str, int] | None = None,
        role: str = "",
        part: tuple[str, int] | None = None,
        share: Fraction = WHOLE,
    ) -> TensorType:
        most = dtype, dims, partial, placed, memory, stage, role, part
        if share is WHOLE or share == WHOLE:  # the usual case; hashing fractions is slow
            return _once(cls, (*most, WHOLE), most)
        return _once(cls, (*most, share))

    def __reduce__(self) -> tuple[type[TensorType], tuple[Any, ...]]:
        return TensorType, tuple(getattr(self, each.name) for each in fields(self))

    @property
    def shape(self) -> tuple[Expr, ...]:
        """The global sizes."""
        return tuple([d.size for d in self.dims])

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.dims)

    @property
    def elements(self) -> Expr:
        """Elements of the whole tensor."""
        return _elements(self.dims)

    @property
    def local_shape(self) -> tuple[Expr, ...]:
        """The sizes on one rank."""
        return _local_shape(self.dims)

    @property
    def local_elements(self) -> Expr:
        """Elements on one rank."""
        return _local_elements(self.dims)

    @property
    def local_bytes(self) -> Expr:
        """Bytes on one rank."""
        return _local_bytes(self.dims, self.dtype)

    def bytes_in(self, space: str) -> Expr:
        """Bytes on one rank in a memory; a share is rounded up to whole bytes."""
        size, share = self.local_bytes, self.share
        if share is WHOLE:
            return size if space == self.memory else ZERO
        away = call("ceildiv", [size * share.numerator, const(share.denominator)])
        if space == self.memory:
            return away
        return size - away if space == DEVICE else ZERO

    @property
    def memories(self) -> tuple[str, ...]:
        """The memories in which the tensor is."""
        return (self.memory,) if self.share is WHOLE else (self.memory, DEVICE)

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads on which the local sizes depend."""
        return tuple(load for load in _loads(self.dims) if load is not None)

    @property
    def fullest_bytes(self) -> Expr:
        """Bytes on the rank with the most."""
        return bytes_of(product(_local_shape(self.dims, True)), self.dtype)

    @property
    def inner(self) -> TensorType:
        """The type inside a function: without role and part."""
        return replace(self, role="", part=None) if self.role or self.part else self

    @property
    def even(self) -> TensorType:
        """The type under even load."""
        return replace(self, dims=tuple(replace(d, load=None) for d in self.dims))

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the value is unreduced."""
        return self.partial.axes if self.partial else ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes of the type: those that split dimensions, and those of partial values."""
        return tuple(a for d in self.dims for a in d.axes) + self.partial_axes

    def with_part(self, part: tuple[str, int] | None) -> TensorType:
        """The type as that of a part, or of no part."""
        # `replace` takes five times as long
        about = self.partial, self.placed, self.memory, self.stage, self.role
        return TensorType(self.dtype, self.dims, *about, part, self.share)

    def unplaced(self) -> TensorType:
        """The type with shape and dtype only."""
        dims = tuple(Dim(d.size, load=d.load, routed=d.routed) for d in self.dims)
        return TensorType(self.dtype, dims)

    def with_splits(
        self, splits: Iterable[tuple[str, ...]], partial: Partial | None = None
    ) -> TensorType:
        """The type with a placement: dimension i is split over `splits[i]`."""
        uses = (tuple(map(AxisUse, axes)) for axes in splits)
        dims = tuple(d.split_over(s) for d, s in zip(self.dims, uses, strict=True))
        return self._with(dims, partial, True)

    def with_dim(self, index: int, dim: Dim) -> TensorType:
        """The type with another dimension in this place."""
        return replace(self, dims=(*self.dims[:index], dim, *self.dims[index + 1 :]))

    def sliced(self) -> TensorType:
        """The type of a slice along the first dimension, as in a repeat."""
        return self._inside(self.dims[1:])

    def stacked(self, count: Expr) -> TensorType:
        """The type of `count` stacked values along a new first dimension."""
        return self._inside((Dim(count), *self.dims))

    def _inside(self, dims: tuple[Dim, ...]) -> TensorType:
        return self._with(dims, self.partial, self.placed)

    def _with(self, dims: tuple[Dim, ...], partial: Partial | None, placed: bool) -> TensorType:
        if self.share is not WHOLE:
            return replace(self, dims=dims, partial=partial, placed=placed, role="", part=None)
        return TensorType(self.dtype, dims, partial, placed, self.memory, self.stage)

    def substitute(self, env: Mapping[str, Expr]) -> TensorType:
        """The type with replaced symbols in sizes (axis names stay)."""
        return replace(self, dims=tuple(_substituted(d, env) for d in self.dims))

    def __str__(self) -> str:
        clauses: list[str] = []
        if self.partial:
            clauses.append(str(self.partial))
        if self.placed and not self.partial and not any(d.split for d in self.dims):
            clauses.append("rep")
        clauses += [_load_clause(i, d.load) for i, d in enumerate(self.dims) if d.load]
        clauses += [_routed_clause(i, d.routed) for i, d in enumerate(self.dims) if d.routed]
        if self.role:
            clauses.append(self.role)
        if self.part:
            clauses.append(f"part({self.part[0]}={self.part[1]})")
        if self.memory != DEVICE:
            share = f", {self.share}" if self.share is not WHOLE else ""
            clauses.append(f"mem({self.memory}{share})")
        if self.stage:
            clauses.append(f"on({self.stage[0]}={self.stage[1]})")
        bar = " | " + " ".join(clauses) if clauses else ""
        return f"{self.dtype}[{', '.join(map(str, self.dims))}{bar}]".replace("[ |", "[|")


def _substituted(d: Dim, env: Mapping[str, Expr]) -> Dim:
    size, routed = substitute(d.size, env), d.routed
    if routed is not None:
        routed = replace(routed, of=substitute(routed.of, env), k=substitute(routed.k, env))
    return replace(d, size=size, routed=routed)


def _load_clause(index: int, load: Load) -> str:
    first = f", first={load.first}" if load.first else ""
    return f"load({load.of}={index}{first})"


def _routed_clause(index: int, routed: Routed) -> str:
    spread = ", spread" if routed.spread else ""
    return f"routed({routed.of}={index}, {routed.k}{spread})"


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A type that is only a name, such as `node` in lowered programs."""

    name: str

    def __str__(self) -> str:
        return self.name


Type = TensorType | OpaqueType
NODE = OpaqueType("node")


def whole(type_: Type | None) -> Type | None:
    """The type without the chunk of which it is a part."""
    if isinstance(type_, TensorType) and type_.part is not None:
        return type_.with_part(None)
    return type_
