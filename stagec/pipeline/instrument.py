"""Instrumentation of passes: hooks, and printing, dumping, timing and verification built on them.

An instrument is any object with `before_pass` and `after_pass`; subclasses of `Hooks` are also
notified of the start, the end and errors.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO

from stagec.ir.module import Module
from stagec.ir.verified import VerifiedCache
from stagec.pipeline.passes import Pass
from stagec.pipeline.spec import print_pipeline
from stagec.pipeline.verify import verify_module
from stagec.support.diagnostics import Diagnostic, DiagnosticError, note
from stagec.support.files import write_file
from stagec.text.printer import print_module

#: The pass that plans the memory of a module.
PLAN = "plan-memory"
#: The pass that lowers operations to nodes.
LOWERING = "lower-to-trace"
#: The pass after which all buffers of a step are known.
BUFFERS = "offload-to-host"
#: After the last of these passes that runs, the module is the step without its strategy: with types
#: and, for serving, the computation of a step.
STATED = ("infer-shapes", "to-serving", "absorb-latent", "draft-tokens", "draft-ahead")


class Instrument(Protocol):
    """The methods that the manager calls around every pass."""

    def before_pass(self, pass_: Pass, module: Module) -> None:
        """The pass is about to run."""
        ...

    def after_pass(self, pass_: Pass, module: Module) -> None:
        """The pass has run, and the module is in its new phase."""
        ...


class Hooks:
    """An instrument that does nothing; subclasses override what they need."""

    def start(self, module: Module) -> None:
        """Before the first pass."""

    def before_pass(self, pass_: Pass, module: Module) -> None:
        """Before each pass."""

    def after_pass(self, pass_: Pass, module: Module) -> None:
        """After each pass that succeeded."""

    def after_idle(self, pass_: Pass, module: Module) -> None:
        """After each pass that was skipped because it did not apply."""
        self.after_pass(pass_, module)

    def on_error(self, pass_: Pass, module: Module, problem: Exception) -> None:
        """After a pass raised; the exception propagates afterwards."""

    def finish(self, module: Module) -> None:
        """After the last pass."""


class Verification(Hooks):
    """Verifies the module before the first pass, and after each one what it has changed."""

    def __init__(self) -> None:
        self._verified = VerifiedCache()

    def start(self, module: Module) -> None:
        verify_module(module, self._verified)

    def after_pass(self, pass_: Pass, module: Module) -> None:
        try:
            verify_module(module, self._verified)
        except DiagnosticError as e:
            origin = note(f"found after pass '{pass_.name}'")
            raise DiagnosticError(*(_with_note(d, origin) for d in e.diagnostics)) from None

    def after_idle(self, pass_: Pass, module: Module) -> None:
        if pass_.gives is not None:  # a new phase has more rules
            self.after_pass(pass_, module)


def _with_note(item: Diagnostic, extra: Diagnostic) -> Diagnostic:
    return Diagnostic(item.message, item.loc, item.severity, item.remedy, (*item.notes, extra))


class PrintAfter(Hooks):
    """Prints the module after the passes of these names, after `all`, or on each `change`."""

    def __init__(self, names: Sequence[str], stream: TextIO) -> None:
        self._names, self._stream = frozenset(names), stream
        self._last = ""

    def start(self, module: Module) -> None:
        if "change" in self._names:
            self._last = print_module(module)

    def after_pass(self, pass_: Pass, module: Module) -> None:
        if not self._names & {"all", "change", pass_.name}:
            return
        text = print_module(module)
        if text != self._last or self._names & {"all", pass_.name}:
            self._stream.write(f"// -- after {pass_.name}\n{text}")
        self._last = text


class Dumps(Hooks):
    """Keeps the texts of a module after each pass that changes it, by `00-input`,
    `01-infer-shapes`, ... Each text can be parsed again."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._count, self._last = 0, ""

    def start(self, module: Module) -> None:
        self._look("input", module)

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self._look(pass_.name, module)

    def _look(self, name: str, module: Module) -> None:
        text = print_module(module)
        if text != self._last:
            self.add(f"{self._count:02}-{name}", text)
            self._count += 1
        self._last = text

    def add(self, name: str, text: str) -> None:
        """Keep a text."""
        self.texts[name] = text


class DumpDir(Dumps):
    """Writes the texts to files, `00-input.stg` first, instead of keeping them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def start(self, module: Module) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        super().start(module)

    def add(self, name: str, text: str) -> None:
        """Write a text."""
        write_file(self._folder / f"{name}.stg", text)


class Timing(Hooks):
    """Measures each pass; `finish` prints a table."""

    def __init__(self, stream: TextIO) -> None:
        self.seconds: list[tuple[str, float]] = []
        self._stream, self._began = stream, 0.0

    def before_pass(self, pass_: Pass, module: Module) -> None:
        self._began = time.perf_counter()

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self.seconds.append((pass_.name, time.perf_counter() - self._began))

    def finish(self, module: Module) -> None:
        from rich.console import Console
        from rich.table import Table

        total = sum(s for _, s in self.seconds)
        table = Table("pass", "seconds", "share", title="time per pass", show_footer=False)
        for name, seconds in self.seconds:
            table.add_row(name, f"{seconds:.4f}", f"{seconds / total if total else 0:.0%}")
        table.add_row("total", f"{total:.4f}", "")
        shown = io.StringIO()
        Console(file=shown, force_jupyter=False).print(table)
        self._stream.write(shown.getvalue())


class Reproducer(Hooks):
    """Keeps the text before each pass and writes it to a file if the pass crashes.

    The first line of the file is a RUN line with the remaining passes, so that the file reproduces
    the crash and is a lit test.
    """

    def __init__(self, path: Path, passes: Sequence[Pass]) -> None:
        self._path, self._rest = path, list(passes)
        self._text = ""
        self.written = False

    def before_pass(self, pass_: Pass, module: Module) -> None:
        self._text = print_module(module)

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self._rest = self._rest[1:]

    def on_error(self, pass_: Pass, module: Module, problem: Exception) -> None:
        if isinstance(problem, DiagnosticError):
            return
        write_file(self._path, reproducer_text(self._text, self._rest))
        self.written = True
        problem.add_note(f"rerun it with: stagec opt {self._path} --run-reproducer")


_RUN_PREFIX = "// RUN: %stagec opt %s -p '"


def reproducer_text(module_text: str, passes: Sequence[Pass]) -> str:
    """The text of a module after a RUN line for these passes."""
    return f"{_RUN_PREFIX}{print_pipeline(passes)}'\n{module_text}"


def reproducer_pipeline(text: str) -> str | None:
    """The pipeline in the first line of a reproducer, or None."""
    head, _, _ = text.lstrip().partition("\n")
    command, separator, rest = head.partition(" -p '")
    if not separator or "RUN:" not in command:
        return None
    return rest.rpartition("'")[0]
