"""Times as options: 500ms, 0.5s."""

from __future__ import annotations

import re
from typing import Any

import click

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class TimeType(click.ParamType[float]):
    """`500ms`, `0.5s`: seconds."""

    name = "TIME"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The seconds."""
        found = _TIME.fullmatch(str(value).strip())
        if found is None or float(found[1]) == 0:
            self.fail(f"expects a time such as 30ms or 0.5s, found '{value}'", param, ctx)
        return float(found[1]) * _UNITS[found[2]]
