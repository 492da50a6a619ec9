"""Lints for problems that other checkers accept: misspelt directives of lit tests, paths of one
machine in a tracked file, passes that import each other or bypass `stagec.api`, class names with
two definitions."""

from __future__ import annotations

import ast
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
    """The part of a line that is valid on one machine only, or an empty text."""
    for pattern in (_MACHINE_PATH, _PACKAGE_INDEX):
        if match := pattern.search(line):
            return match[0]
    return next((path for path in own_paths if path in line), "")


def own_paths(root: Path) -> list[str]:
    """This checkout and the home of this user, unless they are too short to be specific."""
    return [str(path) for path in (root, Path.home()) if len(path.parts) > 2]


def lint_text(path: Path, text: str, own: Sequence[str]) -> Iterator[LintFinding]:
    """Machine-specific lines of one file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if word := machine_specific(line, own):
            yield LintFinding(path, number, f"`{word}` holds on one machine only")


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


# ------------------------------------------------------------------ passes


def imports(text: str) -> Iterator[tuple[int, str, str]]:
    """The imports of a text from modules of stagec: line, module and name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stagec."):
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def defines_a_pass(text: str) -> bool:
    """Whether a module has a class derived from `Pass` itself."""
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return any(isinstance(b, ast.Name) and b.id == "Pass" for c in classes for b in c.bases)


def lint_passes(root: Path) -> Iterator[LintFinding]:
    """Imports of a pass by other modules than the list of passes, and imports of names of
    `stagec.api` from their original modules."""
    passes, api = root / "passes", root / "stagec" / "api.py"
    text = api.read_text(encoding="utf-8") if api.exists() else ""
    public = {(module, name) for _, module, name in imports(text)}
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(passes.rglob("*.py"))}
    owners = {
        ".".join(("stagec.passes", *path.relative_to(passes).with_suffix("").parts))
        for path, text in texts.items()
        if defines_a_pass(text)
    }
    for path, text in texts.items():
        for line, module, name in imports(text):
            if module in owners and path != passes / "__init__.py":
                message = f"`{module}` is a pass: move what both need to a module without one"
                yield LintFinding(path, line, message)
            if (module, name) in public:
                yield LintFinding(
                    path, line, f"import `{name}` from stagec.api, as a user's pass does"
                )


# ------------------------------------------------------------------ names


def lint_names(root: Path) -> Iterator[LintFinding]:
    """Public classes of the product whose name is also defined in another module."""
    first: dict[str, Path] = {}
    rooms = (root / room for room in ("stagec", "passes", "ir_spec"))
    for path in (path for room in rooms for path in sorted(room.rglob("*.py"))):
        if path.stem.endswith("_pb2"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            there = first.setdefault(node.name, path)
            if there != path:
                message = f"class `{node.name}` is another one in {there.relative_to(root)}"
                yield LintFinding(path, node.lineno, f"{message}: name one of them otherwise")


def main(root: Path = ROOT) -> int:
    """Print the findings; exit code 1 if there are any."""
    lit = lint_lit(root / "tests" / "lit")
    findings = [*lit, *lint_tracked(root), *lint_passes(root), *lint_names(root)]
    for finding in findings:
        print(finding)
    print(f"lint_checks: {len(findings)} finding(s)")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
