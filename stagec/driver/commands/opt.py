"""`stagec opt`: a filter that runs passes over modules.

`--verify-diagnostics`: comments state the diagnostics of a text and their lines.

`// error: TEXT` is at the end of the offending line; `// error@+1: TEXT` refers to the next line,
and `// error@*: TEXT` to any line. `// warning: TEXT` and `// remark: TEXT` have the same forms.
Every expected diagnostic must occur; unexpected warnings and remarks are allowed.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from stagec.driver.shell import completion
from stagec.driver.shell.click_options import click_option, takes
from stagec.driver.shell.session import the_session
from stagec.driver.shell.show import write_output
from stagec.ir.module import Module
from stagec.jobs.instruments import instruments
from stagec.jobs.request.option import PLUGIN, CommandOption
from stagec.jobs.request.result import PAGE, ResultFile
from stagec.pipeline.instrument import reproducer_pipeline
from stagec.pipeline.manager import PassManager
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.pipeline.spec import PIPELINE, Pipeline
from stagec.pipeline.verify import verify_module
from stagec.support.diagnostics import Diagnostic, DiagnosticError, error, note
from stagec.support.files import check_new_file, write_file
from stagec.support.source import FileLoc, Source, file_loc
from stagec.text.build import parse_module
from stagec.text.printer import print_module

SPLIT = "// -----"


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    file: str
    pipeline: str
    print_after: tuple[str, ...]
    dump_dir: Path | None
    time_passes: bool
    print_generic: bool
    print_locations: bool
    verify_diagnostics: bool
    split_input_file: bool
    reproducer: Path | None
    run_reproducer: bool
    plugin: tuple[Path, ...]
    check_numerics: bool
    allow_unregistered: bool
    html: Path | None
    output: Path | None


class _PrintedModule(ResultFile):
    """The file of the printed module, in a folder that --dump-dir may create."""

    def read(self, text: str) -> Path:
        """The path."""
        return Path(text)


_OUTPUT = CommandOption(
    "output", _PrintedModule(), "Write the result here instead of stdout.", spelling="-o --output"
)


@click.command("opt")
@click.argument("file", default="-")
@click.option(
    "-p",
    "--pipeline",
    shell_complete=completion.COMPLETERS["passes"],
    default="",
    metavar="PASSES",
    help="Run these passes: 'a,b{x=1}'; '+after(a):c', '+before(a):c' and '-a' edit those before.",
)
@click.option(
    "--print-after", multiple=True, metavar="NAME|all|change", help="Print the module after passes."
)
@click.option("--dump-dir", type=Path, metavar="DIR", help="Write the module after every pass.")
@click.option("--time-passes", is_flag=True, help="Print the time of each pass.")
@click.option("--print-generic", is_flag=True, help="Print the generic form of MLIR.")
@click.option("--print-locations", is_flag=True, help="Print where each operation comes from.")
@click.option(
    "--verify-diagnostics", is_flag=True, help="Expect '// error: TEXT' on the offending lines."
)
@click.option("--split-input-file", is_flag=True, help=f"Treat parts between '{SPLIT}' one by one.")
@click.option("--reproducer", type=Path, metavar="FILE", help="Where to write a crash reproducer.")
@click.option(
    "--run-reproducer", is_flag=True, help="Run the passes that line 1 of the file names."
)
@takes(PLUGIN)
@click.option("--check-numerics", is_flag=True, help="Compare numbers before and after each pass.")
@click.option("--allow-unregistered", is_flag=True, help="Accept ops without a definition.")
@click_option(CommandOption("html", PAGE, "Write a page of the module: search, folded regions."))
@click_option(_OUTPUT)
def command(**given: object) -> int:
    """Read a module from FILE (default: stdin), run passes, print the module."""
    return _Opt(Options(**given)).run()  # type: ignore[arg-type]


class _Opt:
    def __init__(self, options: Options) -> None:
        self._options, self._session = options, the_session()
        self._loaded: Loaded = load_plugins(options.plugin)

    def run(self) -> int:
        options = self._options
        if options.output is not None and options.dump_dir is None:
            check_new_file(options.output)
        source = self._session.read(options.file)
        pipeline = self._pipeline(source)
        parts = split_source(source) if options.split_input_file else [source]
        if options.verify_diagnostics:
            return self._expect(parts, pipeline)
        results: list[str] = []
        problems: list[DiagnosticError] = []
        for part in parts:
            try:
                results.append(self._text(self._process(part, pipeline)))
            except DiagnosticError as e:
                problems.append(e)
        text = f"{SPLIT}\n".join(results)
        if options.html is not None:
            self._write_page(text, options.html)
        write_output(text, options.output)
        for problem in problems:
            self._session.report(*problem.diagnostics)
        return 1 if problems else 0

    def _write_page(self, text: str, file: Path) -> None:
        from stagec.output.ir_page import ir_page

        options = self._options
        words = [options.file] if options.file != "-" else []
        words += ["-p", options.pipeline] if options.pipeline else []
        name = Path(options.file).name if words else "module"
        write_file(file, ir_page(name, text, shlex.join(["stagec", "opt", *words])))

    def _pipeline(self, source: Source) -> Pipeline:
        text = self._options.pipeline
        if self._options.run_reproducer:
            pipeline = reproducer_pipeline(source.text)
            if pipeline is None:
                raise error(
                    f"{source.name} is not a reproducer: line 1 has no -p '...'",
                    remedy="give the passes with -p, or a file that --reproducer wrote",
                )
            text = pipeline
        self._session.remember(Source(PIPELINE, text))
        return self._loaded.pipeline(text)

    def _process(self, source: Source, pipeline: Pipeline) -> Module:
        allow = self._options.allow_unregistered
        module = parse_module(source, self._loaded.registry, allow_unregistered=allow)
        if not pipeline.passes:
            verify_module(module)
        added = instruments(self._options, pipeline, self._loaded, self._session)
        PassManager(pipeline, added, known=self._loaded.passes.values()).run(module)
        return module

    def _text(self, module: Module) -> str:
        self._session.report(*module.diagnostics.items)
        if self._options.print_generic:
            from stagec.text.generic import print_generic

            return print_generic(module, locations=self._options.print_locations)
        return print_module(module, locations=self._options.print_locations)

    def _expect(self, parts: list[Source], pipeline: Pipeline) -> int:
        code = 0
        for part in parts:
            expected = Expectations(part)
            try:
                expected.take(self._process(part, pipeline).diagnostics.items)
            except DiagnosticError as e:
                expected.take(e.diagnostics)
            problems = list(expected.problems())
            self._session.report(*problems)
            code = 1 if problems else code
        return code


def split_source(source: Source) -> list[Source]:
    """The parts between lines `// -----`, with the original line numbers."""
    parts: list[Source] = []
    lines: list[str] = []
    start = 0
    for number, line in enumerate(source.text.splitlines()):
        if line.strip() == SPLIT:
            parts.append(Source(source.name, "\n" * start + "\n".join(lines)))
            lines, start = [], number + 1
        else:
            lines.append(line)
    return [*parts, Source(source.name, "\n" * start + "\n".join(lines))]


_SEVERITY = "error|warning|remark"
_EXPECTED = re.compile(
    rf"// (?P<severity>{_SEVERITY})(?:@(?P<at>[+-]\d+|\*))?: "
    rf"(?P<text>.*?)(?=\s*// (?:{_SEVERITY})|\s*$)"
)


@dataclass(frozen=True)
class _Expected:
    severity: str
    text: str
    line: int | None
    loc: FileLoc

    def matches(self, diagnostic: Diagnostic) -> bool:
        place = file_loc(diagnostic.loc)
        here = self.line is None or (place is not None and place.line == self.line)
        return here and diagnostic.severity == self.severity and self.text in diagnostic.message


class Expectations:
    """The expected diagnostics of a text that have not occurred, and its unexpected errors."""

    def __init__(self, source: Source) -> None:
        self._open = list(_expected(source))
        self._unexpected: list[Diagnostic] = []

    def take(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Match each diagnostic with one expectation."""
        for diagnostic in diagnostics:
            met = next((e for e in self._open if e.matches(diagnostic)), None)
            if met is not None:
                self._open.remove(met)
            elif diagnostic.severity == "error":
                self._unexpected.append(diagnostic)

    def problems(self) -> Iterator[Diagnostic]:
        """Errors that were not expected, and expectations that were not met."""
        for unexpected in self._unexpected:
            notes = (*unexpected.notes, note(f"expect it with '// error: {unexpected.message}'"))
            message = f"unexpected error: {unexpected.message}"
            yield Diagnostic(message, unexpected.loc, "error", unexpected.remedy, notes)
        for missing in self._open:
            yield Diagnostic(
                f"expected {missing.severity} was not reported: {missing.text}", missing.loc
            )


def _expected(source: Source) -> Iterator[_Expected]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        for match in _EXPECTED.finditer(line):
            at = match["at"]
            where = None if at == "*" else number + int(at or 0)
            loc = FileLoc(source.name, number, match.start() + 1, len(match[0]))
            yield _Expected(match["severity"], match["text"].strip(), where, loc)
