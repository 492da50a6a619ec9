"""STG texts in readable form: symbols with their configuration keys, one function for each block,
aligned lines.

A `ModelText` collects symbols and functions and prints the module; a `Body` collects the lines of
a function. Unused symbols are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

_WIDTH = 110
_NAMES = re.compile(r"[A-Za-z_]\w*")
_PARAM = re.compile(r"%\w+ = stg\.param")
_DEFINITION = re.compile(r"( *)(%[\w, %]+?) += (.*)")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol: its value (None if open), and its key or formula."""

    name: str
    value: int | None
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Callee:
    """A function in a call: `given` are the sizes and options of the call."""

    name: str
    given: tuple[str, ...] = ()

    def with_(self, *given: str) -> Callee:
        """The same function with more sizes and options."""
        return Callee(self.name, (*self.given, *given))

    def __str__(self) -> str:
        """The name, with sizes and options in brackets."""
        return f"{self.name}[{', '.join(self.given)}]" if self.given else self.name


class Body:
    """The lines of a function or of a repeat."""

    def __init__(self, *lines: str) -> None:
        self.lines = [*lines]

    def param(
        self, name: str, dims: str, comment: str = "", dtype: str = "bf16", role: str = ""
    ) -> str:
        """Declare a parameter with these dimensions, and return its name with the percent sign."""
        kind = f"{dtype}[{dims}{f' | {role}' if role else ''}]"
        return self.let(name, f"stg.param : {kind}", comment)

    def let(self, name: str, op: str, comment: str = "") -> str:
        """Append `%name = op`, and return the name with the percent sign."""
        self.lines.append(f"%{name} = {op}" + (f"  // {comment}" if comment else ""))
        return f"%{name}"

    def call(self, name: str, block: Callee, *operands: str) -> str:
        """Append `%name = stg.call @block(operands)`, and return the name with the percent sign."""
        return self.let(name, f"stg.call @{block}({', '.join(operands)})")

    def steps(self, name: str, x: str, steps: Sequence[str]) -> str:
        """Append a chain of operations, each on the result `{}` of the previous one, and return the
        name of the last one: it is `%name`, and the others are `%name0`, `%name1`, ... Without
        steps the result is `x`."""
        for number, step in enumerate(steps, 1):
            last = number == len(steps)
            x = self.let(name if last else f"{name}{number - 1}", step.format(x))
        return x

    def do(self, *lines: str) -> None:
        """Append lines."""
        self.lines += lines

    def ends(self, loss: str) -> None:
        """Append an operation as the loss of the function, and return it."""
        self.do(f"stg.return({self.let('loss', loss)})")

    def repeat(
        self, results: str, name: str, count: str, carried: str, inner: Body, order: str = ""
    ) -> str:
        """Append a repeat of another body, `count` times, with carried values `%h = %x, %c = %d`,
        and return its first result. `order` names the `stg.order` of its layers, if there is
        one."""
        where = f", order = @{order}" if order else ""
        given = f"count = {count}, carry = {results.count('%')}{where}"
        head = f"{results} = stg.repeat @{name}[{given}] ({carried}) {{"
        self.lines += [head, *("  " + line for line in inner.all()), "}"]
        return results.partition(",")[0]

    def all(self, *, params_first: bool = False) -> list[str]:
        """The lines, aligned."""
        if params_first:
            return aligned(sorted(self.lines, key=lambda line: not _PARAM.match(line)))
        return aligned(self.lines)


@dataclass(frozen=True, slots=True)
class Among:
    """Embeddings that are inserted among those of a text: `write` appends their computation
    [B, X, D] and returns the name; `args` are its arguments. It also writes `deep` values `%deep0`,
    `%deep1`, ..., which are added to the stream after the first layers."""

    args: str
    write: Callable[[ModelText, Body], str]
    deep: int = 0


@dataclass
class ModelText:
    """A module under construction; `title` and `notes` are its first comment lines. `head` is the
    output of a decoder: tokens, a class of each sequence, or classes of all tokens. `positions` and
    `dropout` are those of the configuration, `sequences` are the dimensions of tokens if S is not
    the only one, and `among` are embeddings that are inserted among those of tokens."""

    name: str
    title: str
    notes: list[str] = field(default_factory=list[str])
    symbols: dict[str, Symbol] = field(default_factory=dict[str, Symbol])
    relations: list[str] = field(default_factory=list[str])
    imports: list[str] = field(default_factory=list[str])
    declarations: list[str] = field(default_factory=list[str])
    used: set[str] = field(default_factory=set[str])
    functions: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    head: Literal["words", "class", "classes"] = "words"
    positions: int | None = None
    dropout: Mapping[str, Fraction] = field(default_factory=dict[str, Fraction])
    sequences: tuple[str, ...] = ()
    among: Among | None = None

    def symbol(self, name: str, value: int | None, comment: str = "") -> str:
        """Declare a size and return its name. A name may be declared again with the same value."""
        given = self.symbols.setdefault(name, Symbol(name, value, comment))
        if given.value != value:
            raise ValueError(f"symbol {name} is {given.value}, and {value}")
        return name

    def value(self, name: str) -> int:
        """The value of a symbol; 1 if it is open."""
        return self.symbols[name].value or 1

    def replace(self, name: str, value: int, comment: str) -> None:
        """Change the value of a declared symbol."""
        self.symbols[name] = Symbol(name, value, comment)

    def assume(self, relation: str) -> None:
        """State a relation between symbols once; it is omitted if one of them is unused."""
        if relation not in self.relations:
            self.relations.append(relation)

    def use(self, block: str, symbols: str, *given: str, function: str = "") -> Callee:
        """Import a text of the library, which uses these symbols, and return its function with
        these options; `function` is the name if it differs from that of the text."""
        path = f"blocks/{block}.stg"
        if path not in self.imports:
            self.imports.append(path)
        self.used.update(symbols.split())
        return Callee(function or block, given)

    def function(self, name: str, args: str, body: Body, comment: str = "") -> Callee:
        """Add a private function. A second one of that name must be equal."""
        lines = [f"// {line}" for line in comment.splitlines()]
        lines += [f"stg.func @{name}[private] ({args}) {{"]
        lines += ["  " + line for line in body.all(params_first=True)] + ["}"]
        if self.functions.setdefault(name, lines) != lines:
            raise ValueError(f"two functions @{name}")
        return Callee(name)

    def scope(self, body: Body, name: str, operands: str, inner: Body, *results: str) -> None:
        """Append a call of a private function with the body `inner`, whose name becomes the scope
        of its declarations; `operands` and `results` have the same names on both sides."""
        values = ", ".join(results)
        inner.do(f"stg.return({values})")
        body.do(f"{values} = stg.call @{self.function(name, operands, inner)}({operands})")

    def train(self, args: str, body: Body, result: str = "f32[]") -> ModelText:
        """Add the main function, and return the text."""
        head = f"stg.func @train ({args}) -> {result} {{"
        self.functions["train"] = [head, *("  " + line for line in body.all()), "}"]
        return self

    def text(self) -> str:
        """The complete text, with a final line break."""
        used = self.used_symbols
        relations = [r for r in self.relations if set(_NAMES.findall(r)) <= used.keys()]
        lines = [f"// {line}" for line in (self.title, *self.notes)]
        positions = f", positions = {self.positions}" if self.positions is not None else ""
        rates = "".join(f", {name}_dropout = {rate}" for name, rate in self.dropout.items())
        several = f", sequences = ({', '.join(self.sequences)})" if self.sequences[1:] else ""
        several = several or (f", sequences = {self.sequences[0]}" if self.sequences else "")
        lines.append(f"stg.module @{self.name}[phase = parsed{positions}{rates}{several}] {{")
        lines += _symbols(list(used.values()))
        lines += [f"  stg.assume[{', '.join(relations)}]"] if relations else []
        lines += [f'  stg.import["{path}"]' for path in self.imports]
        lines += ["  " + line for line in self.declarations]
        for function in self.functions.values():
            lines += ["", *("  " + line for line in function)]
        return "\n".join(line.rstrip() for line in [*lines, "}"]) + "\n"

    @property
    def used_symbols(self) -> Mapping[str, Symbol]:
        """The symbols that lines use."""
        used = self.used | set(_NAMES.findall(" ".join(_code(self._inner()))))
        return {n: s for n, s in self.symbols.items() if n in used}

    def _inner(self) -> Iterable[str]:
        for function in self.functions.values():
            yield from function
        yield from self.declarations


def _code(lines: Iterable[str]) -> Iterable[str]:
    """The lines without comments, strings and names of values and parameters."""
    for line in lines:
        yield re.sub(r'"[^"]*"|//.*|[%@][\w/]+|\w+ = ', " ", line)


def _symbols(symbols: Sequence[Symbol]) -> list[str]:
    """The lines of `stg.symbols`, one for each symbol with its comment."""
    parts = [s.name if s.value is None else f"{s.name} = {s.value}" for s in symbols]
    lines = ["  stg.symbols["]
    width = max(map(len, parts)) + 3
    for number, (part, symbol) in enumerate(zip(parts, symbols, strict=True), 1):
        code = part + ("]" if number == len(parts) else ",")
        comment = f"// {symbol.comment}" if symbol.comment else ""
        lines.append(f"      {code:<{width}}{comment}".rstrip())
    return lines


def aligned(lines: Sequence[str]) -> list[str]:
    """The lines, with aligned equal signs and comments of neighbours."""
    return _aligned_comments(_aligned_definitions(lines))


def _aligned_definitions(lines: Sequence[str]) -> list[str]:
    result: list[str] = []
    block: list[tuple[str, str, str]] = []

    def close() -> None:
        width = max((len(names) for _, names, _ in block), default=0)
        result.extend(f"{pad}{names:<{width}} = {rest}" for pad, names, rest in block)
        block.clear()

    for line in lines:
        match = _DEFINITION.fullmatch(line)
        if match is None or "," in match[2] or line.endswith("{"):
            close()
            result.append(line)
            continue
        if block and (block[-1][0], _declares(block[-1][2])) != (match[1], _declares(match[3])):
            close()
        block.append((match[1], match[2], match[3]))
    close()
    return result


def _declares(op: str) -> bool:
    return op.startswith("stg.param")


def _aligned_comments(lines: Sequence[str]) -> list[str]:
    parts = [line.partition("  // ") for line in lines]
    ends = [len(code) for code, mark, _ in parts if mark and code.strip()]
    width = min(max(ends, default=0), _WIDTH - 30)
    return [
        f"{code:<{width}}  // {comment}" if mark and code.strip() else code + mark + comment
        for code, mark, comment in parts
    ]
