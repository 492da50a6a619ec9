"""The syntax tree that the parser makes: with locations, and with unresolved names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagec.ir.core import Attr
from stagec.ir.types import Type
from stagec.support.source import FileLoc, Loc


@dataclass(slots=True)
class Name:
    """A name without its sigil, and its location."""

    text: str
    loc: FileLoc


@dataclass(slots=True)
class ArgSyntax:
    """An argument of a region: `%name: type = %bound`."""

    name: Name
    type: Type | None
    bound: Name | None


@dataclass(slots=True)
class RegionSyntax:
    """`(args) -> types { ops }`."""

    args: list[ArgSyntax] = field(default_factory=list[ArgSyntax])
    returns: tuple[Type, ...] = ()
    ops: list[OpSyntax] = field(default_factory=list["OpSyntax"])


@dataclass(slots=True)
class OpSyntax:
    """One operation as written. `checked` has the definition with which its signature was checked
    without errors, and its attributes then."""

    name: Name
    results: list[Name]
    symbol: Name | None
    positional: list[tuple[Attr, FileLoc]]
    named: list[tuple[Name, Attr]]
    operands: list[Name]
    region: RegionSyntax | None
    types: tuple[Type, ...]
    loc: Loc
    checked: tuple[object, Mapping[str, Attr]] | None = None
