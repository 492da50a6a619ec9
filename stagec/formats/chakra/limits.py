"""Limits of the consumers of traces, measured on them.

They are those of ASTRA-sim's analytical backends (2026); a job that exceeds them is still valid.
"""

from collections.abc import Iterable

TAG_STRIDE = 500
"""Groups whose ids are congruent modulo this number share message tags; ids below it are safe."""

LARGEST_GROUP_ID = 2147
"""A larger id overflows a signed 32-bit message tag."""

OPEN_FILES = 1024
"""The usual limit on open files of a process; the simulator opens one per rank."""

BYTES_PER_NODE = 1200
SIMULATOR_BYTES = 64 << 30
"""Simulator memory per node, and the total above which to warn."""


def exceeded_limits(group_ids: Iterable[int], ranks: int, nodes_per_rank: int) -> list[str]:
    """A sentence for each consumer limit that a job exceeds.

    `nodes_per_rank` is the mean or the maximum, whichever the caller knows.
    """
    ids = sorted(set(group_ids))
    sentences = (
        _overflowing_ids(ids),
        _shared_tags(ids),
        _open_files(ranks),
        _memory(ranks, nodes_per_rank),
    )
    return [sentence for sentence in sentences if sentence]


def _overflowing_ids(ids: list[int]) -> str:
    over_limit = [number for number in ids if number > LARGEST_GROUP_ID]
    if not over_limit:
        return ""
    return (
        f"{len(over_limit)} communicator group ids exceed {LARGEST_GROUP_ID} (the largest is "
        f"{over_limit[-1]}): ASTRA-sim's 32-bit message tags overflow"
    )


def _shared_tags(ids: list[int]) -> str:
    first_with_tag: dict[int, int] = {}
    for number in ids:
        other = first_with_tag.setdefault(number % TAG_STRIDE, number)
        if other != number:
            return (
                f"communicator group ids {other} and {number} are congruent modulo {TAG_STRIDE}: "
                "ASTRA-sim gives their messages the same tags"
            )
    return ""


def _open_files(ranks: int) -> str:
    if ranks < OPEN_FILES:
        return ""
    return (
        f"{ranks} ranks: ASTRA-sim holds one open file per rank, more than the usual limit of "
        f"{OPEN_FILES} (raise it with ulimit -n)"
    )


def _memory(ranks: int, nodes_per_rank: int) -> str:
    total = ranks * nodes_per_rank * BYTES_PER_NODE
    if total <= SIMULATOR_BYTES:
        return ""
    return (
        f"{ranks} ranks of {nodes_per_rank} nodes take about {total >> 30} GiB of memory in "
        f"ASTRA-sim ({BYTES_PER_NODE} bytes per node)"
    )
