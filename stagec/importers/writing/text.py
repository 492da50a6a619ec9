"""STG texts as a person writes them: symbols with the keys that they come from, one function for
each block, aligned lines.

A `ModelText` collects symbols and functions and prints the module; a `Body` collects the lines of
a function. Symbols that no line uses are left out.
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
    """A symbol: its value (None: left open), and the key or the formula that it comes from."""

    name: str
    value: int | None
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Callee:
    """A function as it is called: `given` are sizes and options that the call states."""

    name: str
    given: tuple[str, ...] = ()

    def with_(self, *given: str) -> Callee:
        """The same function, given more."""
        return Callee(self.name, (*self.given, *given))

    def __str__(self) -> str:
        """Its name, and what it is given in brackets."""
        return f"{self.name}[{', '.join(self.given)}]" if self.given else self.name


class Body:
    """The lines of a function or of a repeat, each parameter where it is declared."""

    def __init__(self, *lines: str) -> None:
        self.lines = [*lines]

    def param(
        self, name: str, dims: str, comment: str = "", dtype: str = "bf16", role: str = ""
    ) -> str:
        """Declare a parameter with these dimensions; its name with the percent sign."""
        kind = f"{dtype}[{dims}{f' | {role}' if role else ''}]"
        return self.let(name, f"stg.param : {kind}", comment)

    def let(self, name: str, op: str, comment: str = "") -> str:
        """Append `%name = op`; the name with the percent sign."""
        self.lines.append(f"%{name} = {op}" + (f"  // {comment}" if comment else ""))
        return f"%{name}"

    def call(self, name: str, block: Callee, *operands: str) -> str:
        """Append `%name = stg.call @block(operands)`; the name with the percent sign."""
        return self.let(name, f"stg.call @{block}({', '.join(operands)})")

    def steps(self, name: str, x: str, steps: Sequence[str]) -> str:
        """Append operations one after the other, each on the result `{}` of the one before: the
        last is `%name`, those before it are `%name0`, `%name1`, ...; the last one's name. Without
        steps it is `x` itself."""
        for number, step in enumerate(steps, 1):
            last = number == len(steps)
            x = self.let(name if last else f"{name}{number - 1}", step.format(x))
        return x

    def do(self, *lines: str) -> None:
        """Append lines as they are."""
        self.lines += lines

    def ends(self, loss: str) -> None:
        """Append an operation as the loss of the function, and return it."""
        self.do(f"stg.return({self.let('loss', loss)})")

    def repeat(
        self, results: str, name: str, count: str, carried: str, inner: Body, order: str = ""
    ) -> str:
        """Append a repeat of another body, so many times, on what is carried: `%h = %x, %c = %d`.
        Its layers stand in an order of the text if that has a name. The first result."""
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
    """Embeddings that stand among those of a text: `write` appends its tokens [B, X, D] to a step
    and returns their name; `args` are the arguments that it needs. Values `%deep0`, `%deep1`, ...
    that it writes too, `deep` of them, are added to the stream behind the first layers."""

    args: str
    write: Callable[[ModelText, Body], str]
    deep: int = 0


@dataclass
class ModelText:
    """A module in the making; `title` and `notes` are its first comment lines. `head` is what a
    decoder computes: tokens, a class of each sequence, or classes of all tokens; `positions` are
    those that the configuration states, `dropout` its rates by what is dropped, `sequences` the
    dimensions of tokens where S is not the only one; `among` is what stands among tokens."""

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
        """Declare a size; its name. A name may be declared twice with one value."""
        given = self.symbols.setdefault(name, Symbol(name, value, comment))
        if given.value != value:
            raise ValueError(f"symbol {name} is {given.value}, and {value}")
        return name

    def value(self, name: str) -> int:
        """The value of a symbol; 1 of an open one."""
        return self.symbols[name].value or 1

    def replace(self, name: str, value: int, comment: str) -> None:
        """Change the value of a declared symbol."""
        self.symbols[name] = Symbol(name, value, comment)

    def assume(self, relation: str) -> None:
        """State a relation between symbols, once; it is left out if one of them is not used."""
        if relation not in self.relations:
            self.relations.append(relation)

    def use(self, block: str, symbols: str, *given: str, function: str = "") -> Callee:
        """Import a text of the library, which uses these symbols; its function of this name, if not
        that of the text, with these options."""
        path = f"blocks/{block}.stg"
        if path not in self.imports:
            self.imports.append(path)
        self.used.update(symbols.split())
        return Callee(function or block, given)

    def function(self, name: str, args: str, body: Body, comment: str = "") -> Callee:
        """Add a private function. A second one of that name must be the same."""
        lines = [f"// {line}" for line in comment.splitlines()]
        lines += [f"stg.func @{name}[private] ({args}) {{"]
        lines += ["  " + line for line in body.all(params_first=True)] + ["}"]
        if self.functions.setdefault(name, lines) != lines:
            raise ValueError(f"two functions @{name}")
        return Callee(name)

    def scope(self, body: Body, name: str, operands: str, inner: Body, *results: str) -> None:
        """Append to a body the call of a private function of this name, the scope around all that
        `inner` declares; `operands` and `results` are values of the same names on both sides."""
        made = ", ".join(results)
        inner.do(f"stg.return({made})")
        body.do(f"{made} = stg.call @{self.function(name, operands, inner)}({operands})")

    def train(self, args: str, body: Body, result: str = "f32[]") -> ModelText:
        """Add the function that is compiled; the text itself."""
        head = f"stg.func @train ({args}) -> {result} {{"
        self.functions["train"] = [head, *("  " + line for line in body.all()), "}"]
        return self

    def text(self) -> str:
        """The whole text, ending in a line break."""
        known = self.used_symbols
        relations = [r for r in self.relations if set(_NAMES.findall(r)) <= known.keys()]
        lines = [f"// {line}" for line in (self.title, *self.notes)]
        positions = f", positions = {self.positions}" if self.positions is not None else ""
        rates = "".join(f", {name}_dropout = {rate}" for name, rate in self.dropout.items())
        several = f", sequences = ({', '.join(self.sequences)})" if self.sequences[1:] else ""
        several = several or (f", sequences = {self.sequences[0]}" if self.sequences else "")
        lines.append(f"stg.module @{self.name}[phase = parsed{positions}{rates}{several}] {{")
        lines += _symbols(list(known.values()))
        lines += [f"  stg.assume[{', '.join(relations)}]"] if relations else []
        lines += [f'  stg.import["{path}"]' for path in self.imports]
        lines += ["  " + line for line in self.declarations]
        for function in self.functions.values():
            lines += ["", *("  " + line for line in function)]
        return "\n".join(line.rstrip() for line in [*lines, "}"]) + "\n"

    @property
    def used_symbols(self) -> Mapping[str, Symbol]:
        """The symbols that some line uses."""
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
    """`stg.symbols`, one on a line with its comment, where it has one."""
    parts = [s.name if s.value is None else f"{s.name} = {s.value}" for s in symbols]
    lines = ["  stg.symbols["]
    width = max(map(len, parts)) + 3
    for number, (part, symbol) in enumerate(zip(parts, symbols, strict=True), 1):
        code = part + ("]" if number == len(parts) else ",")
        comment = f"// {symbol.comment}" if symbol.comment else ""
        lines.append(f"      {code:<{width}}{comment}".rstrip())
    return lines


def aligned(lines: Sequence[str]) -> list[str]:
    """The lines with the equal signs of neighbours below each other, and their comments too."""
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
