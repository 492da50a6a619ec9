"""The option `--draft`: the model that drafts tokens for a step of decode, with its sizes and
flags."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stagec.jobs.request.option import CommandOption, Kind, SizesType

_FORM = "'llama3-8b: tp=2', or with sizes 'llama3-8b[L=4]: tp=2'"
#: The flag `on` among the flags of a draft model, which says on which ranks it runs.
_ON = re.compile(r"(?:^|[\s,])on=([^\s,]*)")
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class DraftText:
    """`MODEL[SIZES]: FLAGS`; with `on=model` among the flags it runs on the ranks of the model that
    it drafts for."""

    model: str
    sizes: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])
    flags: str = ""
    on_model: bool = False

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={n}" for name, n in self.sizes.items())
        model = f"{self.model}[{sizes}]" if sizes else self.model
        flags = ",".join(filter(None, (self.flags, f"on={_MODEL}" if self.on_model else "")))
        return f"{model}: {flags}" if flags else model


class DraftType(Kind[DraftText]):
    """`MODEL`, `MODEL: FLAGS` or `MODEL[SIZES]: FLAGS`."""

    name = "MODEL: FLAGS"

    def read(self, text: str) -> DraftText:
        """The draft model."""
        head, _, flags = text.partition(":")
        model, bracket, rest = head.strip().partition("[")
        sizes, closed, behind = rest.partition("]")
        if not model.strip() or bool(bracket) != bool(closed) or behind.strip():
            raise ValueError(f"expects MODEL: FLAGS, as in {_FORM}, found '{text}'")
        on = _ON.findall(flags)
        if any(where != _MODEL for where in on):
            raise ValueError(
                f"expects on={_MODEL}, or no 'on' for a draft model with ranks of its own, found "
                f"'{text}'"
            )
        own = _ON.sub("", flags).strip(", ")
        return DraftText(model.strip(), SizesType().read(sizes), own, on_model=bool(on))


DRAFT_OPTION = CommandOption(
    "draft",
    DraftType(),
    "With --serve decode: the model that computes the --speculative drafts, in a pod of its own: "
    "'llama3-8b: tp=2'. 'llama3-8b[L=4]: tp=2' sets its sizes, 'llama3-8b: on=model' uses the "
    "ranks of the main model.",
)
