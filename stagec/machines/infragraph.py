"""The network of an InfraGraph file (MLCommons Chakra's infrastructure graph, YAML or JSON), for a
known device: `--machine h100-sxm+pod.yaml`.

The file lists components and the links between them; the PyPI package `infragraph` expands it to a
graph. Two levels are read from that graph:

    inside    the accelerators (xpu) of one device, joined by a switch, pairwise, or in a ring: what
              one of them sends over its links to these
    outside   what all network cards (nic) of a device send over links out of it, for each of its
              accelerators, and no more than these send to their cards

Switches between devices are one level without oversubscription. The latency of a hop is the sum
over the links of a shortest path. All devices with accelerators must be equal.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from stagec.support.diagnostics import DiagnosticError, error

_ENDS = (".yaml", ".yml", ".json")
_REMEDY = "docs/consumers.md says what is read of such a file"
#: The most components of a graph; more take minutes to expand.
MOST_NODES = 200_000
_RATES = {"Gbps": 1e9 / 8, "GBps": 1e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
_FIGURE = re.compile(r"([\d.eE+-]+)\s*(\w+)")


def parts_of(given: str) -> tuple[str, str] | None:
    """The device and the file of `h100-sxm+pod.yaml`; None for another text. Raises
    `DiagnosticError` for a file without a device."""
    device, plus, file = given.partition("+")
    if not file.lower().endswith(_ENDS):
        if plus or not given.lower().endswith(_ENDS):
            return None
        raise error(
            f"'{given}' describes a network without devices",
            remedy=f"put the name of a machine before it: --machine h100-sxm+{given}",
        )
    return device, file


@dataclass(frozen=True, slots=True)
class _Level:
    """A level of the network, in bytes/s and seconds; `ranks` is 0 for any number."""

    name: str
    ranks: int
    kind: str
    bandwidth: float
    latency: float

    def text(self, source: str) -> str:
        """The level as a part of a machine text."""
        ranks = f"ranks = {self.ranks}\n" if self.ranks else ""
        quoted = source.replace("\\", "/").replace('"', "'")
        return (
            f'[[network]]\nname = "{self.name}"\nkind = "{self.kind}"\n{ranks}'
            f'bandwidth = {{ value = "{self.bandwidth:.0f} B/s", source = "{quoted}" }}\n'
            f'latency = {{ value = "{self.latency * 1e9:g} ns", source = "{quoted}" }}\n'
        )


def machine_text(device: str, file: str, text: str) -> str:
    """The text of a machine with this device and the network of an InfraGraph file. Raises
    `DiagnosticError` for a file that is invalid or lacks a figure."""
    levels = _levels(_graph(file, text), partial(_wrong, file))
    return f'base = "{device}"\ntitle = "{device}, network of {Path(file).stem}"\n' + "".join(
        level.text(f"{Path(file).name}, InfraGraph") for level in levels
    )


def _wrong(file: str, what: str) -> DiagnosticError:
    return error(f"{file}: {what}", remedy=_REMEDY)


def _graph(file: str, text: str) -> Any:
    """The expanded graph of a file."""
    try:
        package = import_module("infragraph")
        service = import_module("infragraph.infragraph_service")
    except ImportError:
        raise error(
            "an InfraGraph file needs the package infragraph",
            remedy="pip install 'stagec[infragraph]'",
        ) from None
    try:
        infrastructure = package.Infrastructure().deserialize(text)
        if _size(infrastructure) > MOST_NODES:
            raise _wrong(file, f"more than {MOST_NODES:,} components")
        infragraph = service.InfraGraphService()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about components without links
            infragraph.set_graph(infrastructure)
        return infragraph.get_networkx_graph()
    except DiagnosticError:
        raise
    except Exception as problem:
        # the package raises ValueError, KeyError, TypeError and exceptions of its own
        reason = " ".join(str(problem).split())[:200]
        raise _wrong(file, f"not an InfraGraph file: {reason or type(problem).__name__}") from None


def _size(infrastructure: Any) -> int:
    """The number of components of all instances."""
    each = {d.name: sum(c.count for c in d.components) for d in infrastructure.devices}
    return sum(i.count * each.get(i.device, 1) for i in infrastructure.instances)


def _levels(graph: Any, wrong: Callable[[str], DiagnosticError]) -> list[_Level]:
    units: dict[str, list[str]] = {}
    parts: dict[str, set[str]] = {}
    for node, about in graph.nodes(data=True):
        unit = str(about.get("composed_device"))
        parts.setdefault(unit, set()).add(node)
        if about.get("type") == "xpu":
            units.setdefault(unit, []).append(node)
    sizes = {len(members) for members in units.values()}
    if not sizes:
        raise wrong("no component is an xpu, so there is no accelerator")
    if len(sizes) > 1:
        counts = ", ".join(map(str, sorted(sizes)))
        raise wrong(f"devices have different numbers of accelerators: {counts}")
    levels: list[_Level] = []
    (size,) = sizes
    first, *others = units
    if size > 1:
        inside = _alike([_inside(graph, members, wrong) for members in units.values()], wrong)
        if inside is not None:
            levels.append(inside)
    if others:
        lengths = _latency(graph, units[first][0], units[others[0]][0], wrong)
        rate = _alike([_out(graph, parts[unit], members) for unit, members in units.items()], wrong)
        if not rate:
            raise wrong(f"no link with a bandwidth leads out of '{first}'")
        levels.append(_Level("outside", 0, "fat-tree", rate, lengths))
    if not levels:
        raise wrong("no link joins two accelerators")
    return levels


def _alike(items: list[Any], wrong: Callable[[str], DiagnosticError]) -> Any:
    if any(each != items[0] for each in items):
        raise wrong("devices with accelerators have different links")
    return items[0]


def _inside(
    graph: Any, members: list[str], wrong: Callable[[str], DiagnosticError]
) -> _Level | None:
    """The level of the accelerators of a device; None if no link joins them there."""
    one, size = members[0], len(members)
    links = {n: graph.edges[one, n] for n in graph.neighbors(one)}
    peers = [edge for n, edge in links.items() if n in members]
    switches = [e for n, e in links.items() if graph.nodes[n].get("type") == "switch"]
    if peers:
        kind = "mesh" if len(peers) == size - 1 else "ring"
        if kind == "ring" and len(peers) != 2:
            raise wrong(
                f"'{one}' has links to {len(peers)} of {size} accelerators: no ring or mesh"
            )
        return _level(kind, size, peers, 1, one, wrong)
    return _level("switch", size, switches, 2, one, wrong) if switches else None


def _level(
    kind: str,
    size: int,
    links: list[Mapping[str, str]],
    hops: int,
    one: str,
    wrong: Callable[[str], DiagnosticError],
) -> _Level:
    rate = sum(_rate(link) for link in links)
    if not rate:
        raise wrong(f"the links of '{one}' have no bandwidth")
    return _Level("inside", size, kind, rate, hops * _time(links[0]))


def _out(graph: Any, inside: set[str], members: list[str]) -> float:
    """The rate at which one accelerator sends out of its device, in bytes/s; `inside` are the
    components of the device."""
    out = sum(
        _rate(edge)
        for node in inside
        for other, edge in graph.adj[node].items()
        if other not in inside
    )
    cards = [
        _rate(edge)
        for other, edge in graph.adj[members[0]].items()
        if graph.nodes[other].get("type") == "nic"
    ]
    own = sum(cards) if cards and all(cards) else out
    return min(out / len(members), own)


def _latency(graph: Any, one: str, other: str, wrong: Callable[[str], DiagnosticError]) -> float:
    """The latency of a shortest path, in seconds."""
    networkx = import_module("networkx")
    try:
        way = networkx.shortest_path(graph, one, other)
    except networkx.NetworkXNoPath:
        raise wrong(f"no link leads from '{one}' to '{other}'") from None
    return sum(_time(graph.edges[a, b]) for a, b in pairwise(way))


def _rate(link: Mapping[str, str]) -> float:
    return _figure(link.get("bandwidth"), _RATES)


def _time(link: Mapping[str, str]) -> float:
    return _figure(link.get("latency"), _TIMES)


def _figure(text: str | None, units: Mapping[str, float]) -> float:
    """A figure of the graph in base units; 0 if it is missing or has an unknown unit."""
    match = _FIGURE.fullmatch(str(text or ""))
    return float(match[1]) * units[match[2]] if match and match[2] in units else 0.0
