"""Mutations of texts, of bytes and of JSON. All take their chances from one `Random`, so that an
input is told by its number."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

#: Kinds of tokens: a token is often replaced by another of its kind, so that the text still parses.
_TOKEN = re.compile(
    r"(?P<string>\"[^\"\n]*\")|(?P<op>[a-z]\w*\.\w+)|(?P<value>%\w+)|(?P<symbol>@\w+)"
    r"|(?P<number>\d+)|(?P<name>[A-Za-z_]\w*)|(?P<space>\s+)|(?P<other>->|.)",
    re.DOTALL,
)
#: What mutations put in, besides what the seeds hold.
ODD_TOKENS = (
    "0",
    "-1",
    "1/2",
    "1",
    "3",
    "9223372036854775807",
    "18446744073709551616",
    "1000000",
    "node",
    '"->"',
    '"ab"',
    '"(ab)c->c"',
    '""',
    "é",
    "\0",
    "%",
    "max(B, 1)",
    "^",
    "==",
    ">=",
    "param",
    "load(E)",
    "| sum(dp)",
    "@dp",
    "@(dp, tp)",
    "[]",
    "()",
    "{}",
    "[x = 1]",
    "(%x)",
    "f32[B]",
    "f8e4m3[B, S]",
    "stg.yield(%x)",
    "stg.return(%x)",
    "stg.repeat",
    "stg.module",
    "phase = lowered",
    "phase = sharded",
    "phase = shaped",
)
_ODD_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    255,
    1 << 20,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 63,
    1 << 64,
    1e300,
)
_ODD_JSON: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "x",
    "../x",
    "0",
    [],
    {},
    [[]],
    [0],
    0.5,
    -0.0,
    "\ud800",
    *_ODD_NUMBERS,
)
Token = tuple[str, str]
#: What stands before and behind a token: punctuation as it is, other tokens by kind.
Context = tuple[str, str]


@dataclass(frozen=True)
class Lexicon:
    """The tokens of some texts: by kind (`any` are all, with the odd ones), and by what stands
    around them."""

    kinds: Mapping[str, Sequence[str]]
    contexts: Mapping[Context, Sequence[str]]


def tokens(text: str) -> list[Token]:
    """Kind and text of every token; together they are the text."""
    return [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(text)]


def lexicon_of(texts: Sequence[str]) -> Lexicon:
    """What some texts are made of, each token once."""
    kinds: dict[str, set[str]] = {"any": set(ODD_TOKENS)}
    contexts: dict[Context, set[str]] = {}
    for parts in map(tokens, texts):
        for kind, token in parts:
            kinds.setdefault(kind, set()).add(token)
            kinds["any"].add(token)
        solid = _solid(parts)
        for n, at in enumerate(solid):
            contexts.setdefault(_context(parts, solid, n), set()).add(parts[at][1])
    return Lexicon(
        {kind: sorted(each) for kind, each in kinds.items()},
        {context: sorted(each) for context, each in contexts.items()},
    )


def _solid(parts: Sequence[Token]) -> list[int]:
    return [i for i, (kind, _) in enumerate(parts) if kind != "space"]


def _context(parts: Sequence[Token], solid: Sequence[int], n: int) -> Context:
    def name_of(at: int) -> str:
        if not 0 <= at < len(solid):
            return ""
        kind, token = parts[solid[at]]
        return token if kind == "other" else kind

    return name_of(n - 1), name_of(n + 1)


def mutate_text(chance: Random, text: str, known: Lexicon, other: str) -> str:
    """The text with one to four changes; lines may come from another one. Half of the texts have
    changes only that the grammar mostly takes, so that what is behind the parser is reached."""
    parts = tokens(text)
    tame = chance.random() < 0.5
    for _ in range(chance.choice((1, 1, 2) if tame else (1, 1, 1, 2, 2, 3, 4))):
        if parts:
            change = chance.choice(_TAME_CHANGES if tame else _TEXT_CHANGES)
            change(chance, parts, known, other)
    return "".join(token for _, token in parts)


TextChange = Callable[[Random, list[Token], Lexicon, str], None]


def _same_kind(chance: Random, parts: list[Token], known: Lexicon, _: str) -> None:
    solid = [i for i, (kind, _) in enumerate(parts) if kind != "space"]
    if solid:
        at = chance.choice(solid)
        kind = parts[at][0]
        parts[at] = kind, chance.choice(known.kinds[kind])


def _in_context(chance: Random, parts: list[Token], known: Lexicon, _: str) -> None:
    """Another token that stands between such neighbours somewhere."""
    solid = _solid(parts)
    if not solid:
        return
    n = chance.randrange(len(solid))
    kind, token = parts[solid[n]]
    choices = known.contexts.get(_context(parts, solid, n), (token,))
    parts[solid[n]] = kind, chance.choice(choices)


def _in_text(chance: Random, parts: list[Token], _: Lexicon, __: str) -> None:
    """A value, a name or a number becomes another one of the same text."""
    kind = chance.choice(("value", "value", "name", "name", "number", "op", "string"))
    places = [i for i, (k, _) in enumerate(parts) if k == kind]
    if places:
        parts[chance.choice(places)] = kind, parts[chance.choice(places)][1]


def _number(chance: Random, parts: list[Token], _: Lexicon, __: str) -> None:
    places = [i for i, (k, _) in enumerate(parts) if k == "number"]
    if places:
        numbers = ("0", "1", "2", "3", "7", "64", "1000000", "4294967296", "9223372036854775807")
        parts[chance.choice(places)] = "number", chance.choice(numbers)


def _any_kind(chance: Random, parts: list[Token], known: Lexicon, _: str) -> None:
    parts[chance.randrange(len(parts))] = "other", chance.choice(known.kinds["any"])


def _insert(chance: Random, parts: list[Token], known: Lexicon, _: str) -> None:
    parts.insert(chance.randrange(len(parts) + 1), ("other", chance.choice(known.kinds["any"])))


def _delete(chance: Random, parts: list[Token], _: Lexicon, __: str) -> None:
    at = chance.randrange(len(parts))
    del parts[at : at + chance.choice((1, 1, 2, 5))]


def _swap(chance: Random, parts: list[Token], _: Lexicon, __: str) -> None:
    a, b = chance.randrange(len(parts)), chance.randrange(len(parts))
    parts[a], parts[b] = parts[b], parts[a]


def _lines(parts: list[Token]) -> list[str]:
    return "".join(token for _, token in parts).splitlines(keepends=True)


def _line(chance: Random, parts: list[Token], _: Lexicon, other: str) -> None:
    """Drop, repeat or move a line, or take one of another text."""
    lines = _lines(parts)
    if not lines:
        return
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(to, lines[at])
        case 2:
            lines.insert(to, lines.pop(at))
        case _:
            lines.insert(to, chance.choice(other.splitlines(keepends=True) or [""]))
    parts[:] = tokens("".join(lines))


def _bracket(chance: Random, parts: list[Token], _: Lexicon, __: str) -> None:
    """Drop what stands in brackets, or repeat it."""
    opening = [i for i, (_, token) in enumerate(parts) if token in "([{"]
    if not opening:
        return
    at = chance.choice(opening)
    closing = {"(": ")", "[": "]", "{": "}"}[parts[at][1]]
    end = next((i for i in range(at, len(parts)) if parts[i][1] == closing), at)
    parts[at + 1 : end] = chance.choice(([], parts[at + 1 : end] * 2))


_TEXT_CHANGES: tuple[TextChange, ...] = (
    _same_kind,
    _same_kind,
    _same_kind,
    _any_kind,
    _insert,
    _delete,
    _swap,
    _line,
    _line,
    _bracket,
)
_TAME_CHANGES: tuple[TextChange, ...] = (
    _in_context,
    _in_context,
    _in_context,
    _in_text,
    _in_text,
    _number,
    _line,
)


# -- bytes -----------------------------------------------------------------------------------------


def mutate_bytes(chance: Random, data: bytes) -> bytes:
    """The bytes with one to four of them, or stretches of them, changed."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, size = chance.randrange(len(out) + 1), chance.choice((1, 1, 2, 4, 8, 64))
        match chance.randrange(6):
            case 0:
                out[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                out[at : at + size] = bytes([chance.choice((0, 1, 0x7F, 0x80, 0xFF))]) * size
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size]
            case 4:
                out[at:at] = chance.randbytes(size)
            case _:
                del out[at:]
    return bytes(out)


def mutate_json(chance: Random, data: bytes) -> bytes:
    """JSON with one to three of its values or names changed; still JSON."""
    root: list[Any] = [json.loads(data)]
    for _ in range(chance.randint(1, 3)):
        places = _places(root)
        if not places:
            return b""
        holder, key = chance.choice(places)
        _change(chance, holder, key, [h[k] for h, k in places])
    if not root:
        return b""
    return json.dumps(root[0], indent=1).encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a value, as what holds it and the key there."""
    here = _keys(value)
    return [(value, key) for key in here] + [p for key in here for p in _places(value[key])]


def _keys(value: Any) -> list[Any]:
    kind = type(value).__name__
    return list(value) if kind == "dict" else list(range(len(value))) if kind == "list" else []


def _change(chance: Random, holder: Any, key: Any, others: Sequence[Any]) -> None:
    value: Any = holder[key]
    inside = type(holder).__name__
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = deepcopy(chance.choice(others))
        case 2 if inside == "dict":
            holder[chance.choice(("", "x", "0", "-1"))] = holder.pop(key)
        case 3 if type(value) is int:
            holder[key] = chance.choice((value + 1, value - 1, value + (1 << 32), -value))
        case 4 if inside == "list":
            holder.append(deepcopy(value))
        case _:
            holder[key] = deepcopy(chance.choice(_ODD_JSON))  # those are not to change


def tame_json(chance: Random, data: bytes) -> bytes:
    """JSON of which one to three values become others of their type, or are left out, so that what
    is behind its reader is reached."""
    root: list[Any] = [json.loads(data)]
    for _ in range(chance.randint(1, 3)):
        plain = [(h, k) for h, k in _places(root) if not _keys(h[k])]
        if not plain:
            break
        holder, key = chance.choice(plain)
        alike = [h[k] for h, k in plain if type(h[k]) is type(holder[key])]
        if chance.random() < 0.2 and holder is not root:
            del holder[key]
        else:
            holder[key] = _alike(chance, holder[key], alike)
    return json.dumps(root[0], indent=1).encode("utf-8", "surrogatepass")


def _alike(chance: Random, value: Any, others: Sequence[Any]) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            changed = (value + 1, value - 1, value * 2, value // 2, 1, 0)
            return chance.choice((*changed, chance.choice(others)))
        case _:
            return chance.choice(others)
