"""Sizes of symbols and axes as an option gives them."""

from __future__ import annotations

from typing import Any

import click

from stagec.ir.expr import MAX_INTEGER


class SizesType(click.ParamType[dict[str, int | None]]):
    """`NAME=VALUE,...`; with `open_names`, a name may stand alone."""

    name = "NAME=VALUE,..."

    def __init__(self, *, open_names: bool = False) -> None:
        self._open = open_names

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int | None]:
        """The values by name."""
        found: dict[str, int | None] = {}
        for part in filter(None, (p.strip() for p in str(value).split(","))):
            name, equals, number = (p.strip() for p in part.partition("="))
            if not name.isidentifier() or not name.isascii():
                self.fail(f"'{part}' is not NAME=VALUE", param, ctx)
            if name in found:
                self.fail(f"{name} is given twice", param, ctx)
            if not equals and self._open:
                found[name] = None
                continue
            if not equals:
                self.fail(f"'{part}' is not NAME=VALUE", param, ctx)
            digits = number.replace("_", "")
            if (
                not digits.isascii()
                or not digits.isdigit()
                or len(digits) > 19
                or not 0 < int(digits) <= MAX_INTEGER
            ):
                self.fail(
                    f"{name} expects a positive integer below 2^63, found '{number}'", param, ctx
                )
            found[name] = int(digits)
        return found
