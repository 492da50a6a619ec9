"""Text to syntax: the only file that imports lark.

`parse_syntax` turns a source into an `OpSyntax` tree or raises one `DiagnosticError`. Limits of
size, depth and numbers bound the cost of hostile text.
"""

# lark hands trees and tokens to these callbacks by position, which types cannot express.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportMissingTypeArgument=false
# pyright: reportPrivateUsage=false
# mypy: disable-error-code="no-untyped-def,type-arg,no-untyped-call,misc,no-any-return,operator"

import json
from functools import cache, lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, cast

from lark import (
    Lark,
    Token,
    Transformer,
    UnexpectedCharacters,
    UnexpectedEOF,
    UnexpectedToken,
    v_args,
)
from lark import __version__ as lark_version
from lark.exceptions import VisitError
from lark.grammar import Rule
from lark.lexer import TerminalDef

from stagec.ir import expr as ex
from stagec.ir.core import Attr, NamedAttr, Quoted, SymbolRef
from stagec.ir.evaluation import BUCKETS
from stagec.ir.expr import Expr
from stagec.ir.facts import Comparison, Relation
from stagec.ir.order import Multiple
from stagec.ir.types import DTYPE_BYTES, AxisUse, Dim, OpaqueType, TensorType, Type
from stagec.support.diagnostics import error
from stagec.support.limits import MAX_COEFFICIENT, MAX_LAYERS, MAX_OPERATORS, MAX_TERMS
from stagec.support.source import FileLoc, Loc, NameLoc, Source
from stagec.support.suggest import did_you_mean
from stagec.text.ast import ArgSyntax, Name, OpSyntax, RegionSyntax
from stagec.text.clauses import (
    SyntaxLimitError,
    loaded,
    memory_clause,
    names_of,
    routed,
    set_clause,
)
from stagec.text.limits import check_limits

_MOST_REMAINDERS = 8
_SYNTAX_REMEDY = (
    "operations are written %y = stg.add(%a, %b) : bf16[B@dp, S]; "
    "'stagec ops NAME' shows an example"
)


def parse_syntax(source: Source) -> OpSyntax:
    """The syntax of a source with one top-level operation. Callers must not change it: short texts
    are parsed once per process.

    Raises `DiagnosticError` at the first location that does not match the grammar.
    """
    return (_kept if len(source.text) < _SHORT else _syntax)(source)


def _syntax(source: Source) -> OpSyntax:
    check_limits(source)
    try:
        return _parsed(source)
    except UnexpectedToken as e:
        raise _syntax_error(source, e.token, e.accepts or e.expected) from None
    except UnexpectedEOF:
        raise error("unexpected end of text", FileLoc(source.name, 1, 1)) from None
    except UnexpectedCharacters as e:
        char = source.text[e.pos_in_stream : e.pos_in_stream + 1]
        what = f"'{char}'" if char.isprintable() else f"character U+{ord(char):04X}"
        raise error(
            f"unexpected {what}",
            FileLoc(source.name, e.line, e.column),
            remedy="remove it; names start with a letter, values with '%', symbols with '@'",
        ) from None
    except (VisitError, SyntaxLimitError) as e:
        limit = e.orig_exc if isinstance(e, VisitError) else e
        if not isinstance(limit, SyntaxLimitError):
            raise
        start = FileLoc(source.name, 1, 1)
        loc = _loc(source.name, limit.token) if isinstance(limit.token, Token) else start
        raise error(limit.message, loc, remedy=limit.remedy or _SYNTAX_REMEDY) from None


_SHORT = 1 << 16
_kept = lru_cache(maxsize=64)(_syntax)
_NAMES = {
    "OPNAME": "an operation such as stg.add",
    "VALUE": "a value such as %x",
    "SYMBOL": "a symbol such as @pod",
    "NAME": "a name",
    "INT": "an integer",
    "STRING": "a string",
    "CMP": "'==', '>=' or '<='",
    "$END": "the end",
    "LPAR": "'('",
    "RPAR": "')'",
    "LSQB": "'['",
    "RSQB": "']'",
    "LBRACE": "'{'",
    "RBRACE": "'}'",
    "COMMA": "','",
    "COLON": "':'",
    "EQUAL": "'='",
    "VBAR": "'|'",
    "AT": "'@'",
    "PLUS": "'+'",
    "MINUS": "'-'",
    "STAR": "'*'",
    "SLASH": "'/'",
    "PERCENT": "'%'",
    "CIRCUMFLEX": "'^'",
    "QMARK": "'?'",
    "BANG": "'!'",
    "LOC": "'loc'",
    "__ANON_0": "'->'",
}


def _syntax_error(source: Source, token: Token, expected: Any) -> Exception:
    shown_token = "the end of the text" if token.type == "$END" else f"'{token}'"
    names = sorted({_NAMES.get(str(t), str(t).lower()) for t in expected if t != "LOC"})
    shown = ", ".join(names[:7]) + (", ..." if len(names) > 7 else "")
    loc = _end_loc(source) if token.type == "$END" else _loc(source.name, token)
    remedy = "close every '{', '(' and '['" if token.type == "$END" else _SYNTAX_REMEDY
    return error(f"syntax error: found {shown_token}, expected {shown}", loc, remedy=remedy)


def _end_loc(source: Source) -> FileLoc:
    lines = source.text.rstrip().splitlines() or [""]
    return FileLoc(source.name, len(lines), len(lines[-1]) + 1)


def _loc(file: str, token: Token) -> FileLoc:
    return FileLoc(file, token.line or 1, token.column or 1, max(1, len(token)))


#: Idle parsers with their callbacks. Each is used for one text at a time, so that texts that are
#: parsed concurrently share nothing.
_idle: list[tuple[Lark, Any]] = []


def _parsed(source: Source) -> OpSyntax:
    try:
        parser, builder = _idle.pop()
    except IndexError:
        builder = _Builder()
        parser = _parser(builder)
    builder.start_text(source.name)
    try:
        return cast(OpSyntax, parser.parse(source.text))
    finally:
        _idle.append((parser, builder))


def _parser(builder: Transformer) -> Lark:
    """A parser by the tables in stg.tables.json, or by the grammar if they are of another grammar
    or version of lark: 0.015 in place of 0.09 CPU seconds of a command."""
    known = tables()
    if known["of"] == tables_of():
        # what the files do that `lark.tools.standalone` writes
        return Lark._load_from_dict(known["data"], known["memo"], transformer=builder)
    return Lark(_grammar(), parser="lalr", transformer=builder, maybe_placeholders=True)


def tables_of() -> str:
    """What tables depend on: the grammar and the version of lark."""
    return f"{sha256(_grammar().encode()).hexdigest()} {lark_version}"


def made_tables() -> str:
    """The text of stg.tables.json, which `tools.gen_tables` writes."""
    parser = Lark(_grammar(), parser="lalr", maybe_placeholders=True)
    data, memo = parser.memo_serialize([TerminalDef, Rule])
    made = {"of": tables_of(), "data": data, "memo": memo}
    return json.dumps(made, separators=(",", ":")) + "\n"


@cache
def tables() -> dict[str, Any]:
    """The tables of stg.tables.json, with what they are of."""

    def keyed(members: list[tuple[str, Any]]) -> dict[Any, Any]:
        return {int(key) if key.isdigit() else key: value for key, value in members}

    return json.loads(_file("stg.tables.json"), object_pairs_hook=keyed)


@cache
def _grammar() -> str:
    return _file("stg.lark")


def _file(name: str) -> str:
    return files("stagec.ir_spec").joinpath(name).read_text(encoding="utf-8")


@v_args(inline=True)
class _Builder(Transformer):
    """Callbacks of the LALR parser, one per rule of the grammar, bottom up."""

    def start_text(self, file: str) -> None:
        """Reset the state for a text of this file."""
        self.file = file
        self._first: Token | None = None
        self._fresh = True
        self._operators = 0
        self._number: Token | None = None

    def start(self, op):
        return op

    def op(self, results, name, symbol, params, operands, region, types, loc):
        self._boundary()
        positional, named = params or ([], [])
        return OpSyntax(
            self._name(name),
            results or [],
            self._name(symbol, 1) if symbol else None,
            positional,
            named,
            operands or [],
            region,
            types or (),
            loc or _loc(self.file, name),
        )

    def _name(self, token: Token, sigil: int = 0) -> Name:
        return Name(str(token)[sigil:], _loc(self.file, token))

    def results(self, *names):
        return [self._name(n, 1) for n in names]

    def operands(self, *names):
        return [self._name(n, 1) for n in names if n is not None]

    def params(self, *params):
        positional = [p for kind, p in filter(None, params) if kind == "positional"]
        named = [p for kind, p in filter(None, params) if kind == "named"]
        return positional, named

    def named(self, name, value):
        self._boundary()
        return "named", (self._name(name), value)

    def positional(self, value):
        self._boundary()
        first = self._first
        loc = _loc(self.file, first) if first is not None else FileLoc(self.file, 1, 1)
        return "positional", (value, loc)

    def string(self, token) -> Attr:
        self._mark(token)
        return Quoted(str(token)[1:-1])

    def symbol(self, token) -> Attr:
        self._mark(token)
        return SymbolRef(str(token)[1:])

    def _mark(self, token: Token) -> None:
        """Remember the start of the current parameter, since values have no locations."""
        if self._fresh:
            self._first, self._fresh = token, False

    def _boundary(self) -> None:
        self._fresh, self._operators = True, 0

    def _where(self) -> Token | None:
        """The start of the current parameter or size."""
        return self._number if self._fresh else self._first

    def _checked(self, value: Expr, token: Token | None = None) -> Expr:
        """The expression. Raises `SyntaxLimitError` if it is too large for further arithmetic."""
        self._operators += 1
        large = ex.too_large(value, MAX_TERMS, MAX_COEFFICIENT)
        if large or self._operators > MAX_OPERATORS:
            raise SyntaxLimitError(
                "the expression is too large",
                token or self._where(),
                f"keep integers below 2^63 and expressions below {MAX_TERMS} terms",
            )
        return value

    def relation(self, left: Expr, op: Token, right: Expr) -> Attr:
        left, right = _expr(left), _expr(right)
        comparison: Comparison = "==" if op == "==" else ">=" if op == ">=" else "<="
        parts = ex.modulo_parts(left)
        if parts:
            return Relation(parts[0], comparison, right, parts[1])
        return Relation(left, comparison, right)

    def region(self, args, returns, *ops):
        return RegionSyntax(args or [], returns or (), list(ops))

    def args(self, *args):
        return list(args)

    def typed_arg(self, name, type_, bound):
        self._boundary()
        return ArgSyntax(self._name(name, 1), type_, self._name(bound, 1) if bound else None)

    def bound_arg(self, name, bound):
        return ArgSyntax(self._name(name, 1), None, self._name(bound, 1))

    def types(self, *types) -> tuple[Type, ...]:
        self._boundary()
        return types

    def opaque(self, name) -> Type:
        return OpaqueType(str(name))

    def tensor(self, dtype, *parts) -> Type:
        if dtype not in DTYPE_BYTES:
            remedy = did_you_mean(dtype, DTYPE_BYTES) or f"use one of {', '.join(DTYPE_BYTES)}"
            raise SyntaxLimitError(f"unknown element type '{dtype}'", dtype, remedy)
        dims = tuple(p for p in parts if isinstance(p, Dim))
        fields: dict[str, Any] = {"placed": any(d.split for d in dims)}
        for token, coords in (p for p in parts if isinstance(p, tuple)):
            if str(token) == "routed":
                dims = routed(dims, token, coords)
                continue
            if str(token) == "mem":
                fields |= memory_clause(token, coords)
                continue
            names = names_of(token, coords)
            if str(token) == "load":
                dims = loaded(dims, token, names)
            else:
                set_clause(fields, token, names)
        return TensorType(str(dtype), dims, **fields)

    def plain(self, size):
        self._boundary()
        return Dim(self._size(size))

    def open(self, size):
        self._boundary()
        return Dim(self._size(size), open=True)

    def placed(self, size, axes):
        self._boundary()
        return Dim(self._size(size), axes)

    def _size(self, size) -> Expr:
        if not isinstance(size, Expr):
            raise SyntaxLimitError("expected one size as a dimension, found a tuple")
        return size

    def axes(self, *axes):
        return axes

    def axis(self, name, priority):
        return AxisUse(str(name), _integer(priority) if priority else 0)

    def clause(self, name, *coords):
        return name, [c for c in coords if c is not None]

    def coord(self, name, value):
        return name, _integer(value) if value else None

    def add(self, a, b):
        return self._checked(_expr(a) + _expr(b))

    def sub(self, a, b):
        return self._checked(_expr(a) - _expr(b))

    def mul(self, a, b):
        if isinstance(a, tuple | Multiple) or isinstance(b, tuple | Multiple):
            return self._times(a, b)
        return self._checked(_expr(a) * _expr(b))

    def _times(self, a, b) -> Attr:
        """A repeated list. Raises `SyntaxLimitError` for an invalid repetition count."""
        items, number = (b, a) if isinstance(a, Expr) else (a, b)
        times = _expr(number).value
        if times is None or not 0 < times <= MAX_LAYERS:
            raise SyntaxLimitError(
                f"a list of kinds repeats {number} times, expected at most {MAX_LAYERS:,}",
                self._where(),
                "write (5*local, global)*10",
            )
        return Multiple(items if isinstance(items, tuple) else (items,), times)

    def div(self, a, b):
        return self._checked(_expr(a) / self._divisor(b))

    def _divisor(self, value) -> Expr:
        if _expr(value) == 0:
            remedy = "divide by a size, which is positive"
            raise SyntaxLimitError("division by zero", self._where(), remedy)
        return _expr(value)

    def mod(self, a, b):
        divisor = self._divisor(b)
        inner, depth = ex.modulo_parts(_expr(a)), 0
        while inner:
            inner, depth = ex.modulo_parts(inner[0]), depth + 1
            if depth > _MOST_REMAINDERS:
                remedy = "write 'a % b' once in a relation"
                raise SyntaxLimitError(
                    "too many remainders in one expression", self._where(), remedy
                )
        return self._checked(_expr(a) % divisor)

    def pow(self, base, exponent):
        power = _integer(exponent)
        if power > (ex.MAX_EXPONENT if _expr(base).symbol_name else ex.MAX_EXPONENT_OF_SUMS):
            raise SyntaxLimitError(
                f"exponent {power} is too large", exponent, "keep exponents of symbols below 65"
            )
        return self._checked(base**power, exponent)

    def neg(self, a):
        return -_expr(a)

    def num(self, token):
        self._mark(token)
        self._number = token
        return ex.const(_integer(token))

    def sym(self, token):
        self._mark(token)
        return ex.symbol(str(token))

    def call(self, name: Token, *arguments):
        if name not in ex.FUNCTIONS:
            remedy = did_you_mean(name, ex.FUNCTIONS) or f"use one of {', '.join(ex.FUNCTIONS)}"
            raise SyntaxLimitError(f"unknown function '{name}'", name, remedy)
        if name == "ceildiv" and (len(arguments) != 2 or arguments[1] == 0):
            raise SyntaxLimitError("ceildiv expects a size and a positive divisor", name)
        if name == "reached" and (len(arguments) != 4 or arguments[1] == 0):
            raise SyntaxLimitError(
                "reached expects a size, a positive number of parts, the parts that a draw "
                "reaches, and the number of draws",
                name,
            )
        if name == "fullest" and (len(arguments) != 5 or arguments[2] == 0):
            raise SyntaxLimitError(
                "fullest expects a size, the probability of a part as two numbers, the second of "
                "them positive, the parts per rank, and the number of ranks",
                name,
            )
        if name == BUCKETS:
            return self._checked(ex.buckets(_expr(arguments[0]), map(_row, arguments[1:])), name)
        return self._checked(ex.call(str(name), [_expr(a) for a in arguments]), name)

    def tuple(self, *items):
        return items

    def keyed(self, name, value) -> Attr:
        self._mark(name)
        return NamedAttr(str(name), value)

    def loc(self, body) -> Loc:
        return body

    def filelineco(self, file, line, col) -> Loc:
        return FileLoc(str(file)[1:-1], _integer(line), _integer(col))

    def nameloc(self, name, inner) -> Loc:
        return NameLoc(str(name)[1:-1], inner)


def _expr(value: Any) -> Expr:
    if not isinstance(value, Expr):
        raise SyntaxLimitError("found a tuple, expected a size")
    return value


def _row(value: Any) -> tuple[Expr, list[Expr]]:
    if not isinstance(value, tuple):
        raise SyntaxLimitError("buckets expects rows in brackets: a count, and the sizes")
    times, *sizes = map(_expr, value)
    return times, sizes


def _integer(token: Token) -> int:
    if len(token) > 19 or int(token) > ex.MAX_INTEGER:
        remedy = "sizes are numbers of elements or bytes; write a smaller one"
        raise SyntaxLimitError("the integer is too large, expected at most 2^63 - 1", token, remedy)
    return int(token)
