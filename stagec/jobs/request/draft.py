"""`--draft`: the model that drafts words for a step of decode, its sizes and the flags of its
pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagec.jobs.request.option import CommandOption, Kind
from stagec.jobs.request.sizes import SizesType

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


class DraftType(Kind[DraftText]):
    """`MODEL`, `MODEL: FLAGS` or `MODEL[SIZES]: FLAGS`."""

    name = "MODEL: FLAGS"

    def read(self, text: str) -> DraftText:
        """The draft model."""
        head, _, flags = text.partition(":")
        model, bracket, rest = head.strip().partition("[")
        sizes, closed, behind = rest.partition("]")
        if not model.strip() or bool(bracket) != bool(closed) or behind.strip():
            raise ValueError(f"expects MODEL: FLAGS, {_FORM}, found '{text}'")
        return DraftText(model.strip(), SizesType().read(sizes), flags.strip())


DRAFT_OPTION = CommandOption(
    "draft",
    DraftType(),
    "Of decode: the model that makes the --speculative drafts, in a pod of its own: "
    "'llama3-8b: tp=2'; 'llama3-8b[L=4]: tp=2' gives it sizes.",
)
