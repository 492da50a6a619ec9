"""Lints what other checkers accept in silence: misspelt directives of lit tests, and paths of one
machine in a tracked file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from stagec.testing.lint import LintFinding, lint_lit_text
from stagec.testing.syntax import find_tests, read_test

ROOT = Path(__file__).resolve().parent.parent

# ------------------------------------------------------------------ lit tests


def lint_lit(lit_root: Path) -> Iterator[LintFinding]:
    """Findings about every lit test below a directory."""
    for path in find_tests(lit_root):
        yield from lint_lit_text(path, read_test(path))


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


def lint_text(path: Path, text: str, own: Sequence[str]) -> Iterator[LintFinding]:
    """Machine-specific lines of one file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := machine_specific(line, own):
            yield LintFinding(path, number, f"`{found}` holds on one machine only")


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


def lint_tracked(root: Path) -> Iterator[LintFinding]:
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
