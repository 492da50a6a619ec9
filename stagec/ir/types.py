"""Types: tensors with symbolic sizes whose placement stands next to each dimension.

Types refine: a result may have no type yet, then a shaped one, then a placed one. All are
immutable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from stagec.ir.expr import Expr, const, product, substitute, symbol

#: Bytes of one element.
DTYPE_BYTES: Mapping[str, int] = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "i1": 1,
}
FLOATS = frozenset({"f64", "f32", "bf16", "f16", "f8e4m3", "f8e5m2"})
ROLES = ("param", "state")
# A module has few distinct shapes, each many times.
_remembered = lru_cache(maxsize=1 << 14)


@dataclass(frozen=True, slots=True)
class AxisUse:
    """A mesh axis that splits a dimension; `priority` 0 is compute, 1 and 2 are at-rest
    placements."""

    axis: str
    priority: int = 0

    def __str__(self) -> str:
        return f"{self.axis}!{self.priority}" if self.priority else self.axis


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: its global size, and the axes that split it, major first."""

    size: Expr
    split: tuple[AxisUse, ...] = ()
    open: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that split it."""
        return tuple(use.axis for use in self.split)

    @property
    def local(self) -> Expr:
        """Elements on one rank."""
        return self.size / axis_size(self.axes) if self.split else self.size

    def __str__(self) -> str:
        text = str(self.size)
        if self.split:
            atom = text if text.isidentifier() or text.isdigit() else f"({text})"
            many = len(self.split) > 1
            return (
                f"{atom}@({', '.join(map(str, self.split))})" if many else f"{atom}@{self.split[0]}"
            )
        return text + "?" if self.open else text


def axis_size(axes: Iterable[str]) -> Expr:
    """The number of ranks along these axes."""
    return _axis_size(tuple(axes))


@_remembered
def _axis_size(axes: tuple[str, ...]) -> Expr:
    return product(symbol(a) for a in axes)


def axis_index(axes: Iterable[str]) -> Expr:
    """The number of a rank along these axes, from 0: its coordinate along an axis a is the symbol
    `a_index`."""
    index = const(0)
    for axis in axes:
        index = index * symbol(axis) + symbol(f"{axis}_index")
    return index


def load_symbol(dim: str, first: int = 0) -> Expr:
    """`E_load`: how much of dimension E falls to a rank, over what does on average.

    It is a factor of the size of another dimension, and is 1 where E is whole. Repeats after the
    first that have such a dimension go by the number of their first layer: `E_load58`.
    """
    return symbol(f"{dim}_load{first or ''}")


@_remembered
def loads_of(size: Expr) -> Mapping[str, str]:
    """The symbols of loads in a size, each with its dimension."""
    return {s: m[1] for s in size.symbols if (m := _LOAD.fullmatch(s))}


def at_fullest(size: Expr) -> Expr:
    """The size where loads are those of the fullest rank: `E_load_most`."""
    return substitute(size, {s: symbol(f"{s}_most") for s in loads_of(size)})


_LOAD = re.compile(r"(.+)_load\d*")


def dim(size: Expr | int, *axes: str, priority: int = 0) -> Dim:
    """A dimension split over these axes at one priority."""
    return Dim(
        size if isinstance(size, Expr) else const(size), tuple(AxisUse(a, priority) for a in axes)
    )


@_remembered
def _local_shape(dims: tuple[Dim, ...]) -> tuple[Expr, ...]:
    sizes = tuple(d.local for d in dims)
    loads = {s: name for size in sizes for s, name in loads_of(size).items()}
    if not loads:
        return sizes
    whole = {d.size.symbol_name for d in dims if not d.split}
    even = {s: const(1) for s, name in loads.items() if name in whole}
    return tuple(substitute(size, even) for size in sizes)


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is a part: `kind` (sum or max) over `axes` would give the whole."""

    kind: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.axes)})"


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor in global view. `placed` tells `replicated` from `not placed yet`."""

    dtype: str
    dims: tuple[Dim, ...] = ()
    partial: Partial | None = None
    placed: bool = False
    memory: str = "device"
    stage: tuple[str, int] | None = None
    role: str = ""

    @property
    def shape(self) -> tuple[Expr, ...]:
        """The global sizes."""
        return tuple(d.size for d in self.dims)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.dims)

    @property
    def elements(self) -> Expr:
        """Elements of the whole tensor."""
        return product(self.shape)

    @property
    def local_shape(self) -> tuple[Expr, ...]:
        """The sizes on one rank."""
        return _local_shape(self.dims)

    @property
    def local_elements(self) -> Expr:
        """Elements on one rank."""
        return product(self.local_shape)

    @property
    def local_bytes(self) -> Expr:
        """Bytes on one rank."""
        return self.local_elements * DTYPE_BYTES[self.dtype]

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the value is unreduced."""
        return self.partial.axes if self.partial else ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the value uses, splitting and partial."""
        return tuple(a for d in self.dims for a in d.axes) + self.partial_axes

    def unplaced(self) -> TensorType:
        """Shape and dtype alone."""
        return TensorType(self.dtype, tuple(Dim(d.size) for d in self.dims))

    def with_splits(
        self, splits: Iterable[tuple[str, ...]], partial: Partial | None = None
    ) -> TensorType:
        """The same tensor placed: dimension i split over `splits[i]`."""
        dims = tuple(dim(d.size, *axes) for d, axes in zip(self.dims, splits, strict=True))
        return TensorType(self.dtype, dims, partial, True, self.memory, self.stage)

    def sliced(self) -> TensorType:
        """One slice along the first dimension, as a repeat sees it."""
        return replace(self, dims=self.dims[1:], role="")

    def stacked(self, count: Expr) -> TensorType:
        """`count` of these along a new first dimension."""
        return replace(self, dims=(Dim(count), *self.dims), role="")

    def substitute(self, env: Mapping[str, Expr]) -> TensorType:
        """Sizes with symbols replaced (axis names stay)."""
        dims = tuple(replace(d, size=substitute(d.size, env)) for d in self.dims)
        return replace(self, dims=dims)

    def __str__(self) -> str:
        clauses: list[str] = []
        if self.partial:
            clauses.append(str(self.partial))
        if self.placed and not self.partial and not any(d.split for d in self.dims):
            clauses.append("rep")
        if self.role:
            clauses.append(self.role)
        if self.memory != "device":
            clauses.append(f"mem({self.memory})")
        if self.stage:
            clauses.append(f"on({self.stage[0]}={self.stage[1]})")
        bar = " | " + " ".join(clauses) if clauses else ""
        return f"{self.dtype}[{', '.join(map(str, self.dims))}{bar}]".replace("[ |", "[|")


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A type that is only a name, such as `node` in lowered programs."""

    name: str

    def __str__(self) -> str:
        return self.name


Type = TensorType | OpaqueType
NODE = OpaqueType("node")
