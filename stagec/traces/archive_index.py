"""The index of an archive: everything in it is checked before it is used.

All here raises ValueError for an index that is not well-formed.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from stagec.program.groups import GroupAxes, coordinate
from stagec.program.nodes import NODE_KINDS, Ints
from stagec.support.json_values import is_list, is_object
from stagec.support.limits import MAX_RANKS

MOST_PROGRAM_BYTES = 1 << 30
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """Where a serialised program is, and how many places each of its tables has."""

    start: int
    size: int
    bytes: int
    trace_bytes: int
    sha256: str
    groups: Mapping[GroupAxes, int]
    peers: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class StoredClass:
    """A class: its pod ('' in a job without pods), its coordinates, the groups that number it and
    those in its program, what the manifest says of it, and its programs by widths of
    identifiers."""

    pod: str
    coords: Mapping[str, int]
    uses: Sequence[GroupAxes]
    axes: Sequence[GroupAxes]
    entry: Mapping[str, object]
    variants: Mapping[tuple[int, ...], StoredVariant]


@dataclass(frozen=True, slots=True)
class StoredPod:
    """A mesh whose ranks begin with `start`, and the ranks of other pods that its own exchange
    messages with, by pod and number of the message."""

    mesh: Mapping[str, int]
    start: int = 0
    other_pods: Mapping[str, Sequence[Ints]] = field(default_factory=dict[str, "Sequence[Ints]"])

    @property
    def ranks(self) -> int:
        """How many it has."""
        return prod(self.mesh.values())

    @property
    def ways(self) -> frozenset[str]:
        """What messages go along: axes, and other pods."""
        return frozenset((*self.mesh, *self.other_pods))


@dataclass(frozen=True, slots=True)
class Index:
    """What an archive says of its job; `members` are the ranks of each class. A job without pods
    has one without a name."""

    name: str
    format: str
    mesh: Mapping[str, int]
    pods: Mapping[str, StoredPod]
    about: Mapping[str, object]
    classes: Sequence[StoredClass]
    members: Sequence[Ints]

    @property
    def several_pods(self) -> bool:
        """Whether it is a job of several pods."""
        return "" not in self.pods


def parse_index(parsed: object, file_bytes: int) -> Index:
    """The index of an archive of so many bytes."""
    given = _object(parsed)
    name = _text(given.get("name"))
    plain = name.isascii() and all(c.isalnum() or c in "-_." for c in name)
    if not plain or name.startswith(".") or name in ("", "manifest") or len(name) > 200:
        raise ValueError(f"{name[:40]!r} is not a valid job name")
    mesh = {axis: _number(size, 1) for axis, size in _object(given.get("mesh")).items()}
    pods = _pods(_list(given["pods"])) if "pods" in given else {"": StoredPod(mesh)}  # came later
    ranks = sum(pod.ranks for pod in pods.values())
    if ranks > MAX_RANKS:
        raise ValueError(f"it has {ranks} ranks, expected at most {MAX_RANKS}")
    classes = [_class(each, pods, file_bytes) for each in _list(given.get("classes"))]
    members = [_members(each.coords, pods[each.pod]) for each in classes]
    every = np.concatenate([np.zeros(0, dtype=np.int64), *members])
    if len(every) != ranks or len(np.unique(every)) != ranks:
        raise ValueError("its rank classes do not contain each rank exactly once")
    for each, own in zip(classes, members, strict=True):
        if each.entry.get("count") != len(own):
            raise ValueError("a rank class has another size than its list of ranks")
    format_ = _text(given.get("format", "chakra"))  # formats came later
    return Index(name, format_, mesh, pods, _object(given.get("about")), classes, members)


def _pods(parsed: Sequence[object]) -> dict[str, StoredPod]:
    """The pods of a job, whose ranks follow each other."""
    given = [_object(each) for each in parsed]
    names = [_text(each.get("name")) for each in given]
    meshes = [{a: _number(n, 1) for a, n in _object(each.get("mesh")).items()} for each in given]
    total = sum(prod(mesh.values()) for mesh in meshes)
    if not names or "" in names or len(set(names)) < len(names) or total > MAX_RANKS:
        raise ValueError("its pods are invalid")
    pods: dict[str, StoredPod] = {}
    start = 0
    for name, mesh, each in zip(names, meshes, given, strict=True):
        own = prod(mesh.values())
        other_pods = {
            n: _peers_of(item, own, total) for n, item in _object(each.get("far")).items()
        }
        if not set(other_pods) <= set(names) - {name} or set(other_pods) & set(mesh):
            raise ValueError("a pod sends to a pod that does not exist")
        pods[name] = StoredPod(mesh, start, other_pods)
        start += own
    return pods


def _peers_of(parsed: object, own: int, total: int) -> list[Ints]:
    """The other ends of messages, for each rank of a pod of so many of its `own`."""
    given = _object(parsed)
    lists = [
        np.array([_number(r, 0) for r in _list(ranks)], dtype=np.int64)
        for ranks in _list(given.get("ranks"))
    ]
    if any(len(ranks) != own or ranks.max() >= total for ranks in lists):
        raise ValueError("a message goes to a rank that does not exist")
    numbers = [_number(n, 0) for n in _list(given.get("messages"))]
    if max(numbers, default=-1) >= len(lists):
        raise ValueError("a message has no matching send or receive")
    return [lists[n] for n in numbers]


def _members(coords: Mapping[str, int], pod: StoredPod) -> Ints:
    every = np.arange(pod.ranks, dtype=np.int64)
    inside = np.ones(pod.ranks, dtype=bool)
    for axis, index in coords.items():
        inside &= coordinate(pod.mesh, axis, every) == index
    return every[inside] + pod.start


def _class(parsed: object, pods: Mapping[str, StoredPod], file_bytes: int) -> StoredClass:
    given = _object(parsed)
    name = _text(given.get("pod", ""))
    if name not in pods:
        raise ValueError(f"it has no pod {name[:40]!r}")
    pod = pods[name]
    mesh = pod.mesh
    coords = {_axis(a, mesh): _number(i, 0) for a, i in _object(given.get("coords")).items()}
    uses = [_axes(axes, mesh) for axes in _list(given.get("uses"))]
    axes = [_axes(axes, mesh) for axes in _list(given.get("axes"))]
    entry = _object(given.get("entry"))
    nodes = _object(entry.get("nodes"))
    known = set(NODE_KINDS[:4]) <= nodes.keys() <= set(NODE_KINDS)  # copies came later
    if not known or not all(_number(n, 0) >= 0 for n in nodes.values()):
        raise ValueError("a rank class does not count its nodes by kind")
    if not set(axes) <= set(uses):
        raise ValueError("a rank class uses a group that has no number")
    variants: dict[tuple[int, ...], StoredVariant] = {}
    for item in _list(given.get("variants")):
        each = _object(item)
        widths = tuple(_number(w, 1) for w in _list(each.get("widths")))
        if len(widths) != len(axes):
            raise ValueError("a program and its rank class have different groups")
        variants[widths] = _variant(each, axes, pod, file_bytes)
    return StoredClass(name, coords, uses, axes, entry, variants)


def _variant(
    given: Mapping[str, object], axes: Sequence[GroupAxes], pod: StoredPod, file_bytes: int
) -> StoredVariant:
    start, size = _number(given.get("start"), 0), _number(given.get("size"), 0)
    total, trace = _number(given.get("bytes"), 0), _number(given.get("trace_bytes"), 1)
    if start + size > file_bytes:
        raise ValueError("it is truncated")
    groups: dict[GroupAxes, int] = {}
    peers: dict[tuple[str, int], int] = {}
    for item in _list(given.get("groups")):
        one, count = _items(item, 2)
        groups[_axes(one, pod.mesh)] = _number(count, 0)
    for item in _list(given.get("peers")):
        axis, by, count = _items(item, 3)
        way, number = _axis(_text(axis), pod.ways), _number(by, -_MOST)
        if abs(number) >= len(pod.other_pods.get(way, ())) and way in pod.other_pods:
            raise ValueError("a message has no matching send or receive")
        peers[way, number] = _number(count, 0)
    tables = 4 * (sum(groups.values()) + sum(peers.values()))
    if total != trace + tables or total > MOST_PROGRAM_BYTES or not set(groups) <= set(axes):
        raise ValueError("the tables of a program do not have the size of the program")
    return StoredVariant(start, size, total, trace, _text(given.get("sha256")), groups, peers)


def _axes(parsed: object, mesh: Mapping[str, int]) -> GroupAxes:
    over = GroupAxes.of_words(_text(a) for a in _list(parsed))
    names = [_axis(a, mesh) for a in over.axes]
    if not names or len(set(names)) < len(names):
        raise ValueError("a group names no axis, or one axis twice")
    return over


def _axis(name: str, mesh: Container[str]) -> str:
    if name not in mesh:
        raise ValueError(f"its mesh has no axis {name[:40]!r}")
    return name


def _object(value: object) -> dict[str, Any]:
    if not is_object(value):
        raise ValueError(f"its index has {type(value).__name__} where an object is expected")
    return value


def _list(value: object) -> list[object]:
    if not is_list(value):
        raise ValueError(f"its index has {type(value).__name__} where a list is expected")
    return value


def _items(value: object, count: int) -> list[object]:
    items = _list(value)
    if len(items) != count:
        raise ValueError(f"its index has {len(items)} items, expected {count}")
    return items


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its index has {type(value).__name__} where a string is expected")
    return value


def _number(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError("its index has no valid number where one is expected")
    return value
