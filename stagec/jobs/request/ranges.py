"""Ranges of values on the command line: `1..8` is `1,2,4,8`, and `x0.5..x2` is `x0.5,x1,x2`."""

import re
from collections.abc import Sequence
from decimal import Decimal

#: At most 18 digits before the point, so a range has at most 120 values.
_NUMBER = r"(x?)([0-9]{1,18}(?:\.[0-9]{1,9})?)"
_RANGE = re.compile(rf"{_NUMBER}\s*\.\.\s*{_NUMBER}")
#: The rule for ranges, for messages.
RULE = "a range goes from A, above 0, up to B, and doubles: 1..8"


def is_range(text: str) -> bool:
    """Whether a text is a range of two integers, or of two factors."""
    match = _RANGE.fullmatch(text)
    if match is None or match[1] != match[3]:
        return False
    return match[1] == "x" or "." not in match[2] + match[4]


def doubled_texts(text: str) -> Sequence[str]:
    """The values of a range as texts; empty if it breaks `RULE`."""
    match = _RANGE.fullmatch(text)
    assert match is not None, text
    sign, value, last = match[1], Decimal(match[2]), Decimal(match[4])
    values: list[str] = []
    while 0 < value <= last:
        values.append(f"{sign}{value.normalize():f}")
        value *= 2
    return values
