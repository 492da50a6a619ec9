"""The files that ASTRA-sim reads in addition to traces: its system and memory, and a script that
runs it. Keys and units: docs/consumers.md; astra-sim/system/Sys.cc."""

import json
from collections.abc import Mapping
from typing import Any

from stagec.formats.astra_sim.topology import Dimension
from stagec.machines.schema import HostLink
from stagec.support.texts import package_text

#: The file in a folder with the facts that 'stagec simulate' needs.
ABOUT = "stagec.json"
#: The option of the simulator by which messages wait for their receivers.
RENDEZVOUS = "--rendezvous-protocol=true"
SYSTEM, NETWORK, MEMORY = "system.json", "network.yml", "memory.json"
_RINGS = ("all-reduce", "all-gather", "reduce-scatter")


def system(
    dims: list[Dimension], peak_flops: float, memory_bytes: float, *, roofline: bool, tensors: bool
) -> dict[str, Any]:
    """`system.json`: one implementation per dimension, one chunk per collective."""
    settings: dict[str, Any] = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": 10,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 1,
        **{f"{kind}-implementation": ["ring"] * len(dims) for kind in _RINGS},
        "all-to-all-implementation": ["direct1"] * len(dims),
        "collective-optimization": "baseline",
        "local-mem-bw": memory_bytes / 1e9,
        "peak-perf": peak_flops / 1e12,
        "roofline-enabled": int(roofline),
        "trace-enabled": 0,
    }
    if tensors:
        settings |= {"track-local-mem": 1, "local-mem-trace-filename": "local_mem_trace"}
    return settings


def memory(host: HostLink | None = None) -> dict[str, Any]:
    """`memory.json`: the memory of the host, with a separate link for each rank, or only that of
    devices. ASTRA-sim reads whole nanoseconds and whole GB/s."""
    if host is None:
        return {"memory-type": "NO_MEMORY_EXPANSION"}
    return {
        "memory-type": "PER_NPU_MEMORY_EXPANSION",
        "remote-mem-latency": round(host.latency.value * 1e9),
        "remote-mem-bw": max(1, round(host.bandwidth.value / 1e9)),
    }


def logical_topology(dims: list[Dimension]) -> dict[str, Any]:
    """`logical_topology.json`, which the ns-3 backend reads; sizes are strings."""
    return {"logical-dims": [str(d.ranks) for d in dims]}


def script(name: str, ranks: int, *, rendezvous: bool) -> str:
    """`run.sh`: runs the simulator, and counts the ranks that end, since it exits with 0 even if
    some wait forever."""
    more = f"  {RENDEZVOUS} \\\n" if rendezvous else ""
    text = package_text("formats/astra_sim/run.sh").replace("@NAME@", name)
    text = text.replace("@RANKS@", str(ranks))
    return text.replace("@MORE@", more)


def text(settings: Mapping[str, Any]) -> bytes:
    """Indented JSON."""
    return (json.dumps(settings, indent=1) + "\n").encode()
