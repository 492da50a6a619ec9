"""The dimension along which a parameter is sharded at rest (ZeRO, FSDP)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from stagec.ir.expr import Expr, UnboundError
from stagec.ir.facts import Facts
from stagec.ir.queries import Divides, ask
from stagec.ir.types import AxisUse, Dim, TensorType, axis_size

AT_REST = 2


def common_dimensions(types: Iterable[TensorType]) -> list[str]:
    """Dimension names, ordered by the number of parameters that have them, most first."""
    counts = Counter(name for t in types for name in {str(d.size) for d in t.dims})
    return sorted(counts, key=lambda n: (-counts[n], n))


def shard_at_rest(
    type_: TensorType,
    axes: tuple[str, ...],
    preferred: list[str],
    facts: Facts,
    env: Mapping[str, int],
    skip: frozenset[str],
) -> tuple[TensorType, bool]:
    """The type with a further split over the axes at rest, and whether there is a dimension for it.

    An unsplit dimension that divides is preferred; else the axes are appended to a split one.
    Divisibility follows from relations or known sizes; if it is unknown, the first candidate is
    taken, and the caller has to assume that it divides.
    """
    ranked = sorted(
        (i for i, d in enumerate(type_.dims) if str(d.size) not in skip),
        key=lambda i: _rank(type_.dims[i], preferred),
    )
    for i in ranked:
        d = type_.dims[i]
        divisor = axis_size((*d.axes, *axes))
        if facts.divides(divisor, d.size) or may_divide(d.size, divisor, env):
            split = (*d.split, *(AxisUse(a, AT_REST) for a in axes))
            return replace(type_.with_dim(i, replace(d, split=split)), placed=True), True
    return type_, False


def _rank(dim: Dim, preferred: list[str]) -> tuple[bool, bool, int]:
    """The order in which dimensions are tried: split ones late, those of literal sizes last."""
    return dim.size.value is not None, bool(dim.split), preferred.index(str(dim.size))


def may_divide(size: Expr, divisor: Expr, env: Mapping[str, int]) -> bool:
    """Whether it divides for known values; assumed if a value is missing."""
    try:
        return ask(Divides(divisor, size), env)
    except UnboundError:
        return True
