"""The kind of options that are times: 500ms, 0.5s, 10min, 12h."""

from __future__ import annotations

import re
from typing import Any

from stagec.jobs.request.option import Kind, Number

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|ms|s|min|h)")
_SECONDS = Number(0, above=True)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


class TimeType(Kind[float]):
    """`500ms`, `0.5s`, with `zero` also `0s`, as seconds."""

    name = "TIME"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def read(self, text: str) -> float:
        """The seconds."""
        match = _TIME.fullmatch(text.strip())
        if match is None or (float(match[1]) == 0 and not self._zero):
            raise ValueError(f"expects a time such as 30ms or 0.5s, found '{text}'")
        return float(match[1]) * _UNITS[match[2]]

    def of(self, given: Any) -> float:
        """The seconds of a text, or of a number of them."""
        return self.read(given) if isinstance(given, str) else _SECONDS.of(given)

    def text(self, value: Any) -> str:
        return f"{value:.12f}".rstrip("0").rstrip(".") + "s"
