"""Ranges of values on the command line, which double.

`1..8` is `1,2,4,8`, `x0.5..x2` is `x0.5,x1,x2`, and `25GB/s..100GB/s` is `25GB/s,50GB/s,100GB/s`.
"""

import re
from collections.abc import Sequence
from decimal import Decimal

#: At most 18 digits before the point, so a range has at most 120 values.
_NUMBER = r"(x?)([0-9]{1,18}(?:\.[0-9]{1,9})?)\s?([A-Za-z/]{0,8})"
_RANGE = re.compile(rf"{_NUMBER}\s*\.\.\s*{_NUMBER}")
#: The rule for ranges, for messages.
RULE = "a range goes from A, above 0, up to B, and doubles: 1..8"


def is_range(text: str) -> bool:
    """Whether a text is a range of two integers, two factors, or two quantities of one unit."""
    match = _RANGE.fullmatch(text)
    if match is None or (match[1], match[3]) != (match[4], match[6]):
        return False
    return bool(match[1] or match[3]) or "." not in match[2] + match[5]


def doubled_texts(text: str) -> Sequence[str]:
    """The values of a range as texts; empty if it breaks `RULE`."""
    match = _RANGE.fullmatch(text)
    assert match is not None, text
    sign, value, last, unit = match[1], Decimal(match[2]), Decimal(match[5]), match[6]
    values: list[str] = []
    while 0 < value <= last:
        values.append(f"{sign}{value.normalize():f}{unit}")
        value *= 2
    return values
