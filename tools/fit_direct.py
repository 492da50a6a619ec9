"""Fits the constants of all_reduces by kernels of engines (`efficiency.network.LEVEL.direct`) to
measurements: `python -m tools.fit_direct --write`.

The rows are those of the PyPI package `aiconfigurator-core` (Apache-2.0), `custom_allreduce_perf`:
2 to 8 ranks of a node, captured in graphs, with the newest version of each engine there. The time
of a row of several engines is their median; every second size is fitted, and the others are the
test set. Sizes are those for which engines use these kernels, 256 bytes to 8 MiB.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from stagec.machines import Machine, machines
from stagec.machines.efficiency import NetworkEfficiency, Protocol
from stagec.time.costs.network import direct_seconds, spans
from stagec.time.fit.network import with_level
from stagec.time.fit.search import least_squares
from tools.fitting import Floats, collectives, described, systems, write_network

#: Machine -> the folder of its tables, and the newest versions of engines there.
TABLES = {
    "a100-80g": ("a100_sxm", ("vllm/0.14.0", "sglang/0.5.10", "trtllm/1.0.0")),
    "h100-sxm": ("h100_sxm", ("vllm/0.24.0", "sglang/0.5.14", "trtllm/1.3.0rc20")),
    "h200": ("h200_sxm", ("vllm/0.24.0", "sglang/0.5.14", "trtllm/1.3.0rc20")),
    "b200": ("b200_sxm", ("vllm/0.24.0", "sglang/0.5.14", "trtllm/1.3.0rc20")),
    "gb200-nvl72": ("gb200", ("vllm/0.24.0", "sglang/0.5.14", "trtllm/1.3.0rc20")),
}
#: Machine -> other machines with the same links.
ALIKE = {
    "a100-80g": ("a100-40g",),
    "h100-sxm": ("h100-500w", "h800"),
    "b200": ("b300",),
    "gb200-nvl72": ("gb300-nvl72",),
}
_LEAST, _MOST = 256, 8 << 20
_BYTES = 2  # of an element of bf16, the unit of sizes there
#: Start in microseconds, hops and share of one-shot kernels, then of two-shot kernels.
_FIRST = np.array([3.0, 0.1, 0.5, 8.0, 0.1, 0.7])
#: The ranks and bytes of a row.
Place = tuple[int, int]


def rows(machine: str, folder: Path) -> dict[Place, float]:
    """Median seconds over engines by ranks and bytes."""
    device, versions = TABLES[machine]
    seconds: dict[Place, list[float]] = defaultdict(list)
    for version in versions:
        for row in collectives(folder, device, f"{version}/custom_allreduce_perf"):
            size = row["message_size"] * _BYTES
            eager = str(row.get("backend", "")).endswith("_eager")
            if not eager and _LEAST <= size <= _MOST:
                seconds[row["num_gpus"], size].append(row["latency"] * 1e-3)
    return {place: float(np.median(times)) for place, times in sorted(seconds.items())}


def with_direct(machine: Machine, point: Floats, record: str) -> NetworkEfficiency:
    """The constants of the innermost level with these."""
    level = machine.efficiency.network[machine.network[0].name]
    one, two = (
        Protocol.model_construct(start=start * 1e-6, hops=hops, share=min(share, 1.0), copy_=0.0)
        for start, hops, share in point.reshape(2, 3).tolist()
    )
    direct = {"one_shot": one, "two_shot": two}
    return level.model_copy(update={"direct": direct, "direct_fitted": record})


def errors(machine: Machine, measured: dict[Place, float]) -> Floats:
    """The logarithms of the ratios of modelled to measured seconds."""
    over = {n: spans(machine, np.arange(n)) for n, _ in measured}
    times = (direct_seconds(machine, size, over[n], two_shot=True) for n, size in measured)
    logarithms: Floats = np.log(np.fromiter(times, float) / np.fromiter(measured.values(), float))
    return logarithms


@click.command()
@click.option("--tables", type=click.Path(path_type=Path), help="The folder `systems`.")
@click.option("--write", is_flag=True, help="Write the constants into the machine texts.")
def main(tables: Path | None, write: bool) -> None:
    """Fit the constants of all machines that have tables."""
    folder = systems(tables)
    for name in TABLES:
        machine = machines()[name]
        level = machine.network[0].name
        measured = rows(name, folder)
        even = {p: t for p, t in measured.items() if round(np.log2(p[1])) % 2 == 0}
        odd = {p: t for p, t in measured.items() if p not in even}

        def loss(point: Floats, machine: Machine = machine, even: Any = even) -> Floats:
            constants = with_direct(machine, np.exp(point), "")
            return errors(with_level(machine, machine.network[0].name, constants), even)

        _, best = least_squares(loss, np.log(_FIRST))
        point = np.exp(best)
        machine = with_level(machine, level, with_direct(machine, point, ""))
        record = (
            f"all_reduce of vllm, sglang and trtllm in graphs on 2 to {max(measured)[0]} ranks, "
            f"{len(measured)} rows of aiconfigurator-core, medians of engines; every second size "
            f"fitted; on the others {described(errors(machine, odd))}"
        )
        click.echo(f"{name}: fitted {described(errors(machine, even))}; {record}; {point}")
        for other in (name, *ALIKE.get(name, ())) if write else ():
            like = "" if other == name else f"as {name}, which has links of the same kind: "
            known = machines()[other]
            write_network(other, known.network[0].name, with_direct(known, point, like + record))


if __name__ == "__main__":
    main()
