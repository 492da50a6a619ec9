"""Runs the RUN lines of a lit test, in this process wherever they are plain pipelines.

A process start costs about 0.4 s, so `%stagec`, `%filecheck` and `%golden` are function calls here.
The stock `lit` runner takes the same lines, with the substitutions of `syntax`.
"""

import contextlib
import io
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagec.driver.shell.session import log
from stagec.testing import golden
from stagec.testing.syntax import (
    Stage,
    UnsupportedSyntaxError,
    as_shell,
    environment,
    parse_line,
    path_substitutions,
    read_test,
    run_lines,
    substitute,
)

CRASHED = 70  # the exit code of an uncaught exception; `not` does not accept it

Command = Callable[[Sequence[str]], int]

# ------------------------------------------------------------------ commands in this process


def stagec_command(argv: Sequence[str]) -> int:
    """`stagec ARGV`."""
    from stagec.driver.cli import main

    return main(list(argv))


def filecheck_command(argv: Sequence[str]) -> int:
    """`filecheck ARGV`, reading sys.stdin."""
    from filecheck.matcher import Matcher
    from filecheck.options import parse_argv_options

    code: int = Matcher.from_opts(parse_argv_options(["filecheck", *argv])).run()
    return code


BUILTINS: Mapping[str, Command] = {
    "%stagec": stagec_command,
    "%filecheck": filecheck_command,
    "%golden": golden.main,
}


def exit_code(error: SystemExit) -> int:
    """What the interpreter would exit with."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    log(str(error.code))
    return 1


def guarded(command: Command, argv: Sequence[str]) -> int:
    """Run a command; an uncaught exception prints its traceback and counts as a crash."""
    try:
        return command(argv)
    except SystemExit as error:
        return exit_code(error)
    except Exception:
        traceback.print_exc()
        return CRASHED


def text_stream(raw: io.BytesIO) -> io.TextIOWrapper:
    """A text stream with a `.buffer`, like the real standard streams."""
    return io.TextIOWrapper(raw, encoding="utf-8", newline="\n", write_through=True)


@contextlib.contextmanager
def standard_streams(stdin: bytes, stdout: io.BytesIO, stderr: io.BytesIO) -> Generator[None]:
    """Point sys.stdin, sys.stdout and sys.stderr at bytes."""
    saved = sys.stdin, sys.stdout, sys.stderr
    out = text_stream(stdout)
    streams = text_stream(io.BytesIO(stdin)), out, out if stdout is stderr else text_stream(stderr)
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = saved
        for stream in streams[1:]:
            stream.flush()
        for stream in set(streams):
            stream.detach()


# ------------------------------------------------------------------ running


@dataclass(frozen=True)
class Outcome:
    """What one stage, or one whole line given to bash, did."""

    command: str
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def failed(self) -> bool:
        return self.code != 0


def negate(code: int) -> int:
    """The exit code under `not`, which takes a failure for success, but not a crash."""
    return 1 if code == 0 or code >= CRASHED or code < 0 else 0


@dataclass(frozen=True)
class LitTest:
    """One test file and the folder that its outputs go to. It runs in its own folder, so that it
    may name what stands beside it."""

    path: Path
    temp: Path

    def lines(self) -> list[str]:
        return run_lines(read_test(self.path))

    def paths(self) -> dict[str, str]:
        return path_substitutions(self.path, self.temp)

    def shell(self, line: str) -> str:
        """The line as a shell command."""
        return as_shell(line, self.path, self.temp)

    def run(self) -> list[Outcome]:
        """Run all lines, up to and including the first one that fails."""
        outcomes: list[Outcome] = []
        with self._surroundings():
            for line in self.lines():
                outcomes += self.run_line(line)
                if any(outcome.failed for outcome in outcomes):
                    break
        return outcomes

    def run_line(self, line: str) -> list[Outcome]:
        """Run one line in process if it is a plain list of pipelines, else through bash."""
        try:
            pipelines = parse_line(line)
        except UnsupportedSyntaxError:
            script = f'set -o pipefail; not() {{ ! "$@"; }}; {self.shell(line)}'
            done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
            return [Outcome(line, done.returncode, done.stdout, done.stderr)]
        outcomes: list[Outcome] = []
        for pipeline in pipelines:
            outcomes += self._run_pipeline(pipeline)
            if any(outcome.failed for outcome in outcomes):
                break
        return outcomes

    @contextlib.contextmanager
    def _surroundings(self) -> Generator[None]:
        saved = dict(os.environ)
        self.temp.mkdir(parents=True, exist_ok=True)
        os.environ.update(environment())
        try:
            with contextlib.chdir(self.path.parent):
                yield
        finally:
            os.environ.clear()
            os.environ.update(saved)

    def _run_pipeline(self, pipeline: Sequence[Stage]) -> list[Outcome]:
        data = b""
        outcomes: list[Outcome] = []
        for stage in pipeline:
            if stage.words[:1] == ("%golden",) and any(outcome.failed for outcome in outcomes):
                break  # what a failed command printed is neither compared nor accepted
            outcomes.append(self._run_stage(stage, data))
            data = b"" if stage.stdout else outcomes[-1].stdout
        return outcomes

    def _run_stage(self, stage: Stage, data: bytes) -> Outcome:
        words = [substitute(text, self.paths()) for text in stage.words]
        stdin = self._file(stage.stdin).read_bytes() if stage.stdin else data
        stdout = io.BytesIO()
        stderr = stdout if stage.merge else io.BytesIO()
        code = self._call(words, stdin, stdout, stderr)
        code = negate(code) if stage.negated else code
        if stage.stdout:
            with self._file(stage.stdout).open("ab" if stage.append else "wb") as file:
                file.write(stdout.getvalue())
        if stage.stderr:
            self._file(stage.stderr).write_bytes(stderr.getvalue())
        shown = " ".join(["not"] * stage.negated + [shlex.quote(text) for text in words])
        errors = b"" if stage.merge else stderr.getvalue()
        return Outcome(shown, code, stdout.getvalue(), errors)

    def _call(
        self, words: Sequence[str], stdin: bytes, stdout: io.BytesIO, stderr: io.BytesIO
    ) -> int:
        command = BUILTINS.get(words[0])
        if command is None:
            return self._run_process(words, stdin, stdout, stderr)
        first = [str(self.path)] if words[0] == "%golden" else []
        with standard_streams(stdin, stdout, stderr):
            return guarded(command, [*first, *words[1:]])

    def _run_process(
        self, words: Sequence[str], stdin: bytes, stdout: io.BytesIO, stderr: io.BytesIO
    ) -> int:
        argv = [part for text in words for part in self._expand(text)]
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, check=False)
        except OSError as error:
            stderr.write(f"{argv[0]}: {error.strerror}\n".encode())
            return 127
        stdout.write(done.stdout)
        stderr.write(done.stderr)
        return done.returncode

    def _expand(self, text: str) -> list[str]:
        return shlex.split(self.shell(text)) if text in BUILTINS else [text]

    def _file(self, name: str) -> Path:
        return self.path.parent / substitute(name, self.paths())


# ------------------------------------------------------------------ reporting

_SHOWN = 20_000
#: The lines of what a golden compares: its difference says the rest.
_COMPARED = 8


def indented(title: str, data: bytes, most: int | None = None) -> str:
    """A titled block of captured output, at most so many lines of it, or nothing."""
    text = data.decode("utf-8", "replace")
    if not text:
        return ""
    lines = text.splitlines()
    if most is not None and len(lines) > most:
        text = "\n".join([*lines[:most], f"... ({len(lines) - most} more lines)"])
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}\n... ({len(text) - _SHOWN} more characters)"
    return f"  {title}:\n" + "".join(f"    {line}\n" for line in text.splitlines())


def describe_failure(test: LitTest, outcomes: Sequence[Outcome]) -> str:
    """The RUN lines, what each command printed, and how to run the test by hand."""
    parts = [f"RUN: {line}\n" for line in test.lines()]
    compared = bool(outcomes) and outcomes[-1].command.startswith("%golden")
    for outcome in outcomes:
        parts.append(f"\n$ {outcome.command}\n  exit code {outcome.code}\n")
        most = _COMPARED if compared and not outcome.code else None
        parts += [indented("stdout", outcome.stdout, most), indented("stderr", outcome.stderr)]
    parts.append("\nby hand:\n")
    parts += [f"  {test.shell(line)}\n" for line in test.lines()]
    return "".join(parts)
