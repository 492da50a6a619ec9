"""Parameters that are not trained."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged


class FreezeRule(Record):
    """Which parameters are not trained."""

    names: str = flagged(
        "freeze",
        "Parameters that are not trained, by name, scope or pattern, such as 'vision,embed' or "
        "'*,!projector'.",
        "str",
        doc=(
            "patterns of names, separated by commas, as in 'embed, vision'; ! before one: these "
            "are trained after all"
        ),
        required=True,
        positional=True,
        metavar="NAME,...",
        numerics=True,
    )

    @property
    def patterns(self) -> tuple[tuple[str, bool], ...]:
        """Each pattern, and whether it freezes the parameters that it matches."""
        names = (name.strip() for name in self.names.split(","))
        return tuple((n.removeprefix("!"), not n.startswith("!")) for n in names if n)

    def freezes(self, path: str) -> bool | None:
        """Whether a parameter is frozen, by the last pattern that matches; None if none does."""
        said = [frozen for pattern, frozen in self.patterns if matches(path, pattern)]
        return said[-1] if said else None


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a parameter, of a scope around it, or a path of both:
    `wq`, `gqa`, `layers/gqa` and `layers/*/wq` match `layers/gqa/wq`."""
    parts = path.split("/")
    ends = ("/".join(parts[i:]) for i in range(len(parts)))
    return any(fnmatchcase(end, p) for end in ends for p in (pattern, f"{pattern}/*"))


class FreezeOp(Statement):
    """Parameters that are not trained: they have no gradient and no optimizer state, and backward
    computes no product for them. Backward ends where nothing before is trained.

    A pattern is the name of a parameter or of a scope, with `*` for any characters; the last one
    that matches counts. The layers of a stack are one parameter, so they are frozen together. With
    `stg.lora`, which freezes everything except its adapters, "!embed" trains the embedding too.
    """

    name, record = "stg.freeze", FreezeRule
    section = Section.PARTS
    training = "a server trains nothing"
    example = 'stg.freeze["embed, vision"]'

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if not all(name.strip(" !") for name in op.text("names").split(",")):
            yield f'expects names separated by commas, found "{op.text("names")}"'
