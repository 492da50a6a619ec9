"""Tests mutants: one line of the compiler is changed in a copy, and the lit folder of its pass must
fail. `make mutants` tests all of tools/mutants.txt.

    python -m tools.mutants --generate 40 --seed 1     random changes

Some of these (tools/mutations.py) have no effect, and some crash, which counts as detected."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from stagec.support.processors import processors

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutants.txt"
LIT = Path("tests", "lit")
#: The message of the compiler for internal errors.
CRASH = "stagec: internal error"
#: The folders that a lit folder needs; the rooms outside `stagec` are linked from it.
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
        count = text.count(self.stands)
        if count != 1:
            raise ValueError(f"{self.file} has '{self.stands}' {count} times, expected once")
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
    """A copy of the tree in which one file at a time is changed."""

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
        """Change a file, with a new time, since compiled files are identified by size and time."""
        self._changes += 1
        path = self._root / file
        path.write_text(text)
        os.utime(path, (self._changes, self._changes))

    def failures(self, folder: str) -> dict[str, bool]:
        """The tests of a folder that fail, and whether the compiler crashes in them.

        Raises `RuntimeError` if the folder cannot be run.
        """
        argv = [sys.executable, "-m", "stagec", "test", "-j", "1", str(LIT / folder)]
        env = {**os.environ, "PYTHONPATH": str(self._root), "TMPDIR": str(self._root)}
        done = subprocess.run(
            argv, cwd=self._root, env=env, capture_output=True, text=True, check=False
        )
        failures = re.split(r"^FAIL ", done.stdout, flags=re.MULTILINE)[1:]
        if bool(failures) != (done.returncode == 1):
            raise RuntimeError(f"{folder}: exit code {done.returncode}\n{done.stderr}")
        names = (
            Path(text.splitlines()[0]).relative_to(LIT / folder).as_posix() for text in failures
        )
        return {name: CRASH in text for name, text in zip(names, failures, strict=True)}


class Copies:
    """Copies of the tree, one for each job."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            self._free.put(Copy(folder / str(number)))

    @contextmanager
    def one(self) -> Generator[Copy]:
        """A context with a copy that nobody else uses."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def run(mutants: Sequence[Mutant], jobs: int, *, crashes: bool = False) -> int:
    """Test mutants and print each result. Return the number that survive or do not apply, or the
    number of folders that fail without a mutant. With `crashes`, a crash counts as detected."""
    with (
        tempfile.TemporaryDirectory(prefix="stagec-mutants-") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        copies = Copies(Path(folder), jobs)
        folders = dict.fromkeys(m.folder for m in mutants)
        if wrong := _count(pool.map(partial(_as_it_is, copies), folders)):
            return wrong
        return _count(pool.map(partial(_tried, copies, crashes), mutants))


def _count(results: Iterable[tuple[bool, str]]) -> int:
    """Print the results, and return the number of failures."""
    wrong = 0
    for well, line in results:
        wrong += not well
        if line:
            print(line, flush=True)
    return wrong


def _as_it_is(copies: Copies, folder: str) -> tuple[bool, str]:
    with copies.one() as copy:
        failed = copy.failures(folder)
    return not failed, f"FAILS    {folder}: without a mutant, {', '.join(failed)}" if failed else ""


def _tried(copies: Copies, crashing: bool, mutant: Mutant) -> tuple[bool, str]:
    """Whether a mutant is killed, and the line that says so."""
    text = (ROOT / mutant.file).read_text()
    try:
        wrong = mutant.apply(text)
    except ValueError as e:
        return False, f"UNFIT    {mutant}: {e}"
    with copies.one() as copy:
        copy.write(mutant.file, wrong)
        failed = copy.failures(mutant.folder)
        copy.write(mutant.file, text)
    if not failed:
        return False, f"SURVIVED {mutant}"
    killers = [name for name, crashes in failed.items() if not crashes]
    if not killers:
        if crashing:
            return True, f"crashed  {mutant}"
        return False, f"CRASHES  {mutant}: make it wrong only, no test needs to notice a crash"
    return True, f"killed   {mutant}: by {', '.join(killers)}"


def main() -> int:
    """Return 1 if a mutant survives or does not apply, or if a folder fails without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="TEXT", help="only mutants with TEXT in their line"
    )
    cores = processors()
    parser.add_argument("-j", type=int, default=cores, metavar="N", help="mutants at once")
    parser.add_argument("--generate", type=int, metavar="N", help="N mutants by chance instead")
    parser.add_argument("--seed", type=int, default=1, help="of --generate")
    given = parser.parse_args()
    if given.generate is not None:
        from tools.mutations import sampled

        every = sampled(given.generate, given.seed)
    else:
        every = read_table(TABLE.read_text())
    mutants = [m for m in every if given.k in f"{m} {m.file}"]
    wrong = run(mutants, given.j, crashes=given.generate is not None)
    print(f"{len(mutants)} mutants, {wrong} problems")
    return 1 if wrong or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
