"""Golden texts, where the checker is the updater.

In a RUN line, `... | %golden` compares stdin with what follows `// GOLDEN:` in the test, and
`%golden --dir ACTUAL EXPECTED.golden` compares two directories of dumps.
With STAGEC_BLESS=1, which `stagec test --bless` sets, the expected side is rewritten instead.
"""

import argparse
import contextlib
import difflib
import os
import re
import shlex
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagec.driver.shell.session import log

MARKER = "// GOLDEN:"
BLESS = "STAGEC_BLESS"


@dataclass(frozen=True)
class Problem:
    """One difference: a headline and, for text, the unified diff."""

    headline: str
    diff: str = ""


def blessing() -> bool:
    """Whether the expected side is to be rewritten rather than compared."""
    return os.environ.get(BLESS, "") not in ("", "0")


@contextlib.contextmanager
def accepting() -> Generator[None]:
    """Rewrite the expected side meanwhile, here and in processes that are started."""
    before = os.environ.get(BLESS)
    os.environ[BLESS] = "1"
    try:
        yield
    finally:
        del os.environ[BLESS]
        if before is not None:
            os.environ[BLESS] = before


def comment(line: str) -> str:
    """`x` -> `// x`; an empty line -> `//`, so that no golden has trailing blanks of ours."""
    return f"// {line}" if line else "//"


def uncomment(line: str) -> str:
    """The inverse of `comment`; a line without the prefix is returned as it is."""
    return line.removeprefix("//").removeprefix(" ") if line.startswith("//") else line


def split_golden(text: str) -> tuple[str, list[str] | None]:
    """The text before the marker line and the expected lines after it (None: no marker)."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.rstrip() == MARKER:
            return "\n".join(lines[:number]), [uncomment(rest) for rest in lines[number + 1 :]]
    return text, None


def join_golden(head: str, expected: Sequence[str]) -> str:
    """The text of a file whose golden section holds `expected`."""
    section = "\n".join([MARKER, *map(comment, expected)])
    return f"{head.rstrip()}\n\n{section}\n"


def scrub(text: str, home: Path, test_name: str = "") -> str:
    """Drop what depends on the machine: the test's directory, and the path that `%t` stands for."""
    for directory in {home.absolute(), home.resolve()}:
        text = text.replace(f"{directory}{os.sep}", "")
    temp = re.compile(rf"[^\s'\"=:]*/{re.escape(test_name)}\.tmp")
    return temp.sub("%t", text) if test_name else text


def unified(expected: Sequence[str], actual: Sequence[str], name: str) -> str:
    """A unified diff from the expected to the actual lines; empty when they are equal."""
    return "\n".join(
        difflib.unified_diff(
            expected, actual, f"{name} (expected)", f"{name} (actual)", lineterm=""
        )
    )


def check_file(path: Path, actual_text: str) -> list[Problem]:
    """Compare a golden section with the actual text, or rewrite it when blessing."""
    head, expected = split_golden(path.read_text(encoding="utf-8"))
    actual = scrub(actual_text, path.parent, path.name).splitlines()
    if expected == actual:
        return []
    if blessing():
        path.write_text(join_golden(head, actual), encoding="utf-8")
        log(f"golden: wrote {path}")
        return []
    if expected is None:
        return [Problem(f"{path.name} has no line `{MARKER}`", unified([], actual, path.name))]
    return [Problem(f"{path.name}: output differs", unified(expected, actual, path.name))]


def files_below(directory: Path) -> dict[str, Path]:
    """Relative POSIX name -> path of every file below a directory (none if it is missing)."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path for path in files}


def compare_dirs(actual: Path, expected: Path) -> Iterator[Problem]:
    """Missing, extra and different files, by name."""
    ours, theirs = files_below(actual), files_below(expected)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours:
            yield Problem(f"missing: {name} is expected but was not written")
        elif name not in theirs:
            yield Problem(f"extra: {name} was written but is not expected")
        else:
            yield from compare_files(name, ours[name], theirs[name], expected.parent)


def compare_files(name: str, actual: Path, expected: Path, home: Path) -> Iterator[Problem]:
    """The difference of one pair of files, if any: of lines, or of bytes if one is not a text."""
    ours, theirs = content(actual, home), expected.read_bytes()
    if ours == theirs:
        return
    try:
        lines = theirs.decode("utf-8").splitlines(), ours.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        yield Problem(
            f"different: {name}: {len(theirs):,} bytes are expected, {len(ours):,} were written; "
            "'stagec diff' compares traces"
        )
        return
    if diff := unified(*lines, name):
        yield Problem(f"different: {name}", diff)


def content(path: Path, home: Path) -> bytes:
    """What is compared of a file: a text scrubbed, the bytes of anything else, such as a trace."""
    data = path.read_bytes()
    try:
        return scrub(data.decode("utf-8"), home).encode("utf-8")
    except UnicodeDecodeError:
        return data


def bless_dir(actual: Path, expected: Path) -> None:
    """Make the expected directory a scrubbed copy of the actual one."""
    for path in files_below(expected).values():
        path.unlink()
    for name, path in files_below(actual).items():
        target = expected / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content(path, expected.parent))


def check_dir(actual: Path, expected: Path) -> list[Problem]:
    """Compare two directories, or rewrite the expected one when blessing."""
    if expected.suffix != ".golden":
        return [Problem(f"the expected directory must be named *.golden, not {expected.name}")]
    if not files_below(actual):
        return [Problem(f"nothing was written to {actual}")]
    problems = list(compare_dirs(actual, expected))
    if problems and blessing():
        bless_dir(actual, expected)
        log(f"golden: wrote {expected}")
        return []
    return problems


def accept_command(test_file: Path) -> str:
    """The shell command that accepts what the test prints now."""
    return f"stagec test {shlex.quote(str(test_file))} --bless"


#: The files of a folder of which the lines that differ are shown.
_DIFFS = 3


def report(problems: Sequence[Problem], test_file: Path) -> int:
    """Print the problems and how to accept them to stderr; the exit code."""
    if not problems:
        return 0
    diffs = 0
    for problem in problems:
        diffs += bool(problem.diff)
        log(f"golden: {problem.headline}")
        if problem.diff and diffs <= _DIFFS:
            log(problem.diff)
    if diffs > _DIFFS:  # dumps repeat what the first pass changed
        log(f"golden: the differences of the first {_DIFFS} files are shown, of {diffs}")
    log(f"golden: to accept, run\n  {accept_command(test_file)}")
    return 1


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="%golden", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="the test file with the golden section")
    parser.add_argument("--dir", nargs=2, type=Path, metavar=("ACTUAL", "EXPECTED"))
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0: equal (or blessed), 1: different, 2: wrong usage."""
    options = make_parser().parse_args(argv)
    test_file: Path | None = options.file
    pair: list[Path] | None = options.dir
    if pair is not None:
        return report(check_dir(pair[0], pair[1]), test_file or pair[1])
    if test_file is None or not test_file.is_file():
        log(f"golden: no such test file: {test_file}")
        return 2
    return report(check_file(test_file, sys.stdin.read()), test_file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
