"""Fits the constants of kernels (`stagec.machines.kernel_efficiency`) to the measured tables of
aiconfigurator-core, and prints their errors.

    pip install 'stagec[kernels]'
    python -m tools.fit_machines h100-sxm b200          print the fit
    python -m tools.fit_machines --write                ... of all machines, into their texts

The time of a kernel of several frameworks is their median. Every second point of the grid is
fitted, and the others are left out (a checkerboard: interpolation); a second fit leaves out all
products of training, those with m, n and k of at least 1,024 (extrapolation by size); kinds that
are in no fit are predicted (decoding, latent attention: extrapolation by kind). The loss is the
mean absolute error of the logarithm, at most 1 per row, so that outliers do not dominate. No rows
are dropped except heads of more than 256 elements, and slower kernels of Triton, which frameworks
use if libraries have none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stagec.machines import Machine, load_machine
from stagec.machines.kernel_efficiency import (
    AttentionEfficiency,
    MatmulEfficiency,
    MemoryEfficiency,
)
from stagec.machines.writing import kernel_section, with_sections
from stagec.time.costs.kernels import matmul_seconds, memory_seconds
from stagec.time.fit.kernels import (
    BOUNDS,
    ELEMENT,
    LONG,
    Extents,
    Floats,
    Mask,
    Rows,
    Values,
    attention_rows,
    fit,
    fit_memory,
    memory_rows,
    product_rows,
    with_constants,
)
from stagec.time.measured.aiconfigurator import FOLDERS, read_tables
from stagec.time.measured.tables import Table, consensus
from tools.narrow_products import EIGHT_BITS, fit_narrow

#: Work in these tables in addition to kernels: copies of keys and values into a cache and the
#: quantization of queries in prefill, as multiples of the bytes of one read and write; and the
#: seconds of quantization in addition to its kernels.
COPIED = {"copied": (0.0, 4.0)}
QUANTIZED = {"quantized": (0.0, 4.0)}
QUANTIZING = {"quantizing": (0.0, 12e-6)}
#: The candidate blocks of attention: queries, and whether heads that share keys are packed.
BLOCKS = [(queries, packed) for queries in (128, 256) for packed in (False, True)]
#: The framework whose kernels are fitted if frameworks differ: one with FlashAttention, or with a
#: single kernel for quantization. For products of fewer bits see `tools.narrow_products`.
ATTENTION = {"bf16": "vllm", "f8e4m3": "sglang"}
MEMORY = "vllm"
#: Machine -> machines without tables, with the same processors and ratio of bandwidths.
ALIKE = {"h100-sxm": ("h800", "h100-500w"), "a100-80g": ("a100-40g",)}
#: Bytes of an element of bf16.
_WIDE = 2.0
PACKAGE = "aiconfigurator-core 0.12.0"
#: Elements of a token in the cache of latent attention (DeepSeek-V3: 512, and 64 with positions).
_LATENT = 576
_TRAINING = 1024
_WIDEST = 256


def checkerboard(rows: Rows) -> Mask:
    """Every second point of the grid."""
    places = [np.unique(c, return_inverse=True)[1].ravel() for c in rows.extents.T]
    distinct = [p for i, p in enumerate(places) if not _repeats(places[:i], p)]
    board: Mask = np.sum(distinct, axis=0) % 2 == 0
    return board


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
            print("\n".join(body.rstrip() for body in sections.values()))


def _unfitted(machine: Machine) -> Machine:
    kinds = {
        "matmul": MatmulEfficiency(),
        "attention": AttentionEfficiency(),
        "memory": MemoryEfficiency(),
    }
    efficiency = machine.efficiency.model_copy(update=kinds)
    return machine.model_copy(update={"efficiency": efficiency})


def fitted(machine: Machine, tables: Sequence[Table]) -> Iterator[tuple[str, str]]:
    """The sections of a text with their lines; prints errors."""
    every = tables
    tables = [t for t in tables if t.kind != "memory" or (t.source, t.op) == (MEMORY, "quantize")]
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
    rates, reports = fit_narrow(machine, every, products[0], checkerboard, report)
    origin = f"{PACKAGE}, medians of sglang, trtllm and vllm, 8 bits of {EIGHT_BITS}"
    yield _section("matmul", products[0], rates, [products[1], *reports], origin)
    yield _section("memory", memory[0], {}, [memory[1]], f"{PACKAGE}, {MEMORY}")
    block, attention = _fit_attention(machine, by_key)
    machine = with_constants(machine, "attention", {**block, **attention[0]})
    other, reports = _other_rates(machine, by_key, attention[0])
    origin = f"{PACKAGE}, {' and '.join(f'{n} of {s}' for n, s in ATTENTION.items())}"
    yield _section("attention", {**block, **attention[0]}, other, [attention[1], *reports], origin)
    _predicted(machine, tables, attention[0])


def _fit_products(machine: Machine, tables: Mapping[Any, Table]) -> tuple[dict[str, float], str]:
    rows = product_rows([tables["matmul", "bf16", False]])
    board = checkerboard(rows)
    values = fit(machine, rows.of(board), BOUNDS["matmul"])
    judged = report(machine, rows.of(~board), values, "products bf16")
    training = rows.extents[:, 1:].min(axis=1) >= _TRAINING
    report(machine, rows.of(training & ~board), values, "... of training")
    blind = fit(machine, rows.of(~training), BOUNDS["matmul"])
    report(machine, rows.of(training), blind, "... of training, none fitted")
    return values, judged


def _fit_memory(
    machine: Machine, tables: Mapping[Any, Table], products: tuple[Values, str]
) -> tuple[dict[str, float], str]:
    table = tables.get(("memory", "", False))
    if table is None:
        shortest = float(tables["matmul", "bf16", False].seconds.min())
        values = {"bandwidth": products[0]["bandwidth"], "start": shortest}
        return values, "no table of kernels bound by memory: bandwidth and shortest of products"
    rows = memory_rows([table])
    board = checkerboard(rows)
    values = fit_memory(machine, rows.of(board))
    return values, report(machine, rows.of(~board), values, "quantization, 3 bytes an element")


def _fit_attention(
    machine: Machine, tables: Mapping[Any, Table]
) -> tuple[dict[str, int | bool], tuple[dict[str, float], str]]:
    """The block with the least loss, and its constants."""
    rows = _attention_of(_plain(tables["attention", "bf16", True]))
    board = checkerboard(rows)
    bounds = {**BOUNDS["attention"], **COPIED}
    tried: list[tuple[float, dict[str, int | bool], Machine, dict[str, float]]] = []
    for queries, packed in BLOCKS:
        block: dict[str, int | bool] = {"queries": queries, "packed": packed}
        blocked = with_constants(machine, "attention", block)
        values = fit(blocked, rows.of(board), bounds)
        error = rows.of(board).errors(blocked, values)
        loss = float(np.minimum(np.abs(error), 1).mean())
        tried.append((loss, block, blocked, values))
    _, block, machine, values = min(tried, key=lambda t: t[0])
    judged = report(machine, rows.of(~board), values, "attention bf16, causal")
    long = rows.extents[:, 3] >= _TRAINING
    report(machine, rows.of(~board & long), values, "... of 1,024 queries and more")
    blind = fit(machine, rows.of(~long), bounds)
    report(machine, rows.of(long), blind, "... of 1,024 and more, none fitted")
    return block, (values, judged)


def _other_rates(
    machine: Machine, tables: Mapping[Any, Table], values: Values
) -> tuple[dict[str, float], list[str]]:
    """The rates of attention in narrower types, with all other constants fixed."""
    rates: dict[str, float] = {}
    reports: list[str] = []
    for dtype in ("f8e4m3", "f4e2m1"):
        table = tables.get(("attention", dtype, True))
        if table is None:
            continue
        rows = _attention_of(_plain(table))
        board = checkerboard(rows)
        bounds = {**BOUNDS["narrow"], **QUANTIZING, **COPIED, **QUANTIZED}
        constants = fit(machine, rows.of(board), bounds, values)
        rates[dtype] = constants["rate"]
        reports.append(report(machine, rows.of(~board), constants, f"attention {dtype}"))
    return rates, reports


def _predicted(machine: Machine, tables: Sequence[Table], values: Values) -> None:
    """Print the errors of kinds and frameworks that are in no fit."""
    for table in (t for t in tables if (t.kind, t.dtype) == ("experts", "bf16")):
        rows = _experts(table)
        report(machine, rows, values, f"experts of {table.source}, none fitted")
    for source in ("sglang", "trtllm", "vllm"):
        fitted_on = source == ATTENTION["bf16"]
        chosen_tables = [
            t for t in tables if (t.kind, t.dtype, t.source) == ("attention", "bf16", source)
        ]
        for table in chosen_tables:
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

    def model(machine: Machine, values: Values, extents: Extents) -> Floats:
        e, m, d, f = extents.T.astype(float)
        up = matmul_seconds(
            machine, "bf16", e, m, 2 * f, d, 2 * e * (m * d + 2 * d * f + 2 * m * f)
        )
        down = matmul_seconds(machine, "bf16", e, m, d, f, 2 * e * (m * d + d * f + m * f))
        moved = [4 * e * m * d, 6 * e * m * f, 4 * e * m * d]
        return up + down + sum(memory_seconds(machine, b) for b in moved)

    return Rows(table.extents, table.seconds, model)


def _latent(table: Table) -> Mask:
    latent: Mask = table.extents[:, 5] != table.extents[:, 6]
    return latent


def frameworks_apart(
    machine: Machine, tables: Sequence[Table], medians: Mapping[Any, Table]
) -> None:
    """Print the errors of each framework relative to the median of all, which no model explains."""
    for (kind, dtype, causal), median in medians.items():
        if kind not in ("matmul", "attention") or dtype != "bf16" or (kind, causal) == _DECODED:
            continue
        known = {tuple(e): s for e, s in zip(median.extents.tolist(), median.seconds, strict=True)}
        errors = [
            abs(seconds / known[tuple(extents)] - 1)
            for t in tables
            if (t.kind, t.dtype, t.causal) == (kind, dtype, causal)
            for extents, seconds in zip(t.extents.tolist(), t.seconds, strict=True)
        ]
        title = f"one framework and the median: {'products' if kind == 'matmul' else kind}"
        print(
            f"| {machine.name} | {title} | {len(errors):,} | {_percent(np.array(errors))} | | | |"
        )


_DECODED = ("attention", False)


def _plain(table: Table) -> Table:
    """Heads of one width that FlashAttention computes."""
    e = table.extents
    return _where(table, ~_latent(table) & (e[:, 5] <= _WIDEST))


def _where(table: Table, chosen: Mask) -> Table:
    extents, seconds = table.extents[chosen], table.seconds[chosen]
    return Table(table.kind, table.dtype, table.causal, extents, seconds, table.source)


def _attention_of(table: Table) -> Rows:
    rows = attention_rows([table])
    element = ELEMENT.get(table.dtype, _WIDE)

    def model(machine: Machine, values: Values, extents: Extents) -> Floats:
        b, h, g, q, t, qk, v = extents.T[:7].astype(float)
        cached = np.where(qk == v, g * (qk + v), _LATENT)
        copied = values["copied"] * 2 * element * b * t * cached
        quantized = values.get("quantized", 0) * (_WIDE + element) * b * q * h * qk
        beside = memory_seconds(machine, copied + quantized) + values.get("quantizing", 0)
        return rows.model(machine, values, extents) + beside

    return replace(rows, model=model) if table.causal else rows


def report(machine: Machine, rows: Rows, values: Values, title: str) -> str:
    """Print the errors of rows that were left out, and return them as a sentence."""
    error = np.abs(np.expm1(rows.errors(machine, values)))
    long = rows.measured > LONG
    cells = (f"{len(error):,}", _percent(error), f"{long.sum():,}", _percent(error[long]))
    print(f"| {machine.name} | {title} | {' | '.join(cells)} |", flush=True)
    middle, most = (f"{100 * np.quantile(error, q):.1f}%" for q in (0.5, 0.9))
    return f"{title}: median {middle}, p90 {most} of {len(error):,} rows left out"


def _percent(error: Floats) -> str:
    if not len(error):
        return "- | -"
    return " | ".join(f"{100 * np.quantile(error, q):.1f}%" for q in (0.5, 0.9))


def _section(
    kind: str, values: Values, rates: Values, reports: Sequence[str], origin: str
) -> tuple[str, str]:
    every = {"bf16": values["rate"], **rates} if "rate" in values else {}
    constants = {n: v for n, v in values.items() if n not in ("rate", *COPIED)}
    body = kernel_section(kind, constants, every, f"{origin}; {'; '.join(reports)}")
    return f"efficiency.{kind}", body


def _of_another(sections: Mapping[str, str], name: str) -> dict[str, str]:
    start = f'fitted = "no tables of its own, constants of {name}, the same processors: '
    return {title: body.replace('fitted = "', start) for title, body in sections.items()}


def write(path: Path, sections: Mapping[str, str]) -> None:
    """Replace these sections of a text."""
    path.write_text(with_sections(path.read_text("utf-8"), sections), "utf-8")


if __name__ == "__main__":
    main()
