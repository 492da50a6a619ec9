"""A stand-in for ASTRA-sim in tests: reads what it reads, prints what it prints.

It takes each rank's nodes in the order of the file: one computation or collective at a time, each
node takes as many nanoseconds as it has bytes. `STUB=stuck` leaves the last rank out, `STUB=bad`
ends with an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stagec.formats.chakra.nodes import NodeKind
from stagec.formats.chakra.record_files import read_trace


def main() -> None:
    """Run."""
    given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    system = json.loads(Path(given["system-configuration"]).read_text())
    ranks = _product(Path(given["network-configuration"]).read_text())
    dims = len(system["all-reduce-implementation"])
    assert dims == _dimensions(Path(given["network-configuration"]).read_text())
    json.loads(Path(given["comm-group-configuration"]).read_text())
    json.loads(Path(given["remote-memory-configuration"]).read_text())
    if os.environ.get("STUB") == "bad":
        print("[critical] For rank 0 ET node 3, communicator group 7 not found")
        sys.exit(1)
    with Path("nodes.log").open("w") as log:
        for rank in range(ranks - (os.environ.get("STUB") == "stuck")):
            tick = computed = 0
            for node in read_trace(Path(f"{given['workload-configuration']}.{rank}.et")):
                print(_line("issue", rank, tick, node.id, node.name, node.kind), file=log)
                size = node.attrs.get("tensor_size", node.attrs.get("comm_size"))
                assert isinstance(size, int)
                tick += size
                computed += size if node.kind == NodeKind.COMP else 0
                print(_line("callback", rank, tick, node.id, node.name, node.kind), file=log)
            exposed = tick - computed
            print(
                f"[workload] [info] sys[{rank}] finished, {tick} cycles, "
                f"exposed communication {exposed} cycles."
            )
    logging = given.get("logging-configuration")
    if logging is None or 'level = "debug"' not in Path(logging).read_text():
        Path("nodes.log").unlink()


def _line(event: str, rank: int, tick: int, node: int, name: str, kind: int) -> str:
    return (
        f"[2026-01-01 00:00:00.000] [workload] [debug] {event},sys->id={rank}, tick={tick}, "
        f"node->id={node}, node->name={name}, node->type={kind}"
    )


def _lists(text: str) -> Mapping[str, list[str]]:
    """The lists of a network file, without a YAML reader."""
    rows = (line.partition("#")[0].partition(":") for line in text.splitlines())
    return {key: [v.strip() for v in value.strip(" []").split(",")] for key, _, value in rows}


def _product(text: str) -> int:
    actual = 1
    for count in _lists(text)["npus_count"]:
        assert int(count) > 1, "npus_count must be larger than 1"
        actual *= int(count)
    return actual


def _dimensions(text: str) -> int:
    (length,) = {len(values) for values in _lists(text).values()}
    return length


if __name__ == "__main__":
    main()
