"""Index rules as attributes of op classes, for operands of any rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from string import ascii_lowercase

from stagec.ir.core import Operation
from stagec.ir.rule import Rule, make_rule, parse_rule
from stagec.support.words import counted


@dataclass(frozen=True, slots=True)
class IndexRule:
    """The rule of all operations of an op, `...` are the dimensions that the text does not name, by
    the rank of the first operand with `...`. `sizes` maps a factor that is in no operand to the
    parameter with its size. The other fields are those of `make_rule`.
    """

    text: str
    whole: str = ""
    special: str = ""
    linear: tuple[int, ...] = ()
    numbered: str = ""
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Raises `RuleSyntaxError`."""
        parse_rule(_spelled_out(self.text, 0))

    def of(self, op: Operation) -> Rule:
        """The rule of an operation. Raises `DiagnosticError` if its operand has too few
        dimensions."""
        return make_rule(
            _spelled_out(self.text, self._open_dimensions(op)),
            whole=self.whole,
            special=self.special,
            linear=self.linear,
            numbered=self.numbered,
            sizes={factor: op.expr(name) for factor, name in self.sizes.items()},
        )

    def _open_dimensions(self, op: Operation) -> int:
        """The number of dimensions for which `...` stands."""
        shapes = self.text.partition("->")[0].split(",")
        for value, shape in zip(op.operands, shapes, strict=False):
            named = len(shape) - len("...")
            if "..." in shape and value.tensor.rank < named:
                raise op.error(
                    f"'{op.name}' expects %{value.name} to have at least "
                    f"{counted(named, 'dimension')}, found {value.type}",
                    remedy="give it an operand of that rank",
                )
            if "..." in shape:
                return value.tensor.rank - named
        return 0


@lru_cache(maxsize=4096)
def _spelled_out(text: str, count: int) -> str:
    """The text with unused letters of the alphabet for `...`."""
    free = [letter for letter in ascii_lowercase if letter not in text]
    return text.replace("...", "".join(free[:count]))
