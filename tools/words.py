"""Finds words that have a standard term, in pages and in the strings of the code: docstrings, help,
messages. `[tool.stagec.words]` in pyproject.toml lists them with their replacements. Its `labels`
apply to whole strings, such as heads of tables, and to units after a value. Sentences of a page
must have fewer words on average than `sentence`.

`python -m tools.words` prints `FILE:LINE: WORD: write ...` and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tools.markup import ROOT

_BLOCK = re.compile(r"^```.*?^```$|^    [^\n]*$", re.DOTALL | re.M)
_CODE = re.compile(rf"{_BLOCK.pattern}|`[^`\n]*`|\]\([^)\n]*\)", re.DOTALL | re.M)
_NO_SENTENCE = re.compile(r"^\|[^\n]*$|^#[^\n]*$|<!--.*?-->", re.DOTALL | re.M)
_PARAGRAPH, _END = re.compile(r"\n\s*\n|\n(?=[-*\d])"), re.compile(r"(?<=[.!?])[\])*_\"]*\s+")
_BEHIND_VALUE = re.compile(r" ([\w ]+)(?:$|[),;:\n])")
_LEAST_WORDS, _LEAST_SENTENCES = 3, 10
_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ir_spec/*.md", "docs/**/*.md")
_SOURCES = ("stagec/**/*.py", "passes/**/*.py", "ir_spec/**/*.py")


@dataclass(frozen=True)
class WordFinding:
    """A word of a file, and its replacement."""

    path: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.word}': write {self.instead}"


def files() -> list[Path]:
    """The checked files, in order."""
    known = {path for pattern in (*_PAGES, *_SOURCES) for path in ROOT.glob(pattern)}
    return sorted(path for path in known if not path.stem.endswith("_pb2"))


def prose(path: Path, text: str) -> str:
    """The text of a file without its code, on the same lines."""
    if path.suffix == ".py":
        return _strings(text)
    return _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)


def _strings(text: str) -> str:
    """The strings of Python code that have a space, without quoted code. A string of several lines
    is separate, even if it is concatenated with others."""
    lines = [""] * (text.count("\n") + 2)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.splitlines(), node.lineno - 1):
                lines[min(number, len(lines) - 1)] += f" {re.sub('`[^`]*`', '``', line)} "
    return "\n".join(lines)


def findings(path: Path, text: str, words: Mapping[str, str]) -> Iterator[WordFinding]:
    """The words of the prose of a file."""
    shown = prose(path, text)
    for pattern, instead in words.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", shown):
            line = shown.count("\n", 0, match.start()) + 1
            yield WordFinding(path, line, match[0], instead)


def label_findings(path: Path, text: str, labels: Mapping[str, str]) -> Iterator[WordFinding]:
    """The labels of Python code that have a standard form: whole strings, and units after a value
    of an f-string."""
    for line, label in _labels(text):
        for pattern, instead in labels.items():
            if re.fullmatch(pattern, label):
                yield WordFinding(path, line, label, instead)


def _labels(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        if isinstance(node, ast.JoinedStr):
            for value, after in pairwise(node.values):
                if not (isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant)):
                    continue
                if unit := _BEHIND_VALUE.match(str(after.value)):
                    yield after.lineno, unit[1]


def mean_sentence(text: str) -> float:
    """The mean number of words of the sentences of a page, without tables and headings; 0 for a
    page of fewer than ten sentences. Quoted code is a word."""
    shown = re.sub(r"`[^`\n]*`", "x", re.sub(r"\]\([^)\n]*\)", "]", _BLOCK.sub("", text)))
    paragraphs = _PARAGRAPH.split(_NO_SENTENCE.sub("", shown))
    counts = [len(s.split()) for p in paragraphs for s in _END.split(p.strip())]
    sentences = [count for count in counts if count >= _LEAST_WORDS]
    return sum(sentences) / len(sentences) if len(sentences) >= _LEAST_SENTENCES else 0


def main() -> int:
    """Check all files."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    table = config["tool"]["stagec"]["words"]
    problems = list[object]()
    for path in files():
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        problems += findings(name, text, table["instead"])
        problems += label_findings(name, text, table["labels"]) if path.suffix == ".py" else ()
        mean = mean_sentence(text) if path.suffix == ".md" else 0
        if mean >= table["sentence"] and not name.as_posix().startswith(tuple(table["longer"])):
            problems.append(f"{name}: sentences have {mean:.1f} words in the mean: split some")
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
