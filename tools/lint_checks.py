"""Lints what other checkers accept in silence.

FileCheck ignores a directive without its colon and a prefix that no RUN line names: both are errors
here, like a lit test without RUN, and a machine's own paths in a tracked file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from tools.golden import MARKER  # noqa: E402
from tools.lit_syntax import find_tests, run_lines  # noqa: E402


@dataclass(frozen=True)
class Finding:
    """One complaint about one line (1-based)."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


# ------------------------------------------------------------------ lit tests

_OTHER_KEYWORDS = {"RUN", "COM", "GOLDEN", "REQUIRES", "UNSUPPORTED", "XFAIL", "NOTE", "TODO"}
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
    | `FSDP`       | no    | `CHECK` |                |
    """
    if word in _OTHER_KEYWORDS:
        return ""
    if any(re.fullmatch(rf"{re.escape(prefix)}(?:{_SUFFIX})?", word) for prefix in known):
        return "" if has_colon else f"`{word}` has no colon: FileCheck ignores it"
    looks_meant = has_colon or word.startswith(tuple(known)) or re.search(rf"{_SUFFIX}$", word)
    names = ", ".join(sorted(known)) or "none"
    return f"`{word}` is no known directive (prefixes of the RUN lines: {names})" * bool(
        looks_meant
    )


def lint_lit_text(path: Path, text: str) -> Iterator[Finding]:
    """Findings about one lit test."""
    runs = run_lines(text)
    if not runs:
        yield Finding(path, 1, "no RUN line: the test runs nothing")
    known = known_prefixes(runs)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.rstrip() == MARKER:
            return
        if re.match(r"\s*(?://|#)\s*(?:RUN|COM):", line):
            continue
        for match in _COMMENT.finditer(line):
            if problem := directive_problem(match["word"], bool(match["colon"]), known):
                yield Finding(path, number, problem)


def lint_lit(lit_root: Path) -> Iterator[Finding]:
    """Findings about every lit test below a directory."""
    for path in find_tests(lit_root):
        yield from lint_lit_text(path, path.read_text(encoding="utf-8"))


# ------------------------------------------------------------------ tracked files

_HOMES = r"(?:work|root|home|Users)"
_MACHINE_PATH = re.compile(rf"(?<![\w.}})\]])/{_HOMES}/[\w.]+")
_PACKAGE_INDEX = re.compile(r"--(?:(?:extra-)?index-url|find[-]links|trusted[-]host)")


def machine_specific(line: str, own_paths: Sequence[str]) -> str:
    """The part of a line that holds on one machine only; empty when there is none."""
    for pattern in (_MACHINE_PATH, _PACKAGE_INDEX):
        if match := pattern.search(line):
            return match[0]
    return next((path for path in own_paths if path in line), "")


def own_paths(root: Path) -> list[str]:
    """This checkout and this user's home, unless too short to be telling."""
    return [str(path) for path in (root, Path.home()) if len(path.parts) > 2]


def lint_text(path: Path, text: str, own: Sequence[str]) -> Iterator[Finding]:
    """Machine-specific lines of one file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := machine_specific(line, own):
            yield Finding(path, number, f"`{found}` holds on one machine only")


def tracked_files(root: Path) -> Iterator[Path]:
    """Files that git tracks or would track; without git, all but hidden and built ones."""
    listing = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    if shutil.which("git") and (root / ".git").exists():
        names = subprocess.run(listing, capture_output=True, check=True, text=True).stdout
        yield from (root / name for name in names.split("\0") if name)
        return
    for path in sorted(root.rglob("*")):
        top = path.relative_to(root).parts[0]
        if (
            not top.startswith(".")
            and top not in ("build", "dist")
            and "__pycache__" not in path.parts
        ):
            yield path


def lint_tracked(root: Path) -> Iterator[Finding]:
    """Machine-specific lines of every tracked text file."""
    own = own_paths(root)
    for path in tracked_files(root):
        if not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield from lint_text(path, text, own)


def main(root: Path = ROOT) -> int:
    """Print the findings; exit code 1 if there are any."""
    findings = [*lint_lit(root / "tests" / "lit"), *lint_tracked(root)]
    for finding in findings:
        print(finding)
    print(f"lint_checks: {len(findings)} finding(s)")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
