"""Checks of a single node: its kind, and the presence, type and range of its attributes.

The tables list the attributes that simulators read; others are not restricted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from stagec.formats.chakra.nodes import ATTR_TYPES, CollKind, NodeKind, TraceNode


class Severity(Enum):
    """How bad a finding is."""

    ERROR = "error"
    """The trace contradicts itself, the traces of other ranks, or the schema: it is broken."""

    GAP = "gap"
    """A recorded trace lacks what a simulator needs: it cannot be simulated as it is."""

    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """A finding about a program, independent of the files that contain the program."""

    node: int | None
    code: str
    message: str
    remedy: str
    severity: Severity = Severity.ERROR


_REQUIRED: Mapping[int, tuple[str, ...]] = {
    NodeKind.MEM_LOAD: ("is_cpu_op", "tensor_size"),
    NodeKind.MEM_STORE: ("is_cpu_op", "tensor_size"),
    NodeKind.COMP: ("is_cpu_op", "num_ops", "tensor_size"),
    NodeKind.COLL: ("is_cpu_op", "comm_type", "comm_size"),
    NodeKind.SEND: ("is_cpu_op", "comm_size", "comm_tag", "comm_dst"),
    NodeKind.RECV: ("is_cpu_op", "comm_size", "comm_tag", "comm_src"),
}

_MINIMUM: Mapping[str, int] = {
    **dict.fromkeys(("num_ops", "tensor_size", "comm_size"), 1),
    **dict.fromkeys(("comm_tag", "comm_dst", "comm_src"), 0),
}

_KINDS = frozenset(NodeKind) - {NodeKind.INVALID}

_SUPPORTED = (
    CollKind.ALL_REDUCE,
    CollKind.ALL_GATHER,
    CollKind.BROADCAST,
    CollKind.ALL_TO_ALL,
    CollKind.REDUCE_SCATTER,
)


def node_problems(node: TraceNode) -> Iterator[NodeProblem]:
    """The problems of a single node."""
    if node.kind == NodeKind.METADATA:
        message = f"expected no METADATA node, found {node.label}; simulators stall on it"
        yield NodeProblem(node.id, "metadata-node", message, "leave the node out")
    elif node.kind not in _KINDS:
        message = f"expected a node kind from 2 to 7, found {node.kind} on {node.label}"
        yield NodeProblem(node.id, "unknown-kind", message, "write the kind of the Chakra schema")
    for name in _REQUIRED.get(node.kind, ()):
        yield from _attribute_problems(node, name)
    if "pg_name" in node.attr_types and node.kind == NodeKind.COLL:
        yield from _attribute_problems(node, "pg_name")
    if node.kind == NodeKind.COLL and node.attr_types.get("comm_type") == "int64":
        yield from _collective_problems(node)


def _attribute_problems(node: TraceNode, name: str) -> Iterator[NodeProblem]:
    expected, actual = ATTR_TYPES[name], node.attr_types.get(name)
    if actual is None:
        message = f"expected attribute {name} ({expected}) on {node.label}, found none"
        yield NodeProblem(node.id, "missing-attribute", message, f"write {name} as {expected}")
        return
    if actual != expected:
        message = f"expected attribute {name} of {node.label} to be {expected}, found {actual}"
        remedy = f"write {name} as {expected}; readers take another type for 0"
        yield NodeProblem(node.id, "wrong-type", message, remedy)
        return
    value, least = node.attrs[name], _MINIMUM.get(name)
    if least is not None and isinstance(value, int) and value < least:
        message = f"expected {name} >= {least} on {node.label}, found {value}"
        yield NodeProblem(node.id, "bad-value", message, _value_remedy(name))


def _value_remedy(name: str) -> str:
    if name in ("num_ops", "tensor_size", "comm_size"):
        return "leave out nodes without work, or write at least 1; simulators stall on zero"
    return f"write {name} as a number that is not negative"


def _collective_problems(node: TraceNode) -> Iterator[NodeProblem]:
    kind = node.attrs["comm_type"]
    if kind in _SUPPORTED:
        return
    names = ", ".join(f"{kind.label} ({kind:d})" for kind in _SUPPORTED)
    message = f"expected comm_type of {node.label} to be one of {names}, found {kind!r}"
    remedy = "express it by a supported collective; simulators abort on others"
    yield NodeProblem(node.id, "unsupported-collective", message, remedy)
