"""Passes: frozen dataclasses whose fields are their options, between two phases.

Owns `Pass`, the conversion of options from and to text, and `Plugin`, which registers passes and
ops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Self, cast, get_type_hints

from stagec.formats.base import Format
from stagec.importers.family import ModelFamily
from stagec.ir.module import Module
from stagec.ir.opdef import OpDef
from stagec.ir_spec.phases import Phase
from stagec.schedule.base import Schedule
from stagec.serving.policy import BatchingPolicy
from stagec.support.diagnostics import error
from stagec.support.frozen import Frozen
from stagec.support.suggest import did_you_mean

_BOOLS = {"true": True, "false": False, "": True}


class _NameOfClass:
    def __get__(self, _: object, owner: type) -> str:
        """`fast-gelu` for `FastGelu`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", owner.__name__).lower()


class Pass(Frozen):
    """Base of all passes. The docstring is the documentation; its first line states what the pass
    does. The `name` in pipelines is by default that of the class: `KeepInputs` is keep-inputs.

    A pass may run while the module is in one of the phases `needs` to `until` (inclusive; without
    `until` exactly `needs`). Afterwards the module is in phase `gives`, or in its previous phase.
    Subclasses are frozen dataclasses without a decorator. Fields are options: `max_bytes: int =
    4096` is `max-bytes=4096` in a pipeline; their types are int, str, bool, Fraction or tuple[str,
    ...]. `metadata={"help": ...}` of a field documents it. Complete functions after `Before:` and
    `After:` are run as a test.

    In a job of several pods, a pass that `meets` runs when all pods have reached such a pass, with
    their current modules in `module.peers`. A pass that changes what the program computes states
    `exact = False`; --check-numerics does not compare around it.
    """

    name: ClassVar[str] = cast("str", _NameOfClass())
    needs: ClassVar[Phase] = Phase.PARSED
    until: ClassVar[Phase | None] = None
    gives: ClassVar[Phase | None] = None
    meets: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    def run(self, module: Module) -> None:
        """Change the module in place. Raises `DiagnosticError` if the input is invalid."""
        raise NotImplementedError(f"{type(self).__name__} has no method run(module)")

    def applies(self, module: Module) -> bool:
        """Whether the pass has an effect on the module; if not, it is skipped, and the module is
        not verified again. By default it runs."""
        return True

    @classmethod
    def runs_in(cls, phase: Phase) -> bool:
        """Whether the pass may run on a module in this phase."""
        return cls.needs <= phase <= (cls.until or cls.needs)

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """The pass with these options, as written in a pipeline.

        Raises `DiagnosticError` for an option that is unknown, missing or of another type.
        """
        known = options_of(cls)
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in known:
                shown = ", ".join(known) or "none"
                raise error(
                    f"pass '{cls.name}' has no option '{name}'",
                    remedy=did_you_mean(name, known) or f"its options are: {shown}",
                )
            values[known[name].declared.name] = known[name].parse(cls.name, text)
        for name, option in known.items():
            if option.required and name not in options:
                raise error(
                    f"pass '{cls.name}' expects option '{name}': {option.kind}",
                    remedy=f"write {cls.name}{{{name}=...}}",
                )
        return cls(**values)

    def options(self) -> dict[str, str]:
        """The options that differ from their defaults, as text: the inverse of `from_options`."""
        options: dict[str, str] = {}
        for name, option in options_of(type(self)).items():
            value = getattr(self, option.declared.name)
            if option.required or value != option.default:
                options[name] = option_text(value)
        return options


@dataclass(frozen=True)
class Option:
    """One option of a pass, read from a field of its class."""

    name: str
    kind: str
    declared: Field[Any]
    type: Any

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.declared.default is MISSING and self.declared.default_factory is MISSING

    @property
    def default(self) -> Any:
        """Its default value, None if it is required."""
        if self.declared.default is not MISSING:
            return self.declared.default
        factory = self.declared.default_factory
        return None if factory is MISSING else factory()

    @property
    def help(self) -> str:
        """The documentation of the option."""
        return str(self.declared.metadata.get("help", ""))

    def parse(self, owner: str, text: str) -> Any:
        """The value of a text. Raises `DiagnosticError` if it is of another type."""
        try:
            return _parse(self.type, text)
        except (ValueError, KeyError, ZeroDivisionError):
            raise error(
                f"option '{self.name}' of pass '{owner}' expects {self.kind}, found '{text}'",
                remedy=f"for example {self.name}={_KINDS[self.type][1]}",
            ) from None


#: By the type of an option: what it is, and an example.
_KINDS: Mapping[Any, tuple[str, str]] = {
    int: ("an integer", "4"),
    str: ("a text", "name"),
    bool: ("true or false", "true"),
    Fraction: ("a fraction", "1/2"),
    tuple[str, ...]: ("a list of names", "(a, b)"),
}


def reads_its_own_options(pass_type: type[Pass]) -> bool:
    """Whether the pass overrides `from_options`, so that its fields are not its options."""
    return any("from_options" in vars(c) for c in pass_type.__mro__ if c is not Pass)


def options_of(pass_type: type[Pass]) -> Mapping[str, Option]:
    """The options of a pass by name; empty for a pass that reads its own options.

    Raises `DiagnosticError` for a field whose type cannot be parsed.
    """
    if reads_its_own_options(pass_type):
        return {}
    annotated: Any = pass_type
    hints = _hints(annotated)
    options: dict[str, Option] = {}
    for item in fields(pass_type):
        name, type_ = item.name.replace("_", "-"), hints[item.name]
        if type_ not in _KINDS:
            raise error(
                f"option '{name}' of pass '{pass_type.name}' has a type that texts cannot give",
                remedy="use int, str, bool, Fraction or tuple[str, ...], or define from_options",
            )
        options[name] = Option(name, _KINDS[type_][0], item, type_)
    return options


@lru_cache(maxsize=512)
def _hints(pass_type: Any) -> Mapping[str, Any]:
    return get_type_hints(pass_type)


def _parse(type_: Any, text: str) -> Any:
    if type_ is bool:
        return _BOOLS[text]
    if type_ == tuple[str, ...]:
        inner = text.removeprefix("(").removesuffix(")")
        return tuple(part.strip() for part in inner.split(",") if part.strip())
    return type_(text)


def option_text(value: object) -> str:
    """The text of the value of an option."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return f"({', '.join(map(str, items))})"
    return str(value)


@dataclass(frozen=True)
class Plugin:
    """The contributions of a package or file: passes, ops, named pipelines (their text by name),
    schedules of pipeline stages, formats of traces, families of models whose configurations can be
    imported, and batching policies of servers."""

    name: str = "plugin"
    passes: tuple[type[Pass], ...] = ()
    ops: tuple[OpDef, ...] = ()
    pipelines: Mapping[str, str] = field(default_factory=dict[str, str])
    schedules: tuple[Schedule, ...] = ()
    formats: tuple[Format, ...] = ()
    families: tuple[ModelFamily, ...] = ()
    policies: tuple[BatchingPolicy, ...] = ()
