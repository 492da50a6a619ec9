"""Tests mutated inputs: every run must end in a result or in a diagnostic.

    python -m tools.fuzz --family parser --count 100000 --seed 1
    python -m tools.fuzz --seconds 600                     all families in turn
    python -m tools.fuzz --minimize FILE --family parser   the shortest input with the same fault

An input is determined by family, seed and number. New faults are written to --corpus, one input for
each place in the source; tests/corpus/ has the previous ones, which a test replays. An input that
takes more than `--cpu` seconds of processor time is a fault too.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType

from tools.fuzzing.families import FAMILIES, Family, FaultError

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "corpus"
_MEMORY = 6 << 30
_PROGRESS = 20.0
#: Trials of a minimization.
_TRIALS = 3000


class TakesLongError(BaseException):
    """An input took more processor time than it may; nothing but the fuzzer is to catch it."""


def made(family: Family, seed: int, number: int) -> bytes:
    """An input by its number."""
    chance = Random(f"{family.name}:{seed}:{number}")
    seeds = family.seeds()
    return family.mutate(chance, chance.choice(seeds), seeds)


def fault_of(family: Family, data: bytes, folder: Path, seconds: float) -> str:
    """What went wrong, as kind and place; empty if nothing did."""
    try:
        with _watched(seconds):
            family.run(data, folder)
    except FaultError as problem:
        return f"{family.name}: {problem}"
    except TakesLongError:
        return f"{family.name}: takes more than {seconds:g} s"
    except Exception as problem:
        return f"{family.name}: {type(problem).__name__} in {_place(problem)}"
    return ""


def _place(problem: Exception) -> str:
    """The innermost function of the compiler on the way to an exception."""
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [
        f for f in frames if Path(f.filename).is_relative_to(ROOT) and ".venv" not in f.filename
    ]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.name}"


@contextmanager
def _watched(seconds: float) -> Generator[None]:
    """Interrupt the body after these seconds of processor time, which is independent of load."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TakesLongError

    if seconds:
        signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def minimized(family: Family, data: bytes, folder: Path, seconds: float) -> bytes:
    """The shortest input that was found for the fault."""
    wanted, trials = fault_of(family, data, folder, seconds), 0
    size = len(data) // 2
    while size and trials < _TRIALS:
        at = 0
        while at < len(data) and trials < _TRIALS:
            shorter = data[:at] + data[at + size :]
            trials += 1
            if fault_of(family, shorter, folder, seconds) == wanted:
                data = shorter
            else:
                at += size
        size //= 2
    return data


class Campaign:
    """Tries inputs and keeps the first of each fault."""

    def __init__(self, corpus: Path, seconds: float, folder: Path) -> None:
        self._corpus, self._seconds, self._folder = corpus, seconds, folder
        self.tried: dict[str, int] = {}
        self.faults: dict[str, int] = {}
        self._began = self._logged = time.monotonic()

    def try_one(self, family: Family, seed: int, number: int) -> None:
        """One input."""
        data = made(family, seed, number)
        fault = fault_of(family, data, self._folder, self._seconds)
        self.tried[family.name] = self.tried.get(family.name, 0) + 1
        if fault:
            self._keep(family, seed, number, data, fault)
        if time.monotonic() - self._logged > _PROGRESS:
            self.log()

    def _keep(self, family: Family, seed: int, number: int, data: bytes, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1
        if self.faults[fault] > 1:
            return
        folder = self._corpus / family.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(fault.encode()).hexdigest()[:12]
        path.write_bytes(data)
        print(f"fault: {fault} (seed {seed}, number {number}): {path}", flush=True)

    def log(self) -> None:
        """Print the state of the campaign."""
        self._logged = time.monotonic()
        done = ", ".join(f"{name} {count:,}" for name, count in self.tried.items())
        rate = sum(self.tried.values()) / max(1e-9, self._logged - self._began)
        print(f"{done}: {len(self.faults)} faults, {rate:,.0f} inputs/s", flush=True)


def numbered(names: Sequence[str], start: int, count: int | None) -> Iterator[tuple[str, int]]:
    """Families in turns, and the number of the next input."""
    number = start
    while count is None or number < start + count:
        for name in names:
            yield name, number
        number += 1


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add(
        "--family",
        action="append",
        choices=list(FAMILIES),
        help="one of them; several (default: all)",
    )
    add("--count", type=int, help="inputs for each family")
    add("--seconds", type=float, help="stop after so long")
    add("--seed", type=int, default=0)
    add("--start", type=int, default=0, help="number of the first input")
    add("--cpu", type=float, default=10.0, help="processor seconds for one input (0: any)")
    add(
        "--corpus",
        type=Path,
        default=ROOT / "build" / "fuzz",
        help="where inputs with new faults go",
    )
    add("--minimize", type=Path, metavar="FILE", help="print the shortest input with its fault")
    given = parser.parse_args(argv)
    if given.count is None and given.seconds is None:
        given.count = 1000
    return given


def main(argv: Sequence[str]) -> int:
    """Run a campaign; 1 if there are faults."""
    given = arguments(argv)
    names = given.family or list(FAMILIES)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    in_memory = "/dev/shm"  # where the system has it: an input writes some files
    with tempfile.TemporaryDirectory(dir=in_memory if Path(in_memory).is_dir() else None) as place:
        folder = Path(place)
        if given.minimize is not None:
            data = minimized(FAMILIES[names[0]], given.minimize.read_bytes(), folder, given.cpu)
            sys.stdout.buffer.write(data)
            return 0
        campaign, began = Campaign(given.corpus, given.cpu, folder), time.monotonic()
        for name, number in numbered(names, given.start, given.count):
            campaign.try_one(FAMILIES[name], given.seed, number)
            if given.seconds is not None and time.monotonic() - began > given.seconds:
                break
        campaign.log()
        for fault, count in sorted(campaign.faults.items()):
            print(f"{count:7} x {fault}")
    return 1 if campaign.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
