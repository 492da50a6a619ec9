"""`--draft`: the model that drafts words for a step of decode, its sizes and the flags of its
pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from stagec.driver.request.sizes import SizesType

_FORM = "as in 'llama3-8b: tp=2', or with sizes 'llama3-8b[L=4]: tp=2'"


@dataclass(frozen=True, slots=True)
class DraftText:
    """`MODEL[SIZES]: FLAGS`."""

    model: str
    sizes: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])
    flags: str = ""

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={n}" for name, n in self.sizes.items())
        model = f"{self.model}[{sizes}]" if sizes else self.model
        return f"{model}: {self.flags}" if self.flags else model


class DraftType(click.ParamType[DraftText]):
    """`MODEL`, `MODEL: FLAGS` or `MODEL[SIZES]: FLAGS`."""

    name = "MODEL: FLAGS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> DraftText:
        """The draft model."""
        if isinstance(value, DraftText):
            return value
        head, _, flags = str(value).partition(":")
        model, bracket, rest = head.strip().partition("[")
        sizes, closed, behind = rest.partition("]")
        if not model.strip() or bool(bracket) != bool(closed) or behind.strip():
            self.fail(f"expects MODEL: FLAGS, {_FORM}, found '{value}'", param, ctx)
        return DraftText(model.strip(), SizesType().convert(sizes, param, ctx), flags.strip())


DRAFT_OPTION = click.option(
    "--draft",
    type=DraftType(),
    help="Of decode: the model that makes the --speculative drafts, in a pod of its own: "
    "'llama3-8b: tp=2'; 'llama3-8b[L=4]: tp=2' gives it sizes.",
)
