"""Fits the constants of kernels (`stagec.machines.kernel_efficiency`) to measured kernels.

The loss is the mean absolute error of the logarithm, at most 1 for each row, so that outliers count
but do not dominate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.machines import Machine
from stagec.time.costs.kernels import attention_seconds, matmul_seconds, memory_seconds
from stagec.time.fit.search import simplex
from stagec.time.measured.tables import Table

Floats: TypeAlias = NDArray[np.float64]
Extents: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Values: TypeAlias = Mapping[str, float]
Bounds: TypeAlias = Mapping[str, tuple[float, float]]
Model: TypeAlias = Callable[[Machine, Values, Extents], Floats]
#: The bounds of each constant; `rate` is that of one type.
BOUNDS: Mapping[str, Bounds] = {
    "matmul": {
        "rate": (0.3, 1.0),
        "bandwidth": (0.4, 1.0),
        "overlap": (0.0, 1.0),
        "start": (0.5e-6, 6e-6),
        "step": (0.0, 4e-7),
        "tile": (0.0, 8e-6),
        "reduction": (0.5e-6, 6e-6),
    },
    "attention": {
        "rate": (0.3, 1.0),
        "exponentials": (8.0, 24.0),
        "overlap": (0.0, 1.0),
        "uneven": (0.0, 1.0),
        "start": (2e-6, 12e-6),
        "tile": (0.0, 5e-6),
    },
    "attention_backward": {"backward": (0.2, 1.0)},
    "memory": {"bandwidth": (0.4, 1.0), "start": (0.5e-6, 6e-6)},
    # types of fewer bits, whose kernels reach a smaller share of a higher peak
    "narrow": {"rate": (0.2, 1.0)},
}
#: Kernels bound by memory that last this many seconds determine the bandwidth, shorter ones the
#: start.
LONG = 20e-6
#: Bytes of an element, as operands of products; results have 2 at least. 16 elements of 4 bits have
#: a scale of 8 bits (NVFP4).
ELEMENT = {"f64": 8.0, "f32": 4.0, "f8e4m3": 1.0, "f8e5m2": 1.0, "i8": 1.0, "f4e2m1": 0.5625}
_WIDE = 2.0
_SAMPLE = 3000
#: The loss of a constant whose distance from its first value is that between its bounds. It is
#: negligible where rows determine the constant; where none does, the constant stays.
_PULL = 0.003


@dataclass(frozen=True)
class Rows:
    """Measured kernels, a row of `extents` and seconds for each, and the model of their seconds on
    a machine with given constants."""

    extents: Extents
    measured: Floats
    model: Model

    def of(self, chosen: Mask | NDArray[np.int64]) -> Rows:
        """Some of the rows."""
        return Rows(self.extents[chosen], self.measured[chosen], self.model)

    def errors(self, machine: Machine, values: Values) -> Floats:
        """Logarithms of modelled over measured seconds."""
        errors: Floats = np.log(self.model(machine, values, self.extents)) - np.log(self.measured)
        return errors


def product_rows(tables: Sequence[Table]) -> Rows:
    """The rows of tables of products of one type."""
    dtype = tables[0].dtype
    element = ELEMENT.get(dtype, _WIDE)
    result = max(element, _WIDE)

    def model(machine: Machine, values: Values, extents: Extents) -> Floats:
        batch, m, n, k = extents.T.astype(float)
        size = batch * ((m * k + k * n) * element + result * m * n)
        used = with_constants(machine, "matmul", values, dtype)
        return matmul_seconds(used, dtype, batch, m, n, k, size)

    return _rows(tables, model)


def attention_rows(tables: Sequence[Table]) -> Rows:
    """The rows of tables of attention of one kind and type; the last extent says whether the mask
    is causal. Single queries have the machine's kernel for decoding.

    Backward reads what forward does, its result and the gradient of that, and writes three
    gradients: twice the bytes of forward.
    """
    dtype, backward = tables[0].dtype, tables[0].kind == "attention_backward"
    element = ELEMENT.get(dtype, _WIDE)

    def model(machine: Machine, values: Values, extents: Extents) -> Floats:
        b, h, g, q, t, qk, v = extents.T[:7].astype(float)
        size = element * (moved(extents) * (2 if backward else 1))
        used = with_constants(machine, "attention", values, dtype)
        decodes = bool(np.all((q == 1) & (qk == v)))
        return attention_seconds(
            *(used, dtype, b, h, g, q, t, qk, v, size),
            causal=extents[:, 7] > 0,
            backward=backward,
            form=used.efficiency.attention.decodes(element < _WIDE) if decodes else "",
        )

    marked = [np.insert(t.extents, 7, int(t.causal), axis=1) for t in tables]
    return replace(_rows(tables, model), extents=np.concatenate(marked))


def moved(extents: Extents) -> Floats:
    """The number of elements of queries, keys, values and results."""
    b, h, g, q, t, qk, v = extents.T[:7].astype(float)
    numbers: Floats = b * (q * h + t * g) * (qk + v)
    return numbers


def memory_rows(tables: Sequence[Table]) -> Rows:
    """The rows of tables of kernels bound by memory, of all ops."""

    def model(machine: Machine, values: Values, extents: Extents) -> Floats:
        return memory_seconds(with_constants(machine, "memory", values), extents[:, 0])

    return _rows(tables, model)


def _rows(tables: Sequence[Table], model: Model) -> Rows:
    extents = np.concatenate([t.extents for t in tables])
    return Rows(extents, np.concatenate([t.seconds for t in tables]), model)


def with_constants(machine: Machine, kind: str, values: Values, dtype: str = "bf16") -> Machine:
    """The machine with other constants of a kind; `rate` is that of a type. Names that are not
    constants of the kind are ignored."""
    old = getattr(machine.efficiency, kind)
    new: dict[str, Any] = {n: v for n, v in values.items() if n != "rate" and n in vars(old)}
    if "rate" in values:
        new["rate"] = {**old.rate, dtype: values["rate"]}
    efficiency = machine.efficiency.model_copy(update={kind: old.model_copy(update=new)})
    return machine.model_copy(update={"efficiency": efficiency})


def fit(
    machine: Machine,
    rows: Rows,
    bounds: Bounds,
    fixed: Values | None = None,
    first: Values | None = None,
) -> dict[str, float]:
    """The constants of least loss within bounds, to four significant digits, with the fixed ones.

    A simplex search starts in the middle of the bounds and is restarted twice where it ended. With
    `first` constants a second search starts there, and constants that no row determines stay. Of
    more than 3,000 rows the searches use 3,000, always the same.
    """
    sample = rows.of(np.random.default_rng(0).permutation(len(rows.measured))[:_SAMPLE])
    low, high = np.array(list(bounds.values())).T
    starts = [np.full(len(bounds), 0.5)]
    if first is not None:
        given = np.array([first[name] for name in bounds])
        starts.append(np.clip((given - low) / (high - low), 0, 1))

    def values(point: Floats) -> dict[str, float]:
        placed = low + np.clip(point, 0, 1) * (high - low)
        return {**(fixed or {}), **dict(zip(bounds, placed.tolist(), strict=True))}

    def loss(point: Floats) -> float:
        outside = np.abs(point - np.clip(point, 0, 1)).sum()
        errors = np.abs(sample.errors(machine, values(point)))
        pull = _PULL * ((point - starts[1]) ** 2).sum() if first is not None else 0.0
        return float(np.minimum(errors, 1).mean() + outside + pull)

    def search(point: Floats) -> Floats:
        for _ in range(3):
            corners = np.vstack([point, point + 0.2 * np.eye(len(bounds)) * np.sign(0.6 - point)])
            point = simplex(loss, corners, 150 * len(bounds) - 1)
        return point

    best = min(map(search, starts), key=loss)
    return {n: float(f"{v:.4g}") for n, v in values(best).items()}


def fit_memory(machine: Machine, rows: Rows, start: float = 2e-6) -> dict[str, float]:
    """Constants of kernels bound by memory: the bandwidth of long kernels with a given start, then
    the start of all. Kernels of medium length find part of their data in a cache."""
    bandwidth, begin = ({n: BOUNDS["memory"][n]} for n in ("bandwidth", "start"))
    fitted = fit(machine, rows.of(rows.measured > LONG), bandwidth, {"start": start})
    return fit(machine, rows, begin, fitted)
