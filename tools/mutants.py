"""Tries mutants: one line of the compiler is made wrong, in a copy, and the lit folder of its pass
must notice. `make mutants` tries all of tools/mutants.txt, `-k TEXT` those with TEXT in their line."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutants.txt"
LIT = Path("tests", "lit")
#: What a lit folder needs; the rooms that stand beside `stagec` are linked from it.
COPIED = ("stagec", "passes", "ir_spec", LIT)


@dataclass(frozen=True)
class Mutant:
    """One wrong line: what it breaks, the folder of tests/lit that must notice, and the patch."""

    breaks: str
    folder: str
    file: str
    stands: str
    instead: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.breaks}"

    def apply(self, text: str) -> str:
        """The text of the file with the patch. Raises `ValueError` if it does not fit once."""
        found = text.count(self.stands)
        if found != 1:
            raise ValueError(f"{self.file} has '{self.stands}' {found} times, expected once")
        return text.replace(self.stands, self.instead)


def read_table(text: str) -> list[Mutant]:
    """The mutants of a table: blocks of three lines, `#` begins a comment."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    blocks = (block.splitlines() for block in "\n".join(lines).split("\n\n") if block.strip())
    return [_mutant([line for line in block if line]) for block in blocks]


def _mutant(block: Sequence[str]) -> Mutant:
    if len(block) != 3 or (block[1][:2], block[2][:2]) != ("- ", "+ "):
        raise ValueError(
            f"expected a line of three parts, one with '- ' and one with '+ ': {block}"
        )
    breaks, folder, file = (part.strip() for part in block[0].split("|"))
    return Mutant(breaks, folder, file, block[1][2:], block[2][2:])


class Copy:
    """A copy of the tree in which one file at a time is wrong."""

    def __init__(self, root: Path) -> None:
        self._root, self._changes = root, 0
        for part in COPIED:
            shutil.copytree(
                ROOT / part,
                root / part,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )

    def write(self, file: str, text: str) -> None:
        """Change a file, to a time of its own: compiled files are told by size and time."""
        self._changes += 1
        path = self._root / file
        path.write_text(text)
        os.utime(path, (self._changes, self._changes))

    def failures(self, folder: str) -> list[str]:
        """The tests of a folder that fail. Raises `RuntimeError` if it cannot be run."""
        argv = [sys.executable, "-m", "stagec", "test", str(LIT / folder)]
        env = {**os.environ, "PYTHONPATH": str(self._root), "TMPDIR": str(self._root)}
        done = subprocess.run(
            argv, cwd=self._root, env=env, capture_output=True, text=True, check=False
        )
        lines = done.stdout.splitlines()
        failed = [line.removeprefix("FAIL ") for line in lines if line.startswith("FAIL ")]
        if bool(failed) != (done.returncode == 1):
            raise RuntimeError(f"{folder}: exit code {done.returncode}\n{done.stderr}")
        return [Path(name).relative_to(LIT / folder).as_posix() for name in failed]


def run(mutants: Iterable[Mutant]) -> list[str]:
    """Try mutants, one after the other; what is wrong with them or with the tests."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stagec-mutants-") as folder:
        copy = Copy(Path(folder))
        chosen = list(mutants)
        for name in dict.fromkeys(m.folder for m in chosen):
            problems += [f"{name}/{test} fails without a mutant" for test in copy.failures(name)]
        for mutant in chosen if not problems else ():
            problem = _try(copy, mutant)
            problems += [problem] if problem else []
    return problems


def _try(copy: Copy, mutant: Mutant) -> str | None:
    """Try one mutant and tell of it; what is wrong if it is not killed."""
    text = (ROOT / mutant.file).read_text()
    try:
        copy.write(mutant.file, mutant.apply(text))
    except ValueError as e:
        return f"{mutant}: {e}"
    failed = copy.failures(mutant.folder)
    copy.write(mutant.file, text)
    if not failed:
        print(f"SURVIVED {mutant}", flush=True)
        return f"{mutant}: no test notices"
    more = f" and {len(failed) - 1} more" if failed[1:] else ""
    print(f"killed   {mutant}: by {failed[0]}{more}", flush=True)
    return None


def main() -> int:
    """Exit code 1 if a mutant survives, does not fit, or a test fails without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="TEXT", help="only mutants with TEXT in their line"
    )
    text = parser.parse_args().k
    mutants = [m for m in read_table(TABLE.read_text()) if text in f"{m} {m.file}"]
    problems = run(mutants)
    print(*problems, f"{len(mutants)} mutants, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
