"""`stagec test`: runs the lit and golden tests of a folder."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from stagec.driver.shell.session import log
from stagec.support.diagnostics import error
from stagec.support.processors import processors
from stagec.testing import golden, suite
from stagec.testing.suite import FoundTests, Result


@click.command("test")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--bless", is_flag=True, help="Rewrite goldens that differ instead of failing.")
@click.option("-k", "--filter", "part", metavar="TEXT", help="Only tests with TEXT in their path.")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Tests at once (default: one per core).")
@click.option("-v", "--verbose", is_flag=True, help="Name the tests that pass, and the inputs.")
def command(
    paths: tuple[Path, ...], bless: bool, part: str | None, jobs: int | None, verbose: bool
) -> int:
    """Run the lit and golden tests in these files and folders (default: the current one).

    A test is a .stg or .test file with lines '// RUN: COMMAND' that use %stagec, %filecheck and
    %golden; it runs in its own folder. Folders named Inputs and *.golden hold no tests.
    """
    collected = suite.find(paths or (Path(),))
    tests = [t for t in collected.tests if part is None or part in t.as_posix()]
    if not tests:
        raise _nothing(collected, part)
    began = time.monotonic()
    outputs = Path(tempfile.mkdtemp(prefix="stagec-test-"))
    with golden.accepting() if bless else contextlib.nullcontext():
        results = _results(tests, outputs, jobs or processors(), verbose)
    failed = sum(bool(r.problem) for r in results)
    if failed and any(path.is_file() for path in outputs.rglob("*")):
        log(f"what the tests wrote is in {outputs}")
    else:
        shutil.rmtree(outputs)
    if verbose and collected.inputs:
        log(f"without a RUN line, so no tests: {', '.join(map(str, collected.inputs))}")
    click.echo(_summary(len(results), failed, time.monotonic() - began))
    return 1 if failed else 0


def _results(tests: Sequence[Path], outputs: Path, jobs: int, verbose: bool) -> list[Result]:
    """Run the tests, and report each that fails or rewrites a golden."""
    results: list[Result] = []
    for result in suite.run(tests, outputs, jobs):
        results.append(result)
        if result.problem:
            click.echo(f"FAIL {result.path}\n{result.problem}")
        elif verbose:
            click.echo(f"PASS {result.path}")
        click.echo(result.wrote, nl=False)
    return results


def _summary(count: int, failed: int, seconds: float) -> str:
    tests = "1 test" if count == 1 else f"{count} tests"
    verdict = f"{failed} failed, {count - failed} passed" if failed else "all passed"
    return f"{tests}: {verdict} ({seconds:.1f} s)"


def _nothing(tests: FoundTests, part: str | None) -> Exception:
    if tests.tests:
        return error(f"no test has '{part}' in its path", remedy="'-v' lists the tests")
    return error(
        "no tests found: no .stg or .test file has a line '// RUN: COMMAND'",
        remedy="start a test with '// RUN: %stagec opt %s -p PASSES | %filecheck %s'",
    )
