"""Buckets: a reduction cut into calls of a size, each issued when its gradients are complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagec.trace.nodes import Node, Ref, Stack, last_node


@dataclass(slots=True)
class Bucketed:
    """A collective cut into buckets; its place is where its pieces become ready."""

    nodes: list[Node]
    ready: list[Node | None]


def cut_into_buckets(
    values: Sequence[tuple[Ref, int]], bucket: int, order: Sequence[Node]
) -> list[tuple[int, Node | None]]:
    """Bytes of each bucket and the node that completes it, filled in the order of readiness.

    `values` are the operands with their bytes, `order` the nodes so far.
    """
    pieces = [piece for ref, size in values for piece in _pieces(ref, size)]
    rank = {node: i for i, node in enumerate(order)}
    pieces.sort(key=lambda p: rank.get(p[1], -1) if p[1] is not None else -1)
    return _cut(pieces, bucket)


def with_buckets(order: Sequence[Node], bucketed: Sequence[Bucketed]) -> list[Node]:
    """The nodes with each bucket right after the node that completes it."""
    waiting: dict[Node | None, list[Node]] = {}
    for cut in bucketed:
        for node, ready in zip(cut.nodes, cut.ready, strict=True):
            waiting.setdefault(ready, []).append(node)
    result: list[Node] = []
    pending = [*reversed(order), *reversed(waiting.get(None, []))]
    while pending:  # a bucket may in turn complete another one
        node = pending.pop()
        result.append(node)
        pending += reversed(waiting.get(node, []))
    return result


def _pieces(ref: Ref, size: int) -> list[tuple[int, Node | None]]:
    """The bytes of a value with the node that completes each part."""
    if not isinstance(ref, Stack):
        return [(size, ref)]
    return [(size // len(ref.items), last_node(part)) for part in ref.items]


def _cut(pieces: Sequence[tuple[int, Node | None]], bucket: int) -> list[tuple[int, Node | None]]:
    """Buckets filled in order; each is ready with its last piece."""
    found: list[tuple[int, Node | None]] = []
    filled, ready = 0, None
    for size, node in pieces:
        ready = node
        filled += size
        while filled >= bucket:
            found.append((bucket, ready))
            filled -= bucket
    return [*found, (filled, ready)] if filled else found
