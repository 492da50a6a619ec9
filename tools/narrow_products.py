"""Products of 8 and 4 bits in the tables of aiconfigurator-core, which include quantization.

A framework quantizes the left operand of each product that it times (collect_gemm.py, and the
linear layers that it calls). In 8 bits, trtllm finds the largest element, quantizes, and converts
the scale: the first two are in separate tables over the same grid, and are subtracted; the third
moves nothing and is a constant. Rows whose remainder is less than a quarter are not used. In 4 bits
no table has quantization: its kernel is modelled with two constants, and evaluated together with
the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stagec.machines import Machine
from stagec.program.kernels import Kernel
from stagec.time.costs.kernels import memory_seconds
from stagec.time.fit.kernels import (
    BOUNDS,
    ELEMENT,
    Extents,
    Floats,
    Mask,
    Rows,
    Values,
    fit,
    product_rows,
)
from stagec.time.measured.tables import Measured, Table, consensus

#: The framework whose products of 8 bits are fitted: trtllm calls cuBLASLt, as training does;
#: sglang and vllm use CUTLASS kernels.
EIGHT_BITS = "trtllm"
#: The seconds of quantization in addition to the subtracted ones, and its share of the bandwidth in
#: 4 bits.
_QUANTIZING = {"quantizing": (0.0, 12e-6)}
_QUANTIZED = {"quantized": (0.1, 1.0)}
_WIDE = 2
_LEAST = 0.25
_TRAINING = 1024
Split = Callable[[Rows], Mask]
Report = Callable[[Machine, Rows, Values, str], str]


def fit_narrow(
    machine: Machine, tables: Sequence[Table], values: Values, split: Split, report: Report
) -> tuple[dict[str, float], list[str]]:
    """The rates of types of fewer bits, with all other constants of products fixed."""
    fits = {"f8e4m3": _fit_eight_bits, "f4e2m1": _fit_four_bits}
    rates: dict[str, float] = {}
    reports: list[str] = []
    for dtype, fitted in fits.items():
        products = [t for t in tables if (t.kind, t.dtype) == ("matmul", dtype)]
        if products:
            rates[dtype], sentence = fitted(machine, tables, products, values, split, report)
            reports.append(sentence)
    return rates, reports


def _fit_eight_bits(
    machine: Machine,
    tables: Sequence[Table],
    products: Sequence[Table],
    values: Values,
    split: Split,
    report: Report,
) -> tuple[float, str]:
    (table,) = consensus(t for t in products if t.source == EIGHT_BITS)
    quantized = _measured_quantization(machine, tables)
    rest = table.seconds - quantized(table.extents)
    usable = rest >= _LEAST * table.seconds
    rows = _with_quantization([table], lambda _, v, e: np.full(len(e), v["quantizing"]))
    alone = replace(rows, measured=rest).of(usable)
    board = split(alone)
    bounds = {**BOUNDS["narrow"], **_QUANTIZING}
    constants = fit(machine, alone.of(board), bounds, values)
    sentence = report(machine, alone.of(~board), constants, "products f8e4m3")
    report(machine, alone.of(_of_training(alone) & ~board), constants, "... of training")
    whole = _with_quantization([table], lambda _, v, e: quantized(e) + v["quantizing"])
    report(machine, whole.of(~split(whole)), constants, "... with their quantization")
    return constants["rate"], sentence


def _measured_quantization(
    machine: Machine, tables: Sequence[Table]
) -> Callable[[Extents], Floats]:
    """The seconds to compute the scale and to apply it, measured or, outside of the tables,
    modelled."""
    known = Measured([t for t in tables if t.kind == "memory" and t.source == EIGHT_BITS])

    def seconds(extents: Extents) -> Floats:
        size = (_WIDE + ELEMENT["f8e4m3"]) * extents[:, 1] * extents[:, 3]
        kernels = [Kernel("memory", "", (), 0, int(b)) for b in size]
        parts = [
            known.seconds([k._replace(op=op) for k in kernels])[0]
            for op in ("quantize", "find_scale")
        ]
        both = parts[0] + parts[1]
        return np.where(np.isfinite(both), both, memory_seconds(machine, size))

    return seconds


def _fit_four_bits(
    machine: Machine,
    _: Sequence[Table],
    products: Sequence[Table],
    values: Values,
    split: Split,
    report: Report,
) -> tuple[float, str]:
    def quantization(machine: Machine, values: Values, extents: Extents) -> Floats:
        elements: Floats = (extents[:, 1] * extents[:, 3]).astype(np.float64)
        bandwidth = machine.memory.bandwidth.value * values["quantized"]
        return values["quantizing"] + (_WIDE + ELEMENT["f4e2m1"]) * elements / bandwidth

    rows = _with_quantization(consensus(products), quantization)
    board = split(rows)
    bounds = {**BOUNDS["narrow"], **_QUANTIZING, **_QUANTIZED}
    constants = fit(machine, rows.of(board), bounds, values)
    title = "products f4e2m1 with their quantization"
    sentence = report(machine, rows.of(~board), constants, title)
    report(machine, rows.of(_of_training(rows) & ~board), constants, "... of training")
    rest = rows.measured - quantization(machine, constants, rows.extents)
    alone = replace(product_rows(consensus(products)), measured=rest)
    usable = rest >= _LEAST * rows.measured
    report(machine, alone.of(usable & ~board), constants, "... alone, by the model of quantization")
    return constants["rate"], sentence


def _with_quantization(
    tables: Sequence[Table], beside: Callable[[Machine, Values, Extents], Floats]
) -> Rows:
    rows = product_rows(tables)

    def model(machine: Machine, values: Values, extents: Extents) -> Floats:
        return rows.model(machine, values, extents) + beside(machine, values, extents)

    return replace(rows, model=model)


def _of_training(rows: Rows) -> Mask:
    chosen: Mask = rows.extents[:, 1:].min(axis=1) >= _TRAINING
    return chosen
