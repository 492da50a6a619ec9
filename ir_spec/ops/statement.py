"""What a statement of a strategy is: its parameters, the flags that write it, its checks and text.

A statement is defined once, by two classes side by side: a record with its parameters (`Said`),
which passes read, and its op (`Statement`). The command line, sweeps, `--print-strategy`, commands
in manifests and docs/flags.md are derived from them.

    @dataclass(frozen=True)
    class Bucket(Said):
        bytes: int = stated("int", "bytes of a call", required=True, least=1, flag=Flag(...))

    class BucketOp(Statement):
        name, says = "stg.bucket", Bucket
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from math import prod
from typing import Any, ClassVar, TypeAlias, cast

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, fraction
from stagec.ir.opdef import Param
from stagec.ir_spec.ops.structure import Declaration
from stagec.support.source import UNKNOWN, Loc

Axes: TypeAlias = tuple[str, ...]
#: What a flag has no effect without: an axis, another flag or a dimension; of several names, any.
Need: TypeAlias = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line. What is left out comes from the parameter that it gives.

    Kinds: `switch` (`--sp`; with the default True `--async-tp/--no-async-tp`), `int`, `choice`,
    `text`, `names` (some of the choices, with commas), `ratio`, `layers` (`7,8*14`), `loads`. A
    default that is no value of the parameter says that the flag is off.
    """

    name: str  # with _ for -
    help: str
    kind: str = ""
    default: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    needs: tuple[Need, ...] = ()  # it has no effect without all of these
    tries: tuple[Any, ...] = ()  # values to try where memory is short, each with less than before
    numerics: bool = False  # it changes the numbers that training sees

    @property
    def option(self) -> str:
        """`--dp-shard` for `dp_shard`."""
        return "--" + self.name.replace("_", "-")

    def is_usual(self, value: object) -> bool:
        """Whether a value is the default."""
        return bool(value == self.default)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks for: the values of its flags, the axes of the mesh (None: of open
    size) and the symbols of the model, with their sizes as far as they are known."""

    flags: Mapping[str, Any]
    axes: Mapping[str, int | None]
    sizes: Mapping[str, int | None]

    def __getitem__(self, flag: str) -> Any:
        return self.flags[flag]

    def over(self, *names: str) -> Axes:
        """Those of these axes that the mesh has."""
        return tuple(a for a in names if a in self.axes)

    def ranks(self, *names: str) -> int:
        """The ranks along these axes."""
        return prod(self.axes.get(a) or 1 for a in names)


# -- parameters ------------------------------------------------------------------------------------

_UNSET: Any = object()
_NOTHING: Mapping[str, Any] = {
    "names": (),
    "ints": (),
    "int": 0,
    "flag": False,
    "name": "",
    "str": "",
    "ratio": None,
}
_FLAG_KINDS = {
    "int": "int",
    "ints": "layers",
    "flag": "switch",
    "ratio": "ratio",
    "names": "names",
    "str": "text",
}


def stated(
    kind: str,
    doc: str,
    *,
    default: Any = _UNSET,
    required: bool = False,
    positional: bool = False,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    most: int | None = None,
    flag: Flag | None = None,
) -> Any:
    """A parameter of a statement, as a field of its record.

    `default` is what holds where the text does not say it; `least` and `most` are the bounds of a
    number, in a text and on the command line.
    """
    if default is _UNSET:
        default = _NOTHING[kind]
    what: dict[str, Any] = {"param": Param("", kind, doc, required, positional, choices)}
    what |= {"least": least, "most": most, "flag": flag}
    return field(default=default, metadata=what)


@dataclass(frozen=True)
class Said:
    """Base of what statements say, one field for each parameter."""

    loc: Loc = field(default=UNKNOWN, kw_only=True)


# -- statements ------------------------------------------------------------------------------------


class Statement(Declaration):
    """Base of the statements of a strategy. The flags that write it are those of its parameters,
    and `flags` for what is no parameter of its own."""

    says: ClassVar[type[Said]] = Said
    flags: ClassVar[tuple[Flag, ...]] = ()
    repeats: ClassVar[bool] = False  # it may stand several times
    _given: ClassVar[Mapping[str, Flag]] = {}  # parameter -> the flag that has its very value
    _bounds: ClassVar[Mapping[str, tuple[int | None, int | None]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = [(f.name, f.default, f.metadata) for f in fields(cls.says) if f.metadata]
        cls.params = tuple(replace(about["param"], name=name) for name, _, about in found)
        cls._bounds = {name: (about["least"], about["most"]) for name, _, about in found}
        flags = {n: _complete(n, default, a) for n, default, a in found if a["flag"] is not None}
        cls.flags = (*cls.flags, *flags.values())
        kinds = {p.name: _kind(p) for p in cls.params}
        cls._given = {name: flag for name, flag in flags.items() if flag.kind == kinds[name]}

    def read(self, op: Operation) -> Said:
        """What an op of this kind says, with the defaults for what it leaves out."""
        found = {p.name: _value(op, p) for p in self.params if p.name in op.attrs}
        return self.says(**found, loc=op.loc)

    def verify(self, op: Operation) -> Iterator[str]:
        """What is out of its bounds; subclasses go on from here."""
        for name, (least, most) in self._bounds.items():
            if name in op.attrs and (least is not None or most is not None):
                yield from _out_of_bounds(name, op.expr(name), least, most)

    # -- flags -------------------------------------------------------------------------------------

    def written(self, asked: Asked) -> Iterator[Mapping[str, Any]]:
        """The statements that flags stand for, each as its parameters; by default one if a flag
        of a parameter is given."""
        if said := self.given(asked):
            yield said

    def given(self, asked: Asked) -> dict[str, Any]:
        """The parameters that flags give another value than the default."""
        found: dict[str, Any] = {}
        for name, flag in self._given.items():
            value = asked[flag.name]
            if not flag.is_usual(value):
                found[name] = _said(flag, value)
        return found

    def refused(self, asked: Asked) -> Iterator[tuple[str, str]]:
        """What is wrong with the flags of this statement, each with a remedy."""
        return iter(())

    def text(self, asked: Asked) -> Iterator[str]:
        """The statements that flags stand for, as they stand in a text."""
        for said in self.written(asked):
            parts = [_part(p, said[p.name]) for p in self.params if p.name in said]
            yield f"{self.name}[{', '.join(parts)}]"


def _said(flag: Flag, value: Any) -> Any:
    """The value of a parameter that a flag gives."""
    match flag.kind:
        case "choice":
            return value.replace("-", "_")
        case "names":
            return tuple(n.strip() for n in value.split(","))
        case _:
            return value


def _kind(param: Param) -> str:
    return _FLAG_KINDS.get(param.kind) or ("choice" if param.choices else "text")


def _complete(name: str, default: Any, about: Mapping[str, Any]) -> Flag:
    """A flag with what it has from its parameter."""
    flag, param = cast(Flag, about["flag"]), cast(Param, about["param"])
    kind = flag.kind or _kind(param)
    choices = flag.choices or tuple(c.replace("_", "-") for c in param.choices)
    default = default if flag.default is None else flag.default
    if kind == "choice" and default not in choices:
        choices = (default, *choices)
    least = flag.least if flag.least is not None else about["least"]
    if kind == "int" and least is not None:
        least = min(least, default)
    most = flag.most if flag.most is not None else about["most"]
    return replace(flag, kind=kind, choices=choices, default=default, least=least, most=most)


def _value(op: Operation, param: Param) -> Any:
    match param.kind:
        case "names":
            return op.names(param.name)
        case "ints":
            return op.integers(param.name)
        case "int":
            return op.integer(param.name)
        case "flag":
            return op.flag(param.name)
        case "ratio":
            return op.expr(param.name)
        case _:
            return op.text(param.name)


def _out_of_bounds(name: str, value: Expr, least: int | None, most: int | None) -> Iterator[str]:
    wanted = f"a number of {least} or more" if most is None else f"a number from {least} to {most}"
    if value.symbols or not _within(fraction(value), least, most):
        yield f"expects '{name}' to be {wanted}, found {value}"


def _within(value: Fraction, least: int | None, most: int | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _part(param: Param, value: Any) -> str:
    """`zero = 3`."""
    if param.kind == "flag":
        return param.name
    text = _text(value)
    if param.kind == "str":
        text = f'"{text}"'
    return text if param.positional else f"{param.name} = {text}"


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    items = [str(v) for v in cast("tuple[object, ...]", value)]
    return items[0] if len(items) == 1 else f"({', '.join(items)})"
