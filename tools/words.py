"""Looks for words in pages that have a standard term: `[tool.stagec.words]` in pyproject.toml says
which, what to write instead, and which pages have not been edited yet. Code is not looked at.

`python -m tools.words` prints `FILE:LINE: WORD: write ...` and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.markup import ROOT

_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|^    [^\n]*$|\]\([^)\n]*\)", re.DOTALL | re.M)
_PLACES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ir_spec/*.md", "docs/**/*.md")


@dataclass(frozen=True)
class WordFinding:
    """A word of a page, and what to write instead."""

    path: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.word}': write {self.instead}"


def pages(later: Sequence[str]) -> list[Path]:
    """The pages that are looked at: not those whose names begin with one of `later`. Raises
    ValueError for one of these that no page begins with."""
    known = {path.relative_to(ROOT).as_posix(): path for p in _PLACES for path in ROOT.glob(p)}
    if missing := [name for name in later if not any(k.startswith(name) for k in known)]:
        raise ValueError(f"[tool.stagec.words] names no pages: {', '.join(missing)}")
    return [p for name, p in sorted(known.items()) if not name.startswith(tuple(later))]


def findings(path: Path, text: str, words: Mapping[str, str]) -> Iterator[WordFinding]:
    """The words of a text, outside of its code and the targets of its links."""
    prose = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    for pattern, instead in words.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", prose):
            line = prose.count("\n", 0, match.start()) + 1
            yield WordFinding(path, line, match[0], instead)


def main() -> int:
    """Look at all pages."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    table = config["tool"]["stagec"]["words"]
    found = [
        finding
        for path in pages(table["later"])
        for finding in findings(
            path.relative_to(ROOT), path.read_text(encoding="utf-8"), table["instead"]
        )
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
