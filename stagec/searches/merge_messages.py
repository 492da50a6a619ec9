"""Merges messages that differ in their numbers only."""

import re
from collections.abc import Collection, Mapping

_NUMBER = re.compile(r"\b[0-9][0-9,]*\b")
#: Up to this many numbers are listed; of more, the least and the largest.
_FEW = 3


def merge_messages(messages: Mapping[str, int]) -> dict[str, int]:
    """The counts of messages, merged over those that differ in numbers only; a merged message has
    all of them: `1f1b has 1 chunk per rank, found 4 or 8`."""
    kinds: dict[str, list[str]] = {}
    for message in messages:
        kinds.setdefault(_NUMBER.sub("#", message), []).append(message)
    return {_one(kind): sum(messages[m] for m in kind) for kind in kinds.values()}


def _one(kind: list[str]) -> str:
    places = zip(*map(_NUMBER.findall, kind), strict=True)
    numbers = iter([_together(set(numbers)) for numbers in places])
    return _NUMBER.sub(lambda _: next(numbers), kind[0])


def _together(numbers: Collection[str]) -> str:
    """`4`, `2, 4 or 8`, `1 to 64`."""
    *others, last = sorted(numbers, key=lambda n: int(n.replace(",", "")))
    if not others:
        return last
    return f"{', '.join(others)} or {last}" if len(numbers) <= _FEW else f"{others[0]} to {last}"
