"""The base classes of the statements of a strategy: parameters, flags, checks and text.

A statement is defined once, by two classes: a record with its parameters (`Record`), which passes
read, and its op (`Statement`). The command line, sweeps, `--print-strategy`, commands in manifests
and docs/reference/flags.md are derived from them.

    class BucketRule(Record):
        copies: bool = flagged("ddp_copies", "Copy gradients into flat buffers.", rare=True)

    class BucketOp(Statement):
        name, record = "stg.bucket", BucketRule
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import chain, combinations
from typing import Any, ClassVar, TypeAlias, cast

from stagec.ir.core import Operation
from stagec.ir.expr import fraction
from stagec.ir.param import Param
from stagec.ir_spec.ops.structure import Declaration
from stagec.ir_spec.strategy.axes import AXES
from stagec.ir_spec.strategy.flag_values import SERVE, FlagValues
from stagec.support.diagnostics import Located
from stagec.support.frozen import Frozen
from stagec.support.source import UNKNOWN, Loc

#: An axis, flag or dimension without which a flag has no effect; of several names, any one.
Need: TypeAlias = str | tuple[str, ...]


class Section(Enum):
    """The sections of the help of a command, in their order."""

    MODEL = "Model"
    RANKS = "Ranks"
    DATA = "Batch and data parallelism"
    TENSOR = "Tensor parallelism"
    PIPELINE = "Pipeline stages"
    SEQUENCE = "Long sequences"
    EXPERTS = "Experts"
    MEMORY = "Activations"
    KERNELS = "Kernels and element types"
    PARTS = "Adapters and parts of the model"
    OTHERS = "Other flags of a strategy"
    SERVING = "Serving"
    REQUESTS = "Steps of a server"
    PASSES = "Passes"
    WORKERS = "Workers"
    MANY = "Many jobs"
    MACHINE = "Machine"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line. Fields that are left out come from its parameter, and from its
    statement (`Statement.rare`).

    Kinds: `switch` (`--sp`; with the default True `--async-tp/--no-async-tp`), `int`, `choice`,
    `text`, `names` (some of the choices, or any, with commas), `patterns` (any, with commas),
    `order` (of some of the choices), `ratio`, `layers` (`7,8*14`), `loads`. If the default is not a
    value of the parameter, it means that the flag is off.
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
    beside: tuple[Need, ...] = ()  # as `needs`, but a stack may state its parameter without them
    only: tuple[str, Any] | None = None  # a flag, and the value without which it is refused
    tries: tuple[Any, ...] = ()  # values to try where memory is short, each with less than before
    numerics: bool = False  # it changes the numbers that training sees
    rare: bool = False  # --help-all tells of it, --help does not
    software: bool = False  # what runs the job decides it: a search does not try other values
    spares: bool = False  # it spares memory and no time: a search for less time does not try it

    @property
    def option(self) -> str:
        """`--dp-shard` for `dp_shard`."""
        return "--" + self.name.replace("_", "-")

    def with_value(self, value: object) -> str:
        """`--zero 3`, or for a switch `--sp` and `--sp off`."""
        return (
            self.option if value is True else f"{self.option} {'off' if value is False else value}"
        )

    def is_default(self, value: object) -> bool:
        """Whether a value is the default."""
        return bool(value == self.default)

    def others(self, now: Any) -> tuple[Any, ...]:
        """Values other than the present one: all values of a switch, of a choice or of a list of
        names; the default, half and twice the value for a number; none for other kinds."""
        match self.kind:
            case "switch":
                values: Iterable[Any] = (not now,)
            case "choice" | "text":
                values = self.choices
            case "names" | "patterns":
                values = map(",".join, _subsets(self.choices))
            case "int":
                least, most = self.least or 0, self.most
                candidates = (self.default, now // 2, now * 2 or 1)
                values = (n for n in candidates if n >= least and (most is None or n <= most))
            case _:
                values = ()
        return tuple(v for v in dict.fromkeys(values) if v != now)


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))


# -- parameters ------------------------------------------------------------------------------------

#: The default values of kinds of parameters.
_NOTHING: Mapping[str, Any] = {
    "names": (),
    "patterns": (),
    "ints": (),
    "int": 0,
    "flag": False,
    "name": "",
    "str": "",
    "ratio": None,
}
#: The kind of a flag for each kind of parameter.
_FLAG_KINDS = {
    "int": "int",
    "ints": "layers",
    "flag": "switch",
    "ratio": "ratio",
    "names": "names",
    "patterns": "patterns",
    "str": "text",
}


@dataclass(frozen=True, slots=True)
class _Field:
    """A parameter with its bounds and its flag."""

    param: Param
    default: Any
    least: int | None
    most: int | None
    flag: Flag | None

    def complete_flag(self) -> Flag | None:
        """The flag, completed with the fields of the parameter."""
        flag, param = self.flag, self.param
        if flag is None:
            return None
        kind = flag.kind or self.flag_kind
        default = self.default if flag.default is None else flag.default
        choices = flag.choices or tuple(c.replace("_", "-") for c in param.choices)
        if kind == "choice":
            default = default.replace("_", "-")
            choices = choices if default in choices else (default, *choices)
        least = self.least if flag.least is None else flag.least
        if kind == "int" and least is not None:
            least = min(least, default)
        most = self.most if flag.most is None else flag.most
        return replace(flag, kind=kind, choices=choices, default=default, least=least, most=most)

    @property
    def limits(self) -> str:
        """The bounds and the default, for the end of a parameter's description: `, 0 to 64 (default
        1)`."""
        bounds = "" if not (self.least or self.most) else f", {self.least} or more"
        bounds = bounds if self.most is None else f", {self.least} to {self.most}"
        left_out = not self.param.required and not self.param.positional
        usual = self.default if left_out and self.default != _NOTHING[self.param.form] else None
        return bounds + (f" (default {usual})" if usual is not None else "")

    @property
    def flag_kind(self) -> str:
        """The kind of a flag with the same value as the parameter."""
        return _FLAG_KINDS.get(self.param.form) or ("choice" if self.param.choices else "text")

    def read(self, op: Operation) -> Any:
        """The value of the parameter in an op."""
        name = self.param.name
        match self.param.form:
            case "names":  # `none` overrides the names of a stack
                names = op.names(name)
                return () if names == ("none",) else names
            case "patterns":
                return patterns(op, name)
            case "ints":
                return op.integers(name)
            case "int":
                return op.integer(name)
            case "flag":
                return op.flag(name)
            case "ratio":
                return op.expr(name)
            case _:
                return op.text(name)

    def verify(self, op: Operation) -> Iterator[str]:
        """The problem of a value that is out of bounds."""
        least, most, name = self.least, self.most, self.param.name
        if least is None or name not in op.attrs:
            return
        value = op.expr(name)
        if value.symbols or fraction(value) < least or (most and fraction(value) > most):
            wanted = f"of {least} or more" if most is None else f"from {least} to {most}"
            yield f"expects '{name}' to be a number {wanted}, found {value}"

    def text(self, value: Any) -> str:
        """The text of a value in brackets: `zero = 3`, `weak`, `(H, G)`."""
        if self.param.form == "flag":
            return self.param.name
        items = [str(v) for v in _tuple(value)]
        if self.param.form == "patterns" and not all(map(str.isidentifier, items)):
            items = [f'"{", ".join(items)}"']
        text = items[0] if len(items) == 1 else f"({', '.join(items)})"
        text = f'"{text}"' if self.param.form == "str" else text
        return text if self.param.positional else f"{self.param.name} = {text}"


def patterns(op: Operation, name: str) -> tuple[str, ...]:
    """The patterns in a parameter of an op, as names or in one string."""
    return tuple(n.strip() for text in op.names(name) for n in text.split(","))


def parameter(
    kind: str,
    doc: str = "",
    *,
    default: Any = ...,
    required: bool = False,
    positional: bool = False,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    most: int | None = None,
    flag: Flag | None = None,
) -> Any:
    """A parameter of a statement, as a field of its record.

    `doc` defaults to the help of its flag. `default` is the value if the text does not state it;
    for several choices it defaults to the first. `least` and `most` are the bounds of a number, in
    a text and on the command line.
    """
    if default is ...:
        default = choices[0] if choices else _NOTHING[Param("", kind).form]
    if flag is not None:
        doc = doc or _as_doc(flag.help, choices)
    param = Param("", kind, doc, required, positional, choices)
    return field(default=default, metadata={"": _Field(param, default, least, most, flag)})


def flagged(
    name: str,
    help: str,
    kind: str = "",
    *,
    doc: str = "",
    required: bool = False,
    positional: bool = False,
    default: Any = ...,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    most: int | None = None,
    **flag: Any,
) -> Any:
    """A parameter with a flag of the same value; `name` and `help` are those of the flag.

    `kind` defaults to `name` with choices, otherwise to `flag`. `flag` contains fields of `Flag`,
    such as `rare`; the other arguments are those of `parameter`.
    """
    return parameter(
        kind or ("name" if choices else "flag"),
        doc,
        default=default,
        required=required,
        positional=positional,
        choices=choices,
        least=least,
        most=most,
        flag=Flag(name, help, **flag),
    )


def _as_doc(help: str, choices: Iterable[str]) -> str:
    """The help of a flag as the description of its parameter, with the spelling of choices in
    texts."""
    first, space, rest = help.removesuffix(".").partition(" ")
    text = (first.lower() if first[1:].islower() else first) + space + rest
    for choice in choices:
        text = text.replace(choice.replace("_", "-"), choice)
    return text


class Record(Frozen, Located):
    """Base class of the parameters of statements: a field for each parameter."""

    loc: Loc = field(default=UNKNOWN, kw_only=True)


def _fields(record: type[Record]) -> Iterator[_Field]:
    for each in fields(record):
        if each.metadata:
            field: _Field = each.metadata[""]
            doc = field.param.doc + field.limits
            yield replace(field, param=replace(field.param, name=each.name, doc=doc))


# -- statements ------------------------------------------------------------------------------------


class Statement(Declaration):
    """Base class of the statements of a strategy.

    `record` has the parameters. `flags` are the flags that do not set a single parameter; those of
    the parameters are appended.
    """

    parents = ("stg.strategy", "stg.stack")
    record: ClassVar[type[Record]] = Record
    flags: ClassVar[tuple[Flag, ...]] = ()
    section: ClassVar[Section] = Section.OTHERS  # of its flags in the help
    #: Properties of all of its flags.
    rare: ClassVar[bool] = False
    software: ClassVar[bool] = False
    needs: ClassVar[tuple[Need, ...]] = ()
    repeats: ClassVar[bool] = False  # it may stand several times
    #: For a statement that repeats: the parameter with the names that it applies to, so that a
    #: stack may contain it; empty if it places values.
    subject: ClassVar[str] = ""
    training: ClassVar[str] = ""  # why a step of serving has no use for it; empty if it has
    #: Parameters that a job takes from a stack only if it does not state another one by itself.
    unless_given: ClassVar[Mapping[str, str]] = {}
    _fields: ClassVar[tuple[_Field, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(
            replace(f, flag=flag and cls._marked(flag))
            for f in _fields(cls.record)
            for flag in [f.complete_flag()]
        )
        cls.params = tuple(f.param for f in cls._fields)
        own = (f.flag for f in cls._fields if f.flag is not None)
        cls.flags = (*map(cls._marked, cls.flags), *own)
        super().__init_subclass__()

    @classmethod
    def _marked(cls, flag: Flag) -> Flag:
        """A flag with the properties of all flags of the statement."""
        return replace(
            flag,
            rare=flag.rare or cls.rare,
            software=flag.software or cls.software,
            needs=flag.needs or cls.needs,
        )

    def read(self, op: Operation) -> Record:
        """The parameters of an op of this kind, with defaults for those that it leaves out."""
        said = {f.param.name: f.read(op) for f in self._fields if f.param.name in op.attrs}
        return self.record(**said, loc=op.loc)

    def verify(self, op: Operation) -> Iterator[str]:
        """Report values that are out of bounds; subclasses extend this."""
        for each in self._fields:
            yield from each.verify(op)

    # -- flags -------------------------------------------------------------------------------------

    def text(self, request: FlagValues) -> Iterator[str]:
        """The statements that flags represent, as text."""
        for said in self.from_flags(request):
            known = {f.param.name: f for f in self._fields}
            order = list(known)
            parts = [known[name].text(said[name]) for name in sorted(said, key=order.index)]
            yield f"{self.name}[{', '.join(parts)}]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        """The parameters of each statement that flags represent; by default one statement, if a
        flag of a parameter is given."""
        if said := self.flag_values(request):
            yield said

    def flag_values(self, request: FlagValues) -> dict[str, Any]:
        """The parameters whose flags differ from the default and have what they need."""
        values: dict[str, Any] = {}
        for each in self._fields:
            flag = each.flag
            if flag is None or flag.kind != each.flag_kind:
                continue  # its value differs from that of the parameter
            value = request[flag.name]
            if not flag.is_default(value) and all(self._is_met(request, n) for n in flag.needs):
                values[each.param.name] = _said(flag, value)
        return values

    def _is_met(self, request: FlagValues, need: Need) -> bool:
        """Whether an axis, a serving step or a flag of this statement exists that `need` names.
        Names of other statements count as existing: these are checked elsewhere."""
        own = {flag.name: flag for flag in self.flags}

        def is_there(name: str) -> bool:
            if name == SERVE:
                return bool(request.flags.get(SERVE))
            if name in AXES:
                return name in request.axes
            return name not in own or not own[name].is_default(request[name])

        return any(map(is_there, (need,) if isinstance(need, str) else need))

    @property
    def flag_names(self) -> Mapping[str, str]:
        """The names of flags that have the same value as a parameter, by parameter."""
        same = (f for f in self._fields if f.flag is not None and f.flag.kind == f.flag_kind)
        return {f.param.name: f.flag.name for f in same if f.flag is not None}

    def flags_of(self, op: Operation) -> dict[str, Any]:
        """The flags for an op of this kind, with their values; parameters without a flag are left
        out."""
        names = self.flag_names
        said = (f for f in self._fields if f.param.name in op.attrs and f.param.name in names)
        return {names[f.param.name]: _flag_value(f, f.read(op)) for f in said}

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        """The problems of the flags of this statement, each with a remedy: by default, flags that
        require a value of another flag (`Flag.only`)."""
        yield from beside_wrong_values(self.flags, request)


def beside_wrong_values(flags: Iterable[Flag], request: FlagValues) -> Iterator[tuple[str, str]]:
    """Problems of flags that require a value of another flag (`Flag.only`), each with a remedy."""
    for flag in flags:
        if flag.only is None or flag.is_default(value := request[flag.name]):
            continue
        option, wanted = Flag(flag.only[0], ""), flag.only[1]
        if (actual := request[option.name]) != wanted:
            needed = option.with_value(wanted)
            message = f"needs {needed}, found {option.with_value(actual)}"
            yield f"{flag.with_value(value)} {message}", f"choose {needed}, or leave it out"


def _tuple(value: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)


def _flag_value(each: _Field, value: Any) -> Any:
    """The value of a flag for the value of its parameter; the inverse of `_said`."""
    match each.flag_kind:
        case "choice":
            return value.replace("_", "-")
        case "names" | "patterns":
            return ",".join(value)
        case _:
            return value


def _said(flag: Flag, value: Any) -> Any:
    """The value of a parameter for the value of its flag."""
    match flag.kind:
        case "choice":
            return value.replace("-", "_")
        case "names" | "patterns":
            return tuple(n.strip() for n in value.split(","))
        case _:
            return value
