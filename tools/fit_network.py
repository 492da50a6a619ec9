"""Fit the network constants of machines on measured collectives: `python tools/fit_network.py`.

The rows are those of the PyPI package `aiconfigurator-core` (Apache-2.0): NCCL by kind, ranks and
message size, one node. Every second size is fitted, the others judge. `stagec.time.fit.network`
fits, as it does for `stagec fit`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from stagec.machines import Machine, machines
from stagec.machines.efficiency import NetworkEfficiency
from stagec.machines.writing import network_section, rounded_network, with_sections
from stagec.time.costs.network import spans
from stagec.time.fit.network import LARGE, CollectiveRows, Floats, errors, fit, with_level

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
SUMS = ("all_reduce", "reduce_scatter")
#: Where the search starts.
FIRST: Mapping[str, Any] = {
    "protocols": {
        "ll": {"start": "4.5 us", "hops": 1.3, "share": 0.1, "copy": 0.3},
        "ll128": {"start": "9 us", "hops": 1.5, "share": 0.5, "copy": 0.3},
        "simple": {"start": "20 us", "hops": 6.0, "share": 0.8, "copy": 0.3},
    },
    "pairs": {
        "ll": {"start": "6 us", "hops": 0.1, "share": 0.05, "copy": 0.2},
        "simple": {"start": "13 us", "hops": 0.3, "share": 0.7, "copy": 0.2},
    },
    "multicast": {"start": "30 us", "hops": 0.0, "share": 0.6},
}


def cases(machine: Machine, folder: Path) -> list[CollectiveRows]:
    """The rows of a machine. Sums of 8-bit integers are left out: switches do not add these, and
    from 32 MiB on they take 3 to 13% longer than those of as many bytes in halves (B200)."""
    device, version = TABLES[machine.name]
    parquet = importlib.import_module("pyarrow.parquet")
    path = folder / "data" / device / "comm" / "nccl" / version / "nccl_perf.parquet"
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        wide = row["nccl_dtype"] == "half"
        if wide or row["op_name"] not in SUMS:
            name = str(row["op_name"])
            kind = KINDS.get(name, name)
            size = row["message_size"] * (2 if wide else 1)
            times.setdefault((kind, int(row["num_gpus"])), []).append((size, row["latency"] * 1e-3))
    return [
        _case(machine, kind, n, *np.array(sorted(points)).T) for (kind, n), points in times.items()
    ]


def _case(machine: Machine, kind: str, ranks: int, size: Floats, seconds: Floats) -> CollectiveRows:
    """Sizes that are 4^k are fitted."""
    even = np.round(np.log2(size)).astype(int) % 2 == 0
    return CollectiveRows(kind, spans(machine, np.arange(ranks)), size, seconds, even)


def told(e: Floats) -> str:
    """`median 3.4%, p90 12.0%`."""
    a = np.abs(np.expm1(e))
    return f"median {np.median(a):.1%}, p90 {np.quantile(a, 0.9):.1%}"


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
        level = machine.network[0].name
        fitted = fit(machine, level, rows, NetworkEfficiency.model_validate(FIRST))
        machine = with_level(machine, level, fitted)
        inside, outside = (errors(machine, rows, fitted=f) for f in (True, False))
        count = len(inside) + len(outside)
        record = (
            f"NCCL {TABLES[name][1]} on 2 to {max(c.over[-1].size for c in rows)} ranks, {count} "
            f"rows of aiconfigurator-core; every second size fitted; on the others {told(outside)}"
        )
        click.echo(f"{name}: fitted {told(inside)}; left out {told(outside)}")
        sizes = np.concatenate([c.size[~c.fitted] for c in rows])
        click.echo(f"  16 MiB and more: left out {told(outside[sizes >= LARGE])}")
        for kind in sorted({c.kind for c in rows}):
            some = [c for c in rows if c.kind == kind]
            click.echo(f"  {kind}: left out {told(errors(machine, some, fitted=False))}")
        if write:
            _write(name, level, fitted, record)
            for other in (o for o, of in ALIKE.items() if of == name):
                _write(other, level, fitted, f"as {name}, which has the same links: {record}")


def _write(name: str, level: str, network: NetworkEfficiency, record: str) -> None:
    path = Path(f"stagec/machines/{name}.toml")
    network = rounded_network(network).model_copy(update={"fitted": record})
    section = network_section(level, network)
    title = f"efficiency.network.{level}"
    path.write_text(with_sections(path.read_text("utf-8"), {title: section}), "utf-8")


if __name__ == "__main__":
    main()
