"""Tables of kernels and collectives that take what a machine's models say, for tests of fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from stagec.machines import Machine
from stagec.program.kernels import Kernel
from stagec.time.costs.kernels import kernel_seconds
from stagec.time.costs.network import collective_seconds, spans
from stagec.time.measured.tables import Table

KIB = 1 << 10
_ONE = [(1, *e) for e in product((64, 192, 1024, 4096), (96, 1024, 5120), (256, 2048, 9000))]
#: And many small ones, bound by memory.
PRODUCTS = [*_ONE, *((b, m, 256, 64) for b in (64, 300, 1000) for m in (200, 512))]
HEADS = [
    (b, 16, g, s, s, w, w) for b, g, s, w in product((1, 3), (4, 16), (512, 1500, 4096), (64, 128))
]
BYTES = [KIB << n for n in range(2, 19)]


def a_table(
    kind: str, dtype: str, rows: Sequence[tuple[int, ...]], seconds: Iterable[float], **given: Any
) -> Table:
    extents = np.array(rows, np.int64)
    return Table(kind, dtype, given.get("causal", False), extents, np.array(list(seconds)), "test")


def products(machine: Machine, dtype: str = "bf16", rows: Any = PRODUCTS) -> Table:
    """Operands of 16 bits, or of 8 with results of 16."""
    width = 1 if dtype.startswith("f8") else 2
    kernels = [
        Kernel("matmul", dtype, e, 0, e[0] * (width * e[3] * (e[1] + e[2]) + 2 * e[1] * e[2]))
        for e in rows
    ]
    return a_table("matmul", dtype, rows, kernel_seconds(machine, kernels))


def attention(machine: Machine, kind: str = "attention", causal: bool = True) -> Table:
    often = 2 if kind == "attention" else 4
    kernels = [
        Kernel(kind, "bf16", e, 0, often * e[0] * e[3] * (e[1] + e[2]) * 2 * e[5], causal=causal)
        for e in HEADS
    ]
    return a_table(kind, "bf16", HEADS, kernel_seconds(machine, kernels), causal=causal)


def memory(machine: Machine) -> Table:
    kernels = [Kernel("memory", "", (), 0, size) for size in BYTES]
    return a_table("memory", "", [(size,) for size in BYTES], kernel_seconds(machine, kernels))


def collectives(machine: Machine, kind: str, ranks: Iterable[int] = (2, 4, 8)) -> Table:
    rows = [(n, size) for n in ranks for size in BYTES]
    seconds = [
        collective_seconds(machine, kind, size, spans(machine, np.arange(n))) for n, size in rows
    ]
    return a_table(kind, "", rows, seconds)
