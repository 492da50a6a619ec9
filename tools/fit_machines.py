"""Fits the constants of kernels (`stagec.machines.kernel_efficiency`) to the measured tables of
aiconfigurator-core, and prints how far off they are.

    pip install 'stagec[kernels]'
    python tools/fit_machines.py h100-sxm b200          print the fit
    python tools/fit_machines.py --write                ... of all machines, into their texts

Where several frameworks measured a kernel, its time is their median. Every second point of the
grid is fitted on, the others are left out (a checkerboard: interpolation); a second fit leaves out
all products of training, those with m, n and k of 1,024 and more (extrapolation by size); kinds
that are in no fit are predicted (decoding, latent attention: extrapolation by kind). The loss is
the mean error of the logarithm, at most 1 a row, so that ill rows count but do not rule; no row is
dropped but heads of more than 256 elements, for which frameworks take slower kernels of Triton.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.machines import Machine, load_machine
from stagec.machines.kernel_efficiency import (
    AttentionEfficiency,
    MatmulEfficiency,
    MemoryEfficiency,
)
from stagec.program.kernels import Kernel
from stagec.time.aiconfigurator import FOLDERS, read_tables
from stagec.time.kernels import attention_seconds, matmul_seconds, memory_seconds
from stagec.time.tables import Measured, Table, consensus

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Values: TypeAlias = Mapping[str, float]
#: Where a constant is sought.
BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "matmul": {
        "rate": (0.3, 1.0),
        "bandwidth": (0.4, 1.0),
        "saturation": (0.2, 1.0),
        "overlap": (0.0, 1.0),
        "start": (0.5e-6, 6e-6),
        "tile": (0.0, 3e-6),
        "reduction": (0.5e-6, 6e-6),
    },
    "attention": {
        "rate": (0.3, 1.0),
        "overlap": (0.0, 1.0),
        "uneven": (0.0, 1.0),
        "start": (2e-6, 12e-6),
        "tile": (0.0, 5e-6),
        # Not of the kernel: what tables of a prefill copy into a cache beside it.
        "copied": (0.0, 3.0),
    },
    "memory": {"bandwidth": (0.4, 1.0), "start": (0.5e-6, 6e-6)},
    # Seconds of what quantizes beside products of fewer bits, more than their kernels alone.
    "narrow": {"rate": (0.2, 1.0), "quantizing": (0.0, 12e-6)},
}
#: Bytes of an element, as operands of products.
ELEMENT = {"bf16": 2.0, "f8e4m3": 1.0, "f4e2m1": 0.5}
#: Whose kernels are fitted where frameworks take different ones: FlashAttention, where there is
#: one; cuBLASLt, not the CUTLASS kernels of servers, for narrow types; one kernel that quantizes.
ATTENTION = {"bf16": "vllm", "f8e4m3": "sglang"}
NARROW = "trtllm"
MEMORY = "vllm"
#: Machines of the same processors and bandwidth share, whose tables there are not.
ALIKE = {"h100-sxm": ("h800", "h100-500w"), "a100-80g": ("a100-40g",)}
PACKAGE = "aiconfigurator-core 0.12.0"
_TIMES = ("start", "tile", "reduction")
_SAMPLE = 3000
_LONG = 20e-6
_TRAINING = 1024
_WIDEST = 256


@dataclass(frozen=True)
class Rows:
    """Measured kernels, and the model of them with given constants."""

    title: str
    extents: NDArray[np.int64]
    measured: Floats
    model: Callable[[Machine, Values, NDArray[np.int64]], Floats]

    def of(self, chosen: Mask) -> Rows:
        return Rows(self.title, self.extents[chosen], self.measured[chosen], self.model)

    def errors(self, machine: Machine, values: Values) -> Floats:
        """Logarithms of modelled over measured."""
        found: Floats = np.log(self.model(machine, values, self.extents)) - np.log(self.measured)
        return found

    def checkerboard(self) -> Mask:
        """Every second point of the grid."""
        places = [np.unique(c, return_inverse=True)[1].ravel() for c in self.extents.T]
        distinct = [p for i, p in enumerate(places) if not _repeats(places[:i], p)]
        found: Mask = np.sum(distinct, axis=0) % 2 == 0
        return found


def _repeats(earlier: Sequence[Any], column: Any) -> bool:
    return any(np.array_equal(column, c) for c in earlier)


def main() -> None:
    """Fit, print, and write with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("machines", nargs="*", help="names of machines; all that have tables")
    parser.add_argument("--tables", type=Path, help="the unpacked package aiconfigurator_core")
    parser.add_argument("--write", action="store_true", help="write the constants into the texts")
    given = parser.parse_args()
    print("| machine | kernels | rows left out | median | p90 | over 20 us | median | p90 |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.machines or FOLDERS:
        sections = dict(fitted(_unfitted(load_machine(name)), read_tables(name, given.tables)))
        if given.write:
            write(Path(f"stagec/machines/{name}.toml"), sections)
            for other in ALIKE.get(name, ()):
                write(Path(f"stagec/machines/{other}.toml"), _of_another(sections, name))
        else:
            print("\n".join(f"[{title}]\n{body}" for title, body in sections.items()))


def _unfitted(machine: Machine) -> Machine:
    kinds = {
        "matmul": MatmulEfficiency(),
        "attention": AttentionEfficiency(),
        "memory": MemoryEfficiency(),
    }
    efficiency = machine.efficiency.model_copy(update=kinds)
    return machine.model_copy(update={"efficiency": efficiency})


def fitted(machine: Machine, tables: Sequence[Table]) -> Iterator[tuple[str, str]]:
    """Sections of a text with their lines, after printing errors."""
    tables = [t for t in alone(machine, tables) if t.op in ("", "quantize")]
    tables = [t for t in tables if t.kind != "memory" or t.source == MEMORY]
    by_key = {(t.kind, t.dtype, t.causal): t for t in consensus(tables)}
    frameworks_apart(machine, tables, by_key)
    for dtype, source in ATTENTION.items():
        chosen = [t for t in tables if (t.kind, t.dtype) == ("attention", dtype)]
        chosen = [t for t in chosen if t.source == source and not _latent(t).any()]
        by_key |= {(t.kind, t.dtype, t.causal): t for t in consensus(chosen)}
    products = _fit_products(machine, by_key)
    memory = _fit_memory(machine, by_key, products)
    machine = with_constants(machine, "memory", memory[0])
    machine = with_constants(machine, "matmul", products[0])
    rates, told = _other_rates(machine, by_key, products[0], _products_of, "matmul")
    origin = f"{PACKAGE}, medians of sglang, trtllm and vllm, fewer bits of {NARROW}"
    yield _section("matmul", products[0], rates, [products[1], *told], origin)
    yield _section("memory", memory[0], {}, [memory[1]], f"{PACKAGE}, {MEMORY}")
    attention = _fit_attention(machine, by_key)
    machine = with_constants(machine, "attention", attention[0])
    other, told = _other_rates(machine, by_key, attention[0], _attention_of, "attention")
    origin = f"{PACKAGE}, {' and '.join(f'{n} of {s}' for n, s in ATTENTION.items())}"
    yield _section("attention", attention[0], other, [attention[1], *told], origin)
    _predicted(machine, tables, attention[0])


def _fit_products(machine: Machine, tables: Mapping[Any, Table]) -> tuple[dict[str, float], str]:
    rows = _products_of(tables["matmul", "bf16", False])
    board = rows.checkerboard()
    values = fit(machine, rows.of(board), BOUNDS["matmul"])
    told = report(machine, rows.of(~board), values, "products bf16")
    training = rows.extents[:, 1:].min(axis=1) >= _TRAINING
    report(machine, rows.of(training & ~board), values, "... of training")
    blind = fit(machine, rows.of(~training), BOUNDS["matmul"])
    report(machine, rows.of(training), blind, "... of training, none fitted")
    return values, told


def _fit_memory(
    machine: Machine, tables: Mapping[Any, Table], products: tuple[Values, str]
) -> tuple[dict[str, float], str]:
    table = tables.get(("memory", "", False))
    if table is None:
        values = {n: products[0][n] for n in BOUNDS["memory"]}
        return values, "no table of kernels bound by memory: those of products"
    rows = Rows("memory", table.extents, table.seconds, _memory_model)
    board, long = rows.checkerboard(), rows.measured > _LONG
    bandwidth, start = ({n: BOUNDS["memory"][n]} for n in BOUNDS["memory"])
    found = fit(machine, rows.of(board & long), bandwidth, {"start": 2e-6})
    values = fit(machine, rows.of(board), start, found)
    return values, report(machine, rows.of(~board), values, "quantization, 3 bytes an element")


def _fit_attention(machine: Machine, tables: Mapping[Any, Table]) -> tuple[dict[str, float], str]:
    rows = _attention_of(_plain(tables["attention", "bf16", True]))
    board = rows.checkerboard()
    values = fit(machine, rows.of(board), BOUNDS["attention"])
    told = report(machine, rows.of(~board), values, "attention bf16, causal")
    long = rows.extents[:, 3] >= _TRAINING
    report(machine, rows.of(~board & long), values, "... of 1,024 queries and more")
    blind = fit(machine, rows.of(~long), BOUNDS["attention"])
    report(machine, rows.of(long), blind, "... of 1,024 and more, none fitted")
    return values, told


def _other_rates(
    machine: Machine,
    tables: Mapping[Any, Table],
    values: Values,
    rows_of: Callable[[Table], Rows],
    kind: str,
) -> tuple[dict[str, float], list[str]]:
    """The rates of narrower types, all other constants as they are."""
    rates: dict[str, float] = {}
    told: list[str] = []
    for dtype in ("f8e4m3", "f4e2m1"):
        table = tables.get((kind, dtype, kind == "attention"))
        if table is None:
            continue
        rows = rows_of(_plain(table) if kind == "attention" else table)
        board = rows.checkerboard()
        bounds = BOUNDS["narrow"] if kind == "matmul" else {"rate": BOUNDS[kind]["rate"]}
        found = fit(machine, rows.of(board), bounds, values)
        rates[dtype] = found["rate"]
        title = f"{'products' if kind == 'matmul' else 'attention'} {dtype}"
        told.append(report(machine, rows.of(~board), found, title))
        if kind == "matmul":
            training = rows.extents[:, 1:].min(axis=1) >= _TRAINING
            report(machine, rows.of(training & ~board), found, "... of training")
    return rates, told


def _predicted(machine: Machine, tables: Sequence[Table], values: Values) -> None:
    """Kinds and frameworks that no fit has seen."""
    for table in (t for t in tables if (t.kind, t.dtype) == ("experts", "bf16")):
        rows = _experts(table)
        report(machine, rows, values, f"experts of {table.source}, none fitted")
    for source in ("sglang", "trtllm", "vllm"):
        fitted_on = source == ATTENTION["bf16"]
        found = [t for t in tables if (t.kind, t.dtype, t.source) == ("attention", "bf16", source)]
        for table in found:
            e, latent = table.extents, _latent(table)
            plain = ~latent & (e[:, 5] <= _WIDEST) & (e[:, 3] > 1)
            for title, chosen in (
                (f"attention of {source}", plain & ~np.bool_(table.causal & fitted_on)),
                (f"latent attention of {source}", latent),
                (f"decoding of {source}", ~latent & (e[:, 3] == 1) & ~np.bool_(table.causal)),
            ):
                if chosen.any():
                    mask = "causal" if table.causal else "no mask"
                    rows = _attention_of(_where(table, chosen))
                    report(machine, rows, values, f"{title}, {mask}, none fitted")


def _experts(table: Table) -> Rows:
    """Both grouped products, and the rows that are sorted, gated and summed between them."""

    def model(machine: Machine, values: Values, extents: NDArray[np.int64]) -> Floats:
        e, m, d, f = extents.T.astype(float)
        up = matmul_seconds(
            machine, "bf16", e, m, 2 * f, d, 2 * e * (m * d + 2 * d * f + 2 * m * f)
        )
        down = matmul_seconds(machine, "bf16", e, m, d, f, 2 * e * (m * d + d * f + m * f))
        moved = [4 * e * m * d, 6 * e * m * f, 4 * e * m * d]
        return up + down + sum(memory_seconds(machine, b) for b in moved)

    return Rows("experts", table.extents, table.seconds, model)


def _latent(table: Table) -> Mask:
    found: Mask = table.extents[:, 5] != table.extents[:, 6]
    return found


def alone(machine: Machine, tables: Sequence[Table]) -> Iterator[Table]:
    """The tables, products of 8 and 4 bits without the quantization that is measured with them.

    Taken off is what the framework needs for that alone, to find the scale and to apply it; for 4
    bits, what the model says. At least a quarter of what was measured is left.
    """
    for table in tables:
        if table.kind != "matmul" or table.dtype == "bf16":
            yield table
            continue
        if table.source != NARROW:
            continue
        own = [t for t in tables if t.kind == "memory" and t.source == table.source]
        quantized = Measured(own)
        m, k = table.extents[:, 1], table.extents[:, 3]
        extra = memory_seconds(machine, (2 + ELEMENT[table.dtype]) * m * k)
        if table.dtype == "f8e4m3":
            kernels = [Kernel("memory", "", (), 0, int(b)) for b in 3 * m * k]
            scaled, scaling = (
                quantized.seconds([replace(q, op=op) for q in kernels])[0]
                for op in ("quantize", "find_scale")
            )
            known = np.isfinite(scaled) & np.isfinite(scaling)
            extra = np.where(known, scaled + scaling, extra)
        seconds = np.maximum(table.seconds - extra, table.seconds / 4)
        yield replace(table, seconds=seconds)


def frameworks_apart(
    machine: Machine, tables: Sequence[Table], medians: Mapping[Any, Table]
) -> None:
    """How far each framework is from the median of all: what no model can explain."""
    for (kind, dtype, causal), median in medians.items():
        if kind not in ("matmul", "attention") or dtype != "bf16" or (kind, causal) == _DECODED:
            continue
        known = {tuple(e): s for e, s in zip(median.extents.tolist(), median.seconds, strict=True)}
        apart = [
            abs(seconds / known[tuple(extents)] - 1)
            for t in tables
            if (t.kind, t.dtype, t.causal) == (kind, dtype, causal)
            for extents, seconds in zip(t.extents.tolist(), t.seconds, strict=True)
        ]
        title = f"one framework and the median: {'products' if kind == 'matmul' else kind}"
        print(f"| {machine.name} | {title} | {len(apart):,} | {_percent(np.array(apart))} | | | |")


_DECODED = ("attention", False)


def _plain(table: Table) -> Table:
    """Heads of one width that FlashAttention computes."""
    e = table.extents
    return _where(table, ~_latent(table) & (e[:, 5] <= _WIDEST))


def _where(table: Table, chosen: Mask) -> Table:
    extents, seconds = table.extents[chosen], table.seconds[chosen]
    return Table(table.kind, table.dtype, table.causal, extents, seconds, table.source)


def _products_of(table: Table) -> Rows:
    element = ELEMENT[table.dtype]

    def model(machine: Machine, values: Values, extents: NDArray[np.int64]) -> Floats:
        _, m, n, k = extents.T.astype(float)
        size = (m * k + k * n) * element + 2 * m * n
        used = with_constants(machine, "matmul", values, table.dtype)
        seconds = matmul_seconds(used, table.dtype, 1, m, n, k, size)
        return seconds + values.get("quantizing", 0)

    return Rows(f"products {table.dtype}", table.extents, table.seconds, model)


def _attention_of(table: Table) -> Rows:
    element = ELEMENT[table.dtype]

    def model(machine: Machine, values: Values, extents: NDArray[np.int64]) -> Floats:
        b, h, g, q, t, qk, v = extents.T.astype(float)
        moved = b * (q * h + t * g) * (qk + v)
        used = with_constants(machine, "attention", values, table.dtype)
        size, causal = element * moved, table.causal
        seconds = attention_seconds(used, table.dtype, b, h, g, q, t, qk, v, size, causal=causal)
        if not causal:
            return seconds
        return seconds + memory_seconds(machine, 4 * values["copied"] * moved)

    return Rows(f"attention {table.dtype}", table.extents, table.seconds, model)


def _memory_model(machine: Machine, values: Values, extents: NDArray[np.int64]) -> Floats:
    return memory_seconds(with_constants(machine, "memory", values), extents[:, 0])


def with_constants(machine: Machine, kind: str, values: Values, dtype: str = "bf16") -> Machine:
    """The machine with other constants of a kind; `rate` is that of a type."""
    old = getattr(machine.efficiency, kind)
    new: dict[str, Any] = {n: v for n, v in values.items() if n != "rate" and n in vars(old)}
    if "rate" in values:
        new["rate"] = {**old.rate, dtype: values["rate"]}
    efficiency = machine.efficiency.model_copy(update={kind: old.model_copy(update=new)})
    return machine.model_copy(update={"efficiency": efficiency})


def fit(
    machine: Machine,
    rows: Rows,
    bounds: Mapping[str, tuple[float, float]],
    fixed: Values | None = None,
) -> dict[str, float]:
    """The constants of least loss within bounds, to four figures: a simplex search (Nelder and
    Mead) from the middle, started again once where it ended. Rows are a sample, always the same."""
    optimize: Any = importlib.import_module("scipy.optimize")
    chosen = np.random.default_rng(0).permutation(len(rows.measured))[:_SAMPLE]
    sample = Rows(rows.title, rows.extents[chosen], rows.measured[chosen], rows.model)
    low, high = np.array(list(bounds.values())).T

    def values(point: Floats) -> dict[str, float]:
        placed = low + np.clip(point, 0, 1) * (high - low)
        return {**(fixed or {}), **dict(zip(bounds, placed.tolist(), strict=True))}

    def loss(point: Floats) -> float:
        outside = np.abs(point - np.clip(point, 0, 1)).sum()
        found = np.abs(sample.errors(machine, values(point)))
        return float(np.minimum(found, 1).mean() + outside)

    point = np.full(len(bounds), 0.5)
    for _ in range(3):
        simplex = np.vstack([point, point + 0.2 * np.eye(len(bounds)) * np.sign(0.6 - point)])
        options = {"initial_simplex": simplex, "maxiter": 150 * len(bounds), "fatol": 1e-6}
        point = optimize.minimize(loss, point, method="Nelder-Mead", options=options).x
    return {n: float(f"{v:.4g}") for n, v in values(point).items()}


def report(machine: Machine, rows: Rows, values: Values, title: str) -> str:
    """Prints the errors of rows that were left out, and tells them in a sentence."""
    error = np.abs(np.expm1(rows.errors(machine, values)))
    long = rows.measured > _LONG
    cells = (f"{len(error):,}", _percent(error), f"{long.sum():,}", _percent(error[long]))
    print(f"| {machine.name} | {title} | {' | '.join(cells)} |", flush=True)
    middle, most = (f"{100 * np.quantile(error, q):.1f}%" for q in (0.5, 0.9))
    return f"{title}: median {middle}, p90 {most} of {len(error):,} rows left out"


def _percent(error: Floats) -> str:
    if not len(error):
        return "- | -"
    return " | ".join(f"{100 * np.quantile(error, q):.1f}%" for q in (0.5, 0.9))


def _section(
    kind: str, values: Values, rates: Values, told: Sequence[str], origin: str
) -> tuple[str, str]:
    shown = {n: v for n, v in values.items() if n not in ("rate", "copied")}
    lines = [
        f'{n} = "{round(v * 1e6, 3):g} us"' if n in _TIMES else f"{n} = {round(v, 4):g}"
        for n, v in shown.items()
    ]
    if "rate" in values:
        every = {"bf16": values["rate"], **rates}
        lines.insert(0, f"rate = {{ {', '.join(f'{n} = {v:.4g}' for n, v in every.items())} }}")
    lines.append(f'fitted = "{origin}; {"; ".join(told)}"')
    return f"efficiency.{kind}", "\n".join(lines)


def _of_another(sections: Mapping[str, str], name: str) -> dict[str, str]:
    told = f'fitted = "no tables of its own, constants of {name}, the same processors: '
    return {title: body.replace('fitted = "', told) for title, body in sections.items()}


def write(path: Path, sections: Mapping[str, str]) -> None:
    """The text with these sections in place of those that it has."""
    text = path.read_text(encoding="utf-8")
    for title in sections:
        text = re.sub(rf"(?ms)^\[{re.escape(title)}\]\n.*?(?=^\[|\Z)", "", text)
    parts = [text.rstrip(), *(f"[{title}]\n{body}" for title, body in sections.items())]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
