"""Buckets: a reduction cut into calls of a size, each issued when its gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stagec.trace.nodes import Ints, Node, Ref, Stack, last_node


@dataclass(slots=True)
class Bucketed:
    """A collective cut into buckets; its place is where its pieces become ready."""

    nodes: list[Node]
    ready: list[Node | None]


def cut_into_buckets(
    values: Sequence[tuple[Ref, int]], bucket: int, position: Callable[[Node], int]
) -> list[tuple[int, Node | None]]:
    """Bytes of each bucket and the node that completes it, filled in the order of readiness.

    `values` are the operands with their bytes, `position` is that of a node in the order.
    """
    pieces = [piece for ref, size in values for piece in _pieces(ref, size)]
    pieces.sort(key=lambda p: position(p[1]) if p[1] is not None else -1)
    return _cut(pieces, bucket)


def with_buckets(order: Ints, buckets: Sequence[tuple[int, int | None]]) -> Ints:
    """The order of nodes with each bucket right after the node that completes it.

    Nodes are integers; `buckets` are pairs of a bucket and what completes it, if anything does.
    """
    waiting: dict[int, list[int]] = {}
    for bucket, ready in buckets:
        waiting.setdefault(_FIRST if ready is None else ready, []).append(bucket)
    cut = {bucket for bucket, _ in buckets}
    roots = [ready for ready in waiting if ready not in cut]
    place = np.zeros(int(order.max(initial=0)) + 1, dtype=np.int64)
    place[order] = np.arange(1, len(order) + 1)
    where: list[int] = []
    what: list[int] = []
    for root in roots:
        following = list(_following(root, waiting))
        where += [int(place[root]) if root != _FIRST else 0] * len(following)
        what += following
    return np.insert(order, where, what) if what else order


_FIRST = -1


def _following(root: int, waiting: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """The buckets that are complete with a node: one may in turn complete another one."""
    pending = [*reversed(waiting.get(root, ()))]
    while pending:
        bucket = pending.pop()
        yield bucket
        pending += reversed(waiting.get(bucket, ()))


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
