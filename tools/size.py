"""The size of the product by room, and the budget of each room (`[tool.stagec.size]`).

    python -m tools.size            a table: lines and tokens of each room, and its budget
    python -m tools.size --check    fails if a room is above its budget, or has none

Lines are counted as in tinygrad's sz.py: those with a token of the language, without docstrings,
comments and blank lines. Generated files do not count.
"""

from __future__ import annotations

import argparse
import io
import sys
import token
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The folders of the product; those outside `stagec` are packages in it (`package-dir`).
_PLACES = {"stagec": ROOT / "stagec", "ir_spec": ROOT / "ir_spec", "passes": ROOT / "passes"}
_LAYOUT = (token.COMMENT, token.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER)
_GENERATED = ("_pb2.py", "signature.py")


def main(argv: list[str]) -> int:
    """Print the table, or check the budgets, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a room is above its budget")
    check = parser.parse_args(argv).check
    sizes, budgets = sizes_of_rooms(), read_budgets(ROOT / "pyproject.toml")
    if not check:
        print_table(sizes, budgets)
    problems = list(over_budget(sizes, budgets))
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return int(check and bool(problems))


def size_of(text: str) -> tuple[int, int]:
    """Lines with a token, and tokens, of a Python text."""
    rows, count = set[int](), 0
    before = token.NEWLINE
    for piece in tokenize.generate_tokens(io.StringIO(text).readline):
        if piece.type in _LAYOUT:
            before = before if piece.type in (token.COMMENT, token.NL) else token.NEWLINE
            continue
        alone = piece.type == token.STRING and before == token.NEWLINE
        before = piece.type
        if alone and piece.line.rstrip().endswith(piece.string.splitlines()[-1]):
            continue  # a docstring
        rows.update(range(piece.start[0], piece.end[0] + 1))
        count += 1
    return len(rows), count


def sizes_of_rooms() -> dict[str, tuple[int, int]]:
    """Lines and tokens of each room of the product, by name."""
    sizes: dict[str, tuple[int, int]] = {}
    for room, path in files():
        lines, tokens = size_of(path.read_text())
        known = sizes.get(room, (0, 0))
        sizes[room] = known[0] + lines, known[1] + tokens
    return sizes


def files() -> Iterator[tuple[str, Path]]:
    """Each file of the product, with the name of its room."""
    for name, folder in _PLACES.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).parts
            room = name if name != "stagec" else inner[0].removesuffix(".py")
            linked = name == "stagec" and room in _PLACES
            if not linked and not path.name.endswith(_GENERATED):
                yield room, path


def read_budgets(pyproject: Path) -> dict[str, int]:
    """The budget of each room in lines."""
    budgets: dict[str, int] = tomllib.loads(pyproject.read_text())["tool"]["stagec"]["size"]
    return budgets


def over_budget(sizes: Mapping[str, tuple[int, int]], budgets: Mapping[str, int]) -> Iterator[str]:
    """A sentence for each room that exceeds its budget, has none, or does not exist."""
    for room, (lines, _) in sizes.items():
        if room not in budgets:
            yield f"{room} has {lines} lines and no budget in [tool.stagec.size]"
        elif lines > budgets[room]:
            yield (
                f"{room} has {lines} lines, {lines - budgets[room]} above its budget in "
                "[tool.stagec.size]: make it smaller, or say in the commit what users get for more"
            )
    yield from (f"[tool.stagec.size] has no room '{room}'" for room in budgets.keys() - sizes)


def print_table(sizes: Mapping[str, tuple[int, int]], budgets: Mapping[str, int]) -> None:
    """A row for each room, and their sum."""
    print(f"{'room':12} {'lines':>7} {'budget':>7} {'tokens':>9}")
    total = (sum(n for n, _ in sizes.values()), sum(n for _, n in sizes.values()))
    for room, (lines, tokens) in [*sorted(sizes.items()), ("all", total)]:
        budget = sum(budgets.values()) if room == "all" else budgets.get(room, 0)
        print(f"{room:12} {lines:7,} {budget:7,} {tokens:9,}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
