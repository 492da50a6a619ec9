"""bind: replaces symbols and mesh axes by numbers."""

from collections.abc import Mapping
from typing import Self

from stagec.api import Module, Pass, Phase, error
from stagec.ir.bind import bind


class Bind(Pass):
    """Replace symbols and axes by numbers, `bind{B=64,tp=8}`; without options, by their defaults.

    Every assumption whose symbols all have values is checked. Axes of size 1 are removed.

    Before:
        stg.symbols[B, D]
        stg.assume[B % dp == 0, D % tp == 0]
        stg.mesh @pod[dp, tp]
        stg.func @f(%x: bf16[B@dp, D@tp]) {
          %y = stg.gelu(%x)
          stg.return(%y)
        }
    After (bind{B=64,D=32,dp=4,tp=1}):
        stg.symbols[B = 64, D = 32]
        stg.mesh @pod[dp = 4]
        stg.func @f(%x: bf16[64@dp, 32]) {
          %y = stg.gelu(%x)
          stg.return(%y)
        }
    """

    needs = Phase.PARSED
    until = Phase.LOWERED

    values: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """The pass for any NAME=VALUE. Raises `DiagnosticError` for a value that is not an
        integer."""
        for name, text in options.items():
            if not text.isdecimal() or len(text) > 18:
                raise error(
                    f"'bind' expects an integer for '{name}', found '{text}'",
                    remedy=f"write bind{{{name}=8}}",
                )
        return cls(tuple((name, int(text)) for name, text in options.items()))

    def options(self) -> dict[str, str]:
        """The inverse of `from_options`."""
        return {name: str(value) for name, value in self.values}

    def run(self, module: Module) -> None:
        bind(module, dict(self.values) or module.env)
