"""Fit the network constants of machines on measured collectives: `python tools/fit_network.py`.

The rows are those of the PyPI package `aiconfigurator-core` (Apache-2.0): NCCL by kind, ranks and
message size, one node. Every second size is fitted, the others judge. The robust least squares of
relative errors go through `stagec.time.network`, so that what is fitted is what runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np
from numpy.typing import NDArray

from stagec.machines import Machine, machines
from stagec.machines.efficiency import NetworkEfficiency, Protocol
from stagec.time.network import Span, collective_seconds, spans

Floats: TypeAlias = NDArray[np.float64]

#: Machine: folder of its tables, and the newest version of NCCL there.
TABLES = {
    "a100-80g": ("a100_sxm", "2.27.3"),
    "h100-sxm": ("h100_sxm", "2.29.2"),
    "h200": ("h200_sxm", "2.29.2"),
    "b200": ("b200_sxm", "2.29.2"),
    "b300": ("b300_sxm", "2.29.2"),
    "gb200-nvl72": ("gb200", "2.29.2"),
    "gb300-nvl72": ("gb300", "2.29.2"),
}
#: Machines with the links of another one.
ALIKE = {"a100-40g": "a100-80g", "h100-500w": "h100-sxm"}
KINDS = {"alltoall": "all_to_all"}
#: start in microseconds, hops, share of ll, ll128, simple; copy of rings; start, share of
#: multicast; start, hops, share of ll, simple between pairs; copy of pairs.
FIRST = (
    *(4.5, 1.3, 0.1, 9.0, 1.5, 0.5, 20.0, 6.0, 0.8, 0.3),
    *(30.0, 0.6, 6.0, 0.1, 0.05, 13.0, 0.3, 0.7, 0.2),
)
SHARES = np.array([2, 5, 8, 11, 14, 17])
#: Relative errors beyond this one count by their size, not by its square.
OUTLIER = 0.1
#: Training moves large buffers: errors from this size on count so often.
LARGE, WEIGHT = 1 << 24, 3.0
TRIALS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """The rows of one kind on so many ranks: bytes, and the seconds measured."""

    kind: str
    over: tuple[Span, ...]
    size: Floats
    seconds: Floats


def cases(machine: Machine, folder: Path) -> list[Case]:
    """The rows of a machine. Sums of 8-bit integers are left out: switches do not add these."""
    device, version = TABLES[machine.name]
    parquet = importlib.import_module("pyarrow.parquet")
    path = folder / "data" / device / "comm" / "nccl" / version / "nccl_perf.parquet"
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        wide = row["nccl_dtype"] == "half"
        if wide or row["op_name"] != "all_reduce":
            name = str(row["op_name"])
            kind = KINDS.get(name, name)
            size = row["message_size"] * (2 if wide else 1)
            found.setdefault((kind, int(row["num_gpus"])), []).append((size, row["latency"] * 1e-3))
    return [
        Case(kind, spans(machine, np.arange(n)), *np.array(sorted(points)).T)
        for (kind, n), points in found.items()
    ]


def constants(x: Floats, fitted: str = "") -> NetworkEfficiency:
    """The constants of a point: logarithms, of shares logits."""
    v = np.exp(x)
    v[SHARES] /= 1 + v[SHARES]

    def one(first: int, copy: float) -> Protocol:
        start, hops, share = (float(n) for n in v[first : first + 3])
        return Protocol.model_construct(start=start * 1e-6, hops=hops, share=share, copy_=copy)

    return NetworkEfficiency(
        protocols={n: one(i, float(v[9])) for n, i in (("ll", 0), ("ll128", 3), ("simple", 6))},
        pairs={n: one(i, float(v[18])) for n, i in (("ll", 12), ("simple", 15))},
        multicast=Protocol.model_construct(
            start=float(v[10]) * 1e-6, hops=0.0, share=float(v[11]), copy_=0.0
        ),
        fitted=fitted,
    )


def with_constants(machine: Machine, found: NetworkEfficiency) -> Machine:
    """The machine with these constants on its innermost level."""
    old = machine.efficiency
    network = {**old.network, machine.network[0].name: found}
    return machine.model_copy(update={"efficiency": old.model_copy(update={"network": network})})


def parity(row: Case) -> NDArray[np.bool_]:
    """Which sizes are 4^k: these are fitted."""
    even: NDArray[np.bool_] = np.round(np.log2(row.size)).astype(int) % 2 == 0
    return even


def errors(machine: Machine, x: Floats, rows: Sequence[Case], odd: bool) -> Floats:
    """Logarithms of time over measured time, of the sizes 4^k or of the others."""
    tried = with_constants(machine, constants(x))
    found: list[Floats] = []
    for row in rows:
        chosen = parity(row) != odd
        time = collective_seconds(tried, row.kind, row.size[chosen], row.over)
        found.append(np.log(time / row.seconds[chosen]))
    return np.concatenate(found)


def least_squares(
    f: Callable[[Floats], Floats], x: Floats, steps: int = 60
) -> tuple[float, Floats]:
    """Levenberg-Marquardt with Huber weights and differences: the least cost and its point."""

    def cost(r: Floats) -> float:
        a = np.abs(r)
        return float(np.where(a < OUTLIER, a * a, OUTLIER * (2 * a - OUTLIER)).sum())

    r, damping = f(x), 1e-2
    best = cost(r)
    for _ in range(steps):
        w = np.minimum(1, OUTLIER / np.maximum(np.abs(r), 1e-12))
        jac = np.stack([(f(x + h) - r) / 0.02 for h in 0.02 * np.eye(len(x))], axis=1)
        normal = jac.T @ (jac * w[:, None])
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.eye(len(x)), -jac.T @ (w * r))
            tried = np.clip(x + np.clip(step, -1, 1), -7, 6)
            new = f(tried)
            if cost(new) < best:
                break
            damping *= 4
        else:
            break
        gain, best = best - cost(new), cost(new)
        x, r, damping = tried, new, damping / 3
        if gain < 1e-6 * best:
            break
    return best, x


def fit(machine: Machine, rows: Sequence[Case]) -> Floats:
    """The point with the least errors, of several starts that are the same in every run."""
    rng = np.random.default_rng(0)
    first = np.array(FIRST)
    first[SHARES] /= 1 - first[SHARES]
    start = np.log(first)
    starts = [start, *(start + rng.normal(0, 0.3, len(start)) for _ in range(TRIALS - 1))]
    weights = np.concatenate([np.where(c.size[parity(c)] < LARGE, 1, WEIGHT) for c in rows])

    def weighted(x: Floats) -> Floats:
        result: Floats = errors(machine, x, rows, odd=False) * weights
        return result

    found = [least_squares(weighted, s) for s in starts]
    return min(found, key=lambda pair: pair[0])[1]


def told(e: Floats) -> str:
    """`median 3.4%, p90 12.0%`."""
    a = np.abs(np.expm1(e))
    return f"median {np.median(a):.1%}, p90 {np.quantile(a, 0.9):.1%}"


def section(level: str, found: NetworkEfficiency) -> str:
    """The constants as they stand in a machine text."""

    def inline(p: Protocol) -> str:
        names = f'start = "{p.start * 1e6:.3g} us", hops = {p.hops:.3g}, share = {p.share:.3g}'
        return f"{{ {names}, copy = {p.copy_:.3g} }}"

    lines = [f"[efficiency.network.{level}]", f'fitted = "{found.fitted}"']
    lines.append(f"multicast = {inline(found.multicast)}")
    for name, group in (("protocols", found.protocols), ("pairs", found.pairs)):
        lines += ["", f"[efficiency.network.{level}.{name}]"]
        lines += [f"{n} = {inline(p)}" for n, p in group.items()]
    return "\n".join(lines) + "\n"


def replaced(text: str, level: str, new: str) -> str:
    """A machine text with another section of constants."""
    kept: list[str] = []
    skipped = False
    for line in text.splitlines():
        if line.startswith("["):
            skipped = line.startswith(f"[efficiency.network.{level}")
        if not skipped:
            kept.append(line)
    return "\n".join(kept).rstrip() + "\n\n" + new


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(TABLES)))
@click.option("--tables", type=click.Path(path_type=Path), help="The folder `systems`.")
@click.option("--write", is_flag=True, help="Write the constants into the machine texts.")
def main(names: tuple[str, ...], tables: Path | None, write: bool) -> None:
    """Fit the constants of the machines NAMES, or of all that have tables."""
    if tables is None:
        package = importlib.import_module("aiconfigurator_core")
        tables = Path(package.__path__[0]) / "systems"
    for name in names or TABLES:
        machine = machines()[name]
        rows = cases(machine, tables)
        x = fit(machine, rows)
        inside, outside = (errors(machine, x, rows, odd) for odd in (False, True))
        count = len(inside) + len(outside)
        record = (
            f"NCCL {TABLES[name][1]} on 2 to {max(c.over[-1].size for c in rows)} ranks, {count} "
            f"rows of aiconfigurator-core; every second size fitted; on the others {told(outside)}"
        )
        click.echo(f"{name}: fitted {told(inside)}; left out {told(outside)}")
        sizes = np.concatenate([c.size[~parity(c)] for c in rows])
        click.echo(f"  16 MiB and more: left out {told(outside[sizes >= LARGE])}")
        for kind in sorted({c.kind for c in rows}):
            some = [c for c in rows if c.kind == kind]
            click.echo(f"  {kind}: left out {told(errors(machine, x, some, odd=True))}")
        if write:
            level = machine.network[0].name
            _write(name, level, constants(x, record))
            for other in (o for o, of in ALIKE.items() if of == name):
                _write(other, level, constants(x, f"as {name}, which has the same links: {record}"))


def _write(name: str, level: str, found: NetworkEfficiency) -> None:
    path = Path(f"stagec/machines/{name}.toml")
    path.write_text(replaced(path.read_text("utf-8"), level, section(level, found)), "utf-8")


if __name__ == "__main__":
    main()
