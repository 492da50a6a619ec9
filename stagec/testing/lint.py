"""Lints what FileCheck accepts in silence: a directive without its colon, a prefix that no RUN line
names, a test without RUN."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagec.testing.golden import MARKER
from stagec.testing.syntax import run_lines


@dataclass(frozen=True)
class LintFinding:
    """One complaint about one line (1-based)."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


_OTHER_KEYWORDS = {"COM", "GOLDEN", "NOTE", "TODO"}
_SUFFIX = r"-(?:NEXT|SAME|NOT|DAG|LABEL|EMPTY|COUNT-\d+)"
_COMMENT = re.compile(
    r"(?://|^\s*#)\s*(?P<word>[A-Z][A-Z0-9_-]*)(?![a-z])(?:\{LITERAL\})?(?P<colon>:?)"
)
_FILECHECK = re.compile(r"%filecheck\b([^|&;]*)")
_PREFIX_OPTION = re.compile(r"-?-check-prefix(?:es)?[= ]\s*['\"]?([\w,-]+)")


def known_prefixes(lines: Sequence[str]) -> set[str]:
    """The check prefixes that the RUN lines name; `CHECK` where %filecheck names none."""
    known: set[str] = set()
    for arguments in (match[1] for line in lines for match in _FILECHECK.finditer(line)):
        named = [name for group in _PREFIX_OPTION.findall(arguments) for name in group.split(",")]
        known.update(named or ["CHECK"])
    return known


def directive_problem(word: str, has_colon: bool, known: set[str]) -> str:
    """What is wrong with the first word of a comment; empty when nothing is.

    | word         | colon | known   | problem        |
    |--------------|-------|---------|----------------|
    | `CHECK-NEXT` | yes   | `CHECK` |                |
    | `CHECK-NEXT` | no    | `CHECK` | no colon       |
    | `CHECK-NXT`  | yes   | `CHECK` | unknown        |
    | `CHEK`       | yes   | `CHECK` | unknown        |
    | `RUN`        | no    | `CHECK` | no colon       |
    | `FSDP`       | no    | `CHECK` |                |
    """
    if word in _OTHER_KEYWORDS:
        return ""
    if word == "RUN":
        return "" if has_colon else "`RUN` has no colon: the line is not run"
    if any(re.fullmatch(rf"{re.escape(prefix)}(?:{_SUFFIX})?", word) for prefix in known):
        return "" if has_colon else f"`{word}` has no colon: FileCheck ignores it"
    looks_meant = has_colon or word.startswith(tuple(known)) or re.search(rf"{_SUFFIX}$", word)
    names = ", ".join(sorted(known))
    about = f"prefixes of the RUN lines: {names}" if names else "no RUN line runs %filecheck"
    return f"`{word}` is no known directive ({about})" * bool(looks_meant)


def means_a_test(text: str) -> bool:
    """Whether a file is a test, or looks as if it should be one: an input has no directives."""
    return bool(run_lines(text)) or _MEANT.search(text) is not None


_MEANT = re.compile(r"^.*(?://|^\s*#)\s*(?:RUN|CHECK|GOLDEN)\b", re.M)


def lint_lit_text(path: Path, text: str) -> Iterator[LintFinding]:
    """Findings about one lit test."""
    runs = run_lines(text)
    if not runs:
        yield LintFinding(path, 1, "no RUN line: the test runs nothing")
    known = known_prefixes(runs)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.rstrip() == MARKER:
            return
        if re.match(r"\s*(?://|#)\s*(?:RUN|COM):", line):
            continue
        for match in _COMMENT.finditer(line):
            if problem := directive_problem(match["word"], bool(match["colon"]), known):
                yield LintFinding(path, number, problem)
