"""The kind of options that give sizes of symbols or axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagec.ir.expr import MAX_INTEGER
from stagec.jobs.request.option import Kind, text_of


class SizesType(Kind[dict[str, int | None]]):
    """`NAME=VALUE,...`; with `open_names`, a name may stand alone."""

    name = "NAME=VALUE,..."
    annotated = "str | Mapping[str, int | None]"

    def __init__(self, *, open_names: bool = False) -> None:
        self._open = open_names

    def read(self, text: str) -> dict[str, int | None]:
        """The values by name."""
        sizes: dict[str, int | None] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, number = (p.strip() for p in part.partition("="))
            if not name.isidentifier() or not name.isascii():
                raise ValueError(f"'{part}' is not NAME=VALUE")
            if name in sizes:
                raise ValueError(f"{name} is given twice")
            if not equals and self._open:
                sizes[name] = None
                continue
            if not equals:
                raise ValueError(f"'{part}' is not NAME=VALUE")
            digits = number.replace("_", "")
            if (
                not digits.isascii()
                or not digits.isdigit()
                or len(digits) > 19
                or not 0 < int(digits) <= MAX_INTEGER
            ):
                raise ValueError(f"{name} expects a positive integer below 2^63, found '{number}'")
            sizes[name] = int(digits)
        return sizes

    def of(self, given: Any) -> dict[str, int | None]:
        if not isinstance(given, str | Mapping):
            raise ValueError(f"expects a dictionary such as {{'L': 4}}, found {given!r:.60}")
        return self.read(text_of(given))
