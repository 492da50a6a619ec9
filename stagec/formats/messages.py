"""Collectives as messages between the members of a group, for formats without collectives.

    all_reduce of 3 members in a ring: what each does, in parts of the buffer counted from its own
    send 0 -> +1 | recv 2 <- -1 | send 2 -> +1 (behind that) | recv 1 <- -1 | send 1 ...

An expansion lists the messages of one member. It is the same for all members of a group, since
peers and parts are relative to the member's own position; in a tree, it depends on the member's
`Shape`. Every receive is ready when the send at its other end is, so it does not matter whether
sends wait for receives.

| algorithm | all_reduce                             | reduce_scatter, all_gather   | all_to_all |
|-----------|----------------------------------------|------------------------------|------------|
| ring      | 2(n-1) steps, a part to the next one   | n-1 steps                    | pairwise   |
| tree      | the whole up a binary tree, then down  | ring                         | pairwise   |
| pairwise  | a part to each other one, and back     | a part to each, or from each | pairwise   |

With each algorithm, all members together send (n-1) times the buffer, twice that for all_reduce
(arXiv 1909.10803; NCCL, doc PERFORMANCE.md of nccl-tests).
"""

from functools import cache
from typing import Literal, NamedTuple

from stagec.support.diagnostics import error

ALGORITHMS = ("ring", "tree", "pairwise")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Values of `End.other` in a binary tree; otherwise it is an offset >= 1.
PARENT, LEFT, RIGHT = -1, -2, -3
#: The neighbours that a member of a tree has; empty without a tree.
Shape = tuple[int, ...]


class End(NamedTuple):
    """One end of a message: `send`, `recv`, or a `join` that only waits for others.

    `other` is the position of the other end, relative to the member's own, or a neighbour in a
    tree. `part` is the index of the part of the buffer that is sent, relative to the member's
    position; None for the whole buffer. `after` are the indices of the member's ends that must
    complete before this one starts.
    """

    way: Literal["send", "recv", "join"]
    other: int = 0
    part: int | None = None
    after: tuple[int, ...] = ()


def shape_of(kind: str, n: int, algorithm: str, position: int) -> Shape:
    """The shape of a member, on which its expansion depends."""
    if algorithm != "tree" or kind != "all_reduce":
        return ()
    left = 2 * position + 1
    roles = ((PARENT, position > 0), (LEFT, left < n), (RIGHT, left + 1 < n))
    return tuple(role for role, there in roles if there)


def other_end(other: int, position: int, n: int) -> int:
    """The position of the other end of a message of the member at `position`."""
    tree = {PARENT: (position - 1) // 2, LEFT: 2 * position + 1, RIGHT: 2 * position + 2}
    return tree[other] if other < 0 else (position + other) % n


def part_bytes(size: int, n: int, number: int) -> int:
    """The bytes of a part of a buffer that is divided into n: the first parts are larger by a byte
    if it does not divide evenly. At least 1, as simulators require."""
    return max(1, size // n + (number < size % n))


@cache
def expansion(kind: str, n: int, algorithm: str, shape: Shape = ()) -> tuple[End, ...]:
    """The messages of a member of a group of n in a collective, in order. Raises `DiagnosticError`
    for a collective that is not in `KINDS`."""
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
    """n-1 steps around a ring. The first one sends the part `first`; each later one sends the part
    that was received before."""
    ends: list[End] = []
    for step in range(n - 1):
        at = place + 2 * step
        after = (at - 1,) if at else ()
        ends.append(End("send", 1, first - step, after))
        ends.append(End("recv", n - 1, first - step - 1, after))
    return ends


def _scattered(n: int) -> list[End]:
    """Send each other member its part, concurrently, the nearest first, so that each receives from
    one sender at a time."""
    sends = [End("send", k, k) for k in range(1, n)]
    receives = [End("recv", n - k, 0) for k in range(1, n)]
    return [end for pair in zip(sends, receives, strict=True) for end in pair]


def _gathered(n: int, after: tuple[int, ...]) -> list[End]:
    """Send the member's own part to each other member, and receive theirs."""
    sends = [End("send", k, 0, after) for k in range(1, n)]
    receives = [End("recv", n - k, n - k, after) for k in range(1, n)]
    return [end for pair in zip(sends, receives, strict=True) for end in pair]


def _tree(shape: Shape) -> list[End]:
    """Receive from the children, send to the parent, and send the result back down."""
    children = [role for role in shape if role != PARENT]
    ends = [End("recv", child) for child in children]
    below = tuple(range(len(children)))
    if PARENT in shape:
        ends += [End("send", PARENT, None, below), End("recv", PARENT, None, below)]
        below = (len(ends) - 1,)
    return ends + [End("send", child, None, below) for child in children]
