"""The parameters of an op in brackets, and its numbers of operands and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stagec.ir.core import Attr, NamedAttr, Quoted, SymbolRef
from stagec.ir.expr import Expr, const
from stagec.ir.facts import Relation
from stagec.ir.order import read_order
from stagec.support.words import counted


@dataclass(frozen=True, slots=True)
class Param:
    """A static parameter of an op, in brackets.

    | kind             | is written as                       | |
    |------------------|-------------------------------------|-|
    | `flag`           | `causal`                            | its bare name |
    | `int`, `ints`    | `4`, `(1, 2)`                       | |
    | `size`, `sizes`  | `B*S/2`, `(K, D - K)`               | |
    | `ratio`, `ratios` | `1/10`, `(1, 11/10)`               | constant fractions |
    | `str`            | `"bsd,df->bsf"`                     | |
    | `name`, `names`  | `bf16`, `(attention, swiglu)`       | any names, or one of `choices` |
    | `axis`, `axes`   | `pp`, `(dp, cp)`                    | they are axes of the mesh |
    | `dim`, `dims`    | `B`, `(H, G)`                       | they are declared symbols |
    | `patterns`       | `(a, b)`, `"gqa/*:1/2, b"`          | names, or patterns in quotes |
    | `values`         | `(wq, wk)`                          | names of values of the model |
    | `symbol`         | `@pod`                              | |
    | `relations`      | `S % tp == 0, B >= 1`               | all positional values |
    | `order`          | `(5*local, global)*10, 2*local`     | all positional values |

    A plural kind accepts a single item without parentheses as well.
    """

    name: str
    kind: str
    doc: str = ""
    required: bool = False
    positional: bool = False
    choices: tuple[str, ...] = ()
    default: str = ""  # the value of a name that is left out
    of_step: bool = False  # a size of the whole batch, not of a microbatch
    least: int | None = None  # of numbers; sizes with symbols are not compared

    @property
    def form(self) -> str:
        """The representation of the value: `names` for `axes`, `dims` and `values`, for example."""
        return _FORMS.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class Arity:
    """The number of operands, or results, of an op, from the names in its definition.

    | names             | least | most |
    |-------------------|-------|------|
    | `("x", "y")`      | 2     | 2    |
    | `("y", "stats?")` | 1     | 2    |
    | `("q", "kv*")`    | 1     | any  |
    """

    names: tuple[str, ...] = ()
    least: int = 0
    most: int | None = 0

    @staticmethod
    def of(names: tuple[str, ...]) -> Arity:
        """The arity for these names."""
        bare = tuple(name.rstrip("?*") for name in names)
        least = sum(a == b for a, b in zip(names, bare, strict=True))
        many = any(name.endswith("*") for name in names)
        return Arity(bare, least, None if many else len(names))

    def fits(self, count: int) -> bool:
        """Whether this number is allowed."""
        return self.least <= count and (self.most is None or count <= self.most)

    def text(self, noun: str) -> str:
        """The expected number as text: '2 operands', 'at least 1 operand', '1 to 2 results'."""
        if self.most is None:
            return f"at least {counted(self.least, noun)}"
        same = self.least == self.most
        return counted(self.most, noun) if same else f"{self.least} to {counted(self.most, noun)}"


def convert_param(param: Param, raw: Attr) -> Attr:
    """The attribute for a parsed parameter value. Raises ValueError with the expected form."""
    value = _converted(param, raw)
    for number in value if isinstance(value, tuple) else (value,):
        known = number.value if isinstance(number, Expr) else None
        if param.least is not None and known is not None and known < param.least:
            raise ValueError(f"expects '{param.name}' to be at least {param.least}, found {number}")
    return value


def _converted(param: Param, raw: Attr) -> Attr:
    form = param.form
    if form == "flag":
        if raw is not True:
            raise ValueError(f"'{param.name}' is a flag and takes no value")
        return True
    if form in _ITEMS:
        return _ITEMS[form](param, raw)
    if form == "patterns" and isinstance(raw, Quoted):
        return raw
    if form in _LISTS:
        item = _ITEMS[_LISTS[form]]
        return tuple(item(param, v) for v in (raw if isinstance(raw, tuple) else (raw,)))
    relations = isinstance(raw, tuple) and all(isinstance(v, Relation) for v in raw)
    if form == "relations" and relations:
        return raw
    if form == "order":
        return read_order(raw)
    raise _unexpected(param, raw)


_EXPECTED = {
    "flag": "nothing",
    "int": "an integer",
    "ints": "integers",
    "size": "a size such as S/2",
    "sizes": "sizes",
    "ratio": "a fraction such as 1/10",
    "ratios": "fractions such as (1, 11/10)",
    "str": "a string in quotes",
    "symbol": "a symbol such as @pod",
    "relations": "relations such as S % tp == 0",
    "order": "kinds of layers such as (5*local, global)*10, 2*local",
    "name": "a name",
    "names": "a name or a tuple of names",
    "axis": "a mesh axis",
    "axes": "mesh axes such as tp or (dp, cp)",
    "dim": "the name of a dimension",
    "dims": "names of dimensions such as S or (H, G)",
    "values": "names of values",
    "patterns": "names, or patterns in quotes",
}

#: In a block: the parameter that names the option with further static parameters of an op.
STATICS = "statics"
#: Kinds whose names are axes of the mesh, and those whose names are declared symbols.
AXES, DIMS = frozenset({"axis", "axes"}), frozenset({"dim", "dims"})
#: Kinds that take all positional values.
OF_ALL = frozenset({"relations", "order"})
#: The kinds that a parameter may have.
PARAM_KINDS = tuple(_EXPECTED)


def _unexpected(param: Param, raw: Attr) -> ValueError:
    return ValueError(f"'{param.name}' expects {_EXPECTED[param.kind]}, found {attr_text(raw)}")


def _of_type(kind: type[Attr]) -> Callable[[Param, Attr], Attr]:
    def convert(param: Param, raw: Attr) -> Attr:
        if not isinstance(raw, kind):
            raise _unexpected(param, raw)
        return raw

    return convert


def _number(param: Param, raw: Attr) -> Expr:
    if isinstance(raw, Expr) and raw.value is not None:
        return const(raw.value)
    raise _unexpected(param, raw)


def _name(param: Param, raw: Attr) -> str:
    name = raw if isinstance(raw, str) else raw.symbol_name if isinstance(raw, Expr) else None
    if name is None:
        raise _unexpected(param, raw)
    if param.choices and name not in param.choices:
        raise ValueError(f"'{param.name}' expects one of {', '.join(param.choices)}, found {name}")
    return name


_ITEMS: Mapping[str, Callable[[Param, Attr], Attr]] = {
    "int": _number,
    "name": _name,
    "size": _of_type(Expr),
    "ratio": _of_type(Expr),
    "str": _of_type(Quoted),
    "symbol": _of_type(SymbolRef),
}
_LISTS = {"ints": "int", "sizes": "size", "ratios": "ratio", "names": "name", "patterns": "name"}
#: The forms of kinds whose form has another name.
_FORMS = {"axis": "name", "dim": "name", "axes": "names", "dims": "names", "values": "names"}


def attr_text(value: Attr) -> str:
    """The text of an attribute value in brackets."""
    if isinstance(value, tuple):
        parts = [attr_text(v) for v in value]
        alone = len(parts) == 1 and not isinstance(value[0], NamedAttr)
        return parts[0] if alone else f"({', '.join(parts)})"
    if isinstance(value, NamedAttr):
        return f"{value.name} = {attr_text(value.value)}"
    return str(value)
