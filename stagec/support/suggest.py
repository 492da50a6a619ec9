"""Suggestions of known names for an unknown one."""

import re
from collections.abc import Iterable

_MAX_WORD = 80
#: The most equally near words that are suggested.
_MOST = 3
#: Names with more letters and digits may differ by one.
_LONG = 7


def did_you_mean(word: str, known: Iterable[str], sigil: str = "") -> str | None:
    """A remedy that names the nearest known words, each after a sigil, or None if no word is near.

    A word is near if it differs by one typing error (two in words of eight letters and more), or
    begins with the given word. Prefixes such as `stg.` do not count as letters: `stg.mean` is not
    near `stg.send`.
    """
    if len(word) > _MAX_WORD:
        return None
    names = sorted(known)
    names = [f"'{sigil}{name}'" for name in _mistyped(word, names) or _longer(word, names)]
    if not names:
        return None
    return f"did you mean {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}?"


def other_spelling(word: str, known: Iterable[str]) -> str | None:
    """A remedy for a name as a hub or a product has it (`Qwen/Qwen3-30B-A3B`, `NVIDIA H100 80GB
    HBM3`): the names with the same letters and digits after the last slash, those that are a word
    of it, or those with one more or less; None if there are none."""
    names = {_plain(name): name for name in sorted(known)}
    own, words = _plain(word.rpartition("/")[2]), re.split(r"[^a-z0-9.]+", word.lower())
    near = [names[own]] if own in names else [n for n in names.values() if n in words]
    if not near and len(own) > _LONG:
        near = [n for p, n in names.items() if p[:4] == own[:4] and _slips(p, own) == 1]
    return f"did you mean {' or '.join(map(repr, near))}?" if 0 < len(near) <= _MOST else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def written_out(text: str) -> str:
    """What to write in place of a number with a suffix, an exponent or commas (`128k`, `1e6`,
    `4,096`), as the end of a message; empty for other texts."""
    match = re.fullmatch(r"([0-9]{1,6})(?:e([0-9]{1,2})|([km]))", text.lower())
    if match is not None:
        number, power = int(match[1]), int(match[2] or {"k": 3, "m": 6}[match[3]])
        binary = f" or {number << 10 * power // 3}" if match[3] else ""
        return f"; write {number * 10**power}{binary}"
    grouped = re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", text)
    return f"; write {text.replace(',', '')}" if grouped else ""


def _mistyped(word: str, names: list[str]) -> list[str]:
    """The names with the fewest typing errors, if these are few; names with the same first letter
    come before others."""
    keys = {name: (_distance(word, name), name[:1] != word[:1]) for name in names}
    best = min(keys.values(), default=(len(word), True))
    nearest = [name for name in names if keys[name] == best]
    return nearest if best[0] <= _allowed(word) and len(nearest) <= _MOST else []


def _allowed(word: str) -> int:
    """The typing errors that are allowed in a word."""
    letters = len(word.rpartition(".")[2])
    return 0 if letters < 2 else 1 if letters < 8 else 2


def _longer(word: str, names: list[str]) -> list[str]:
    """The names that begin with the word, if these are few."""
    starting = [name for name in names if name.startswith(word)]
    return starting if 0 < len(starting) <= _MOST and len(word) > 2 else []


def _distance(a: str, b: str) -> int:
    """Typing errors after the last dot. The text before it is a scope: a different scope counts as
    one error if the rest is equal, and else makes words unrelated."""
    (scope_a, _, last_a), (scope_b, _, last_b) = a.rpartition("."), b.rpartition(".")
    if scope_a == scope_b:
        return _slips(last_a, last_b)
    return 1 if last_a == last_b else len(a) + len(b)


def _slips(a: str, b: str) -> int:
    """The number of inserted, dropped or replaced letters and swapped neighbours (optimal string
    alignment), without regard to case."""
    a, b = a.lower(), b.lower()
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        last, before, row = before, row, [i]
        for j, y in enumerate(b, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
