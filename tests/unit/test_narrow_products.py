"""Products of 8 and 4 bits in tables that hold quantization: rates come out as they went in.

The tables are made by formulas that are written out here: products of known constants, and
quantization that takes as long as its own table says, or as its bytes.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from stagec.machines import Machine, load_machine
from stagec.time.costs.kernels import matmul_seconds
from stagec.time.fit.kernels import Rows, Values
from stagec.time.measured.tables import Table
from tools.fit_machines import checkerboard
from tools.narrow_products import fit_narrow

B200 = load_machine("b200")
TRUE: dict[str, float] = {
    "rate": 0.7,
    "bandwidth": 0.8,
    "overlap": 0.6,
    "start": 2e-6,
    "step": 8e-8,
    "tile": 5e-7,
    "reduction": 3e-6,
}
SIZES = (128, 512, 2048, 8192)
ROWS = np.array([(1, *e) for e in product((1, 16, 256, 4096, 32768), SIZES, SIZES)])


def seconds(dtype: str, rate: float) -> NDArray[np.float64]:
    """Products of this type, each operand read once."""
    old = B200.efficiency.matmul
    constants = {**{n: v for n, v in TRUE.items() if n != "rate"}, "rate": {dtype: rate}}
    efficiency = B200.efficiency.model_copy(update={"matmul": old.model_copy(update=constants)})
    machine = B200.model_copy(update={"efficiency": efficiency})
    _, m, n, k = ROWS.T
    element = {"f8e4m3": 1, "f4e2m1": 0.5625}[dtype]
    actual: NDArray[np.float64] = matmul_seconds(
        machine, dtype, 1, m, n, k, element * k * (m + n) + 2 * m * n
    )
    return actual


def fitted(tables: list[Table]) -> tuple[dict[str, float], dict[str, float]]:
    """The rates, and the largest error of the rows of each report."""
    worst: dict[str, float] = {}

    def report(machine: Machine, rows: Rows, values: Values, title: str) -> str:
        worst[title] = float(np.abs(rows.errors(machine, values)).max())
        return title

    rates, _ = fit_narrow(B200, tables, TRUE, checkerboard, report)
    return rates, worst


def test_measured_quantization_is_taken_off_products_of_8_bits() -> None:
    """Where it is most of the time, a row tells nothing: 9 us, and 3 seconds for 10^12 bytes."""
    moved = 3 * ROWS[:, 1] * ROWS[:, 3]
    sizes, first = np.unique(moved, return_index=True)
    once = moved[first] * 1.5e-12
    quantized = [
        Table("memory", "", False, sizes[:, None], s, "trtllm", op)
        for op, s in (("quantize", 2e-6 + once), ("find_scale", 7e-6 + once))
    ]
    whole = seconds("f8e4m3", 0.6) + 9e-6 + 2 * moved * 1.5e-12 + 1.3e-6
    ill = np.full(len(whole), 1.0)
    tables = [
        *quantized,
        Table("matmul", "f8e4m3", False, ROWS, whole, "trtllm"),
        Table("matmul", "f8e4m3", False, ROWS, ill, "vllm"),
    ]
    rates, worst = fitted(tables)
    assert rates == {"f8e4m3": pytest.approx(0.6, rel=0.02)}
    assert worst["products f8e4m3"] < 0.03
    assert worst["... with their quantization"] < 0.02


def test_quantization_of_4_bits_is_judged_with_its_products() -> None:
    """5 us and half of the bandwidth for 2.5625 bytes an element."""
    quantized = 5e-6 + 2.5625 * ROWS[:, 1] * ROWS[:, 3] / (0.5 * 7.7e12)
    whole = seconds("f4e2m1", 0.5) + quantized
    rates, worst = fitted([Table("matmul", "f4e2m1", False, ROWS, whole, "vllm")])
    assert rates == {"f4e2m1": pytest.approx(0.5, rel=0.02)}
    assert worst["products f4e2m1 with their quantization"] < 0.02
