"""Fit the network constants of machines to measured collectives: `python -m tools.fit_network`.

The rows are those of the PyPI package `aiconfigurator-core` (Apache-2.0): NCCL by kind, ranks and
message size, one node. Every second size is fitted, and the others are the test set. The fit is
that of `stagec.time.fit.network`, which `stagec fit` uses too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from stagec.machines import Machine, machines
from stagec.machines.efficiency import NetworkEfficiency
from stagec.time.costs.network import spans
from stagec.time.fit.network import LARGE, CollectiveRows, Floats, errors, fit, with_level
from tools.fitting import collectives, described, systems, write_network

#: Machine -> the folder of its tables, and the newest version of NCCL there.
TABLES = {
    "a100-80g": ("a100_sxm", "2.27.3"),
    "h100-sxm": ("h100_sxm", "2.29.2"),
    "h200": ("h200_sxm", "2.29.2"),
    "b200": ("b200_sxm", "2.29.2"),
    "b300": ("b300_sxm", "2.29.2"),
    "gb200-nvl72": ("gb200", "2.29.2"),
    "gb300-nvl72": ("gb300", "2.29.2"),
}
#: Machine -> another machine with the same links.
ALIKE = {"a100-40g": "a100-80g", "h100-500w": "h100-sxm"}
KINDS = {"alltoall": "all_to_all"}
SUMS = ("all_reduce", "reduce_scatter")
#: The start of the search.
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
    """The rows of a machine. Sums of 8-bit integers are left out: switches do not add them, and
    from 32 MiB they take 3 to 13% longer than those of as many bytes in halves (B200)."""
    device, version = TABLES[machine.name]
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in collectives(folder, device, f"nccl/{version}/nccl_perf"):
        wide = row["nccl_dtype"] == "half"
        if wide or row["op_name"] not in SUMS:
            name = str(row["op_name"])
            kind = KINDS.get(name, name)
            size = row["message_size"] * (2 if wide else 1)
            over = kind, int(row["num_gpus"])
            points.setdefault(over, []).append((size, row["latency"] * 1e-3))
    return [_case(machine, *over, *np.array(sorted(each)).T) for over, each in points.items()]


def _case(machine: Machine, kind: str, ranks: int, size: Floats, seconds: Floats) -> CollectiveRows:
    """Sizes that are 4^k are fitted."""
    even = np.round(np.log2(size)).astype(int) % 2 == 0
    return CollectiveRows(kind, spans(machine, np.arange(ranks)), size, seconds, even)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(TABLES)))
@click.option("--tables", type=click.Path(path_type=Path), help="The folder `systems`.")
@click.option("--write", is_flag=True, help="Write the constants into the machine texts.")
def main(names: tuple[str, ...], tables: Path | None, write: bool) -> None:
    """Fit the constants of the machines NAMES, or of all that have tables."""
    folder = systems(tables)
    for name in names or TABLES:
        machine = machines()[name]
        rows = cases(machine, folder)
        level = machine.network[0].name
        constants = fit(machine, level, rows, NetworkEfficiency.model_validate(FIRST))
        machine = with_level(machine, level, constants)
        inside, outside = (errors(machine, rows, fitted=f) for f in (True, False))
        count, judged = len(inside) + len(outside), described(outside)
        record = (
            f"NCCL {TABLES[name][1]} on 2 to {max(c.over[-1].size for c in rows)} ranks, {count} "
            f"rows of aiconfigurator-core; every second size fitted; on the others {judged}"
        )
        click.echo(f"{name}: fitted {described(inside)}; left out {judged}")
        sizes = np.concatenate([c.size[~c.fitted] for c in rows])
        click.echo(f"  16 MiB and more: left out {described(outside[sizes >= LARGE])}")
        for kind in sorted({c.kind for c in rows}):
            some = [c for c in rows if c.kind == kind]
            click.echo(f"  {kind}: left out {described(errors(machine, some, fitted=False))}")
        if write:
            write_network(name, level, constants.model_copy(update={"fitted": record}))
            record = f"as {name}, which has the same links: {record}"
            for other in (o for o, of in ALIKE.items() if of == name):
                write_network(other, level, constants.model_copy(update={"fitted": record}))


if __name__ == "__main__":
    main()
