"""Runs the tests of files and folders, several at once, and says what came of each."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stagec.testing.lint import lint_lit_text, means_a_test
from stagec.testing.runner import LitTest, Outcome, describe_failure
from stagec.testing.syntax import find_tests, read_test


@dataclass(frozen=True)
class FoundTests:
    """The tests, and the files beside them that have no directive: inputs."""

    tests: Sequence[Path]
    inputs: Sequence[Path]


@dataclass(frozen=True)
class Result:
    """What came of a test: why it failed ("" if it passed), and which goldens it rewrote."""

    path: Path
    problem: str = ""
    wrote: str = ""


def find(paths: Iterable[Path]) -> FoundTests:
    """What stands in these folders and files; a file that is named is a test in any case."""
    tests: list[Path] = []
    inputs: list[Path] = []
    for path in paths:
        for file in find_tests(path) if path.is_dir() else ():
            (tests if means_a_test(read_test(file)) else inputs).append(file)
        if not path.is_dir():
            tests.append(path)
    return FoundTests(tuple(dict.fromkeys(tests)), tuple(dict.fromkeys(inputs)))


def run(tests: Sequence[Path], outputs: Path, jobs: int) -> Iterator[Result]:
    """The results in the order of the tests, each as soon as it and those before it are there.

    Each test has a folder of its own in `outputs`.
    """
    work = partial(_run_one, outputs)
    if min(jobs, len(tests)) < 2:
        yield from map(work, range(len(tests)), tests)
        return
    with ProcessPoolExecutor(min(jobs, len(tests))) as pool:
        yield from pool.map(work, range(len(tests)), tests)


def _run_one(outputs: Path, number: int, path: Path) -> Result:
    findings = [str(finding) for finding in lint_lit_text(path, read_test(path))]
    if findings:
        return Result(path, "\n".join(findings) + "\n")
    test = LitTest(path.resolve(), outputs / str(number))
    outcomes = test.run()
    failed = any(outcome.failed for outcome in outcomes)
    return Result(path, describe_failure(test, outcomes) if failed else "", _wrote(outcomes))


def _wrote(outcomes: Iterable[Outcome]) -> str:
    """What %golden says of a test that passes: which files it rewrote."""
    said = (o.stderr for o in outcomes if o.command.startswith("%golden") and not o.failed)
    return b"".join(said).decode("utf-8", "replace")
