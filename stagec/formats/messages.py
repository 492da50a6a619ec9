"""Collectives as messages between the members of a group, for formats that know no collectives.

    all_reduce of 3 members in a ring: what each does, in parts of the buffer counted from its own
    send 0 -> +1 | recv 2 <- -1 | send 2 -> +1 (behind that) | recv 1 <- -1 | send 1 ...

An expansion says what one member does. It is the same for all members of a group, as other ends and
parts count from the member's own position; in a tree it depends on the member's `Shape`. Every
receive is ready when the send of its other end is, so it does not matter whether sends wait for
them.

| algorithm | all_reduce                             | reduce_scatter, all_gather   | all_to_all |
|-----------|----------------------------------------|------------------------------|------------|
| ring      | 2(n-1) steps, a part to the next one   | n-1 steps                    | pairwise   |
| tree      | the whole up a binary tree, then down  | ring                         | pairwise   |
| pairwise  | a part to each other one, and back     | a part to each, or from each | pairwise   |

All members together send the same bytes in each of them: (n-1) times the buffer, for all_reduce
twice (arXiv 1909.10803; NCCL, doc PERFORMANCE.md of nccl-tests).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from stagec.support.diagnostics import error

ALGORITHMS = ("ring", "tree", "pairwise")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Other ends in a binary tree; in a ring they are offsets from 1.
PARENT, LEFT, RIGHT = -1, -2, -3
#: Which of these a member of a tree has; without a tree none matter.
Shape = tuple[int, ...]


class End(NamedTuple):
    """One end of a message: `send`, `recv`, or a `join` of others that sends nothing.

    `other` is the offset of the other end's position, or one of a tree. `part` is that of the
    buffer which is sent, as the offset of its number; None is all of it. `after` are the ends of
    the same member, by place, that are over before it starts.
    """

    way: Literal["send", "recv", "join"]
    other: int = 0
    part: int | None = None
    after: tuple[int, ...] = ()


def shape_of(kind: str, n: int, algorithm: str, position: int) -> Shape:
    """What an expansion depends on beside the number of members."""
    if algorithm != "tree" or kind != "all_reduce":
        return ()
    left = 2 * position + 1
    roles = ((PARENT, position > 0), (LEFT, left < n), (RIGHT, left + 1 < n))
    return tuple(role for role, there in roles if there)


def other_end(other: int, position: int, n: int) -> int:
    """The position of an other end."""
    tree = {PARENT: (position - 1) // 2, LEFT: 2 * position + 1, RIGHT: 2 * position + 2}
    return tree[other] if other < 0 else (position + other) % n


def part_bytes(size: int, n: int, number: int) -> int:
    """Bytes of a part of a buffer in n: the first ones take what does not divide. A part has one
    byte at least, as simulators want it."""
    return max(1, size // n + (number < size % n))


@cache
def expansion(kind: str, n: int, algorithm: str, shape: Shape = ()) -> tuple[End, ...]:
    """What a member of a group of n does in a collective, in order. Raises `DiagnosticError` for
    one that is not in `KINDS`."""
    if kind not in KINDS:
        raise error(
            f"the collective '{kind}' cannot be written as messages",
            remedy="use --format chakra, which keeps collectives",
        )
    if n == 1:
        return ()
    if kind == "all_to_all" or (algorithm == "pairwise" and kind == "reduce_scatter"):
        return tuple(_scattered(n))
    if algorithm == "pairwise" and kind == "all_gather":
        return tuple(_gathered(n, ()))
    if algorithm == "pairwise":
        scattered = _scattered(n)
        join = End("join", after=tuple(range(len(scattered))))
        return (*scattered, join, *_gathered(n, (len(scattered),)))
    if algorithm == "tree" and kind == "all_reduce":
        return tuple(_tree(shape))
    if kind == "all_reduce":
        scatter = _ring(n, 0, 0)
        return (*scatter, *_ring(n, 1, len(scatter)))
    return tuple(_ring(n, 0 if kind == "all_gather" else -1, 0))


def _ring(n: int, first: int, place: int) -> list[End]:
    """n-1 steps round a ring, of which the first sends the part `first`: each passes on what the
    one before received."""
    ends: list[End] = []
    for step in range(n - 1):
        at = place + 2 * step
        after = (at - 1,) if at else ()
        ends.append(End("send", 1, first - step, after))
        ends.append(End("recv", n - 1, first - step - 1, after))
    return ends


def _scattered(n: int) -> list[End]:
    """To each other member its part, at once; the nearest first, so that each has one sender."""
    sends = [End("send", k, k) for k in range(1, n)]
    receives = [End("recv", n - k, 0) for k in range(1, n)]
    return [end for pair in zip(sends, receives, strict=True) for end in pair]


def _gathered(n: int, after: tuple[int, ...]) -> list[End]:
    """The own part to each other member, and theirs."""
    sends = [End("send", k, 0, after) for k in range(1, n)]
    receives = [End("recv", n - k, n - k, after) for k in range(1, n)]
    return [end for pair in zip(sends, receives, strict=True) for end in pair]


def _tree(shape: Shape) -> list[End]:
    """From the children, to the parent, and back down."""
    children = [role for role in shape if role != PARENT]
    ends = [End("recv", child) for child in children]
    below = tuple(range(len(children)))
    if PARENT in shape:
        ends += [End("send", PARENT, None, below), End("recv", PARENT, None, below)]
        below = (len(ends) - 1,)
    return ends + [End("send", child, None, below) for child in children]
