"""Everything that can be wrong with names and options, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stagec.api import Module, OpDef, Pass, Plugin


class MyGelu(OpDef):
    """A second definition of a built-in op."""

    name = "stg.gelu"


@dataclass(frozen=True)
class SameName(Pass):
    """A second pass of that name."""

    name: ClassVar[str] = "infer-shapes"

    def run(self, module: Module) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Nameless(Pass):
    """A pass whose name is empty; one that states none has that of its class."""

    name: ClassVar[str] = ""


@dataclass(frozen=True)
class Untextual(Pass):
    """An option that cannot be written."""

    name: ClassVar[str] = "untextual"
    size: float = 1.0


PLUGIN = Plugin(name="clash", passes=(SameName, Nameless, Untextual), ops=(MyGelu(),))
