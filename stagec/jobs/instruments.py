"""The instruments that the options of `opt`, `compile` and `analyze` ask for."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Protocol

from stagec.jobs.session import Session
from stagec.pipeline.instrument import DumpDir, Instrument, PrintAfter, Reproducer, Timing
from stagec.pipeline.plugins import Loaded
from stagec.pipeline.spec import Pipeline
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean


class InstrumentOptions(Protocol):
    """The options of instruments."""

    @property
    def print_after(self) -> tuple[str, ...]:
        """Names of passes, `all` or `change`."""
        ...

    @property
    def dump_dir(self) -> Path | None:
        """Where to write the module after every pass."""
        ...

    @property
    def reproducer(self) -> Path | None:
        """Where to write a crash reproducer."""
        ...

    @property
    def check_numerics(self) -> bool:
        """Whether to run the program around every pass."""
        ...

    @property
    def time_passes(self) -> bool:
        """Whether to print the time of each pass."""
        ...


def instruments(
    options: InstrumentOptions, pipeline: Pipeline, loaded: Loaded, session: Session
) -> list[Instrument]:
    """The instruments for a pipeline; they print to the stream of the session. Raises
    `DiagnosticError` for the name of an unknown pass."""
    instruments: list[Instrument] = []
    if options.print_after:
        _check_names(options.print_after, pipeline, loaded, session)
        names = [pipeline.ends.get(name, name) for name in options.print_after]
        instruments.append(PrintAfter(names, session.stream or StringIO()))
    if options.dump_dir is not None:
        instruments.append(DumpDir(options.dump_dir))
    if options.reproducer is not None:
        instruments.append(Reproducer(options.reproducer, pipeline.passes))
    if options.check_numerics:
        from stagec.interp.check import NumericCheck

        instruments.append(NumericCheck())
    if options.time_passes:
        instruments.append(Timing(session.stream or StringIO()))
    return instruments


def _check_names(
    names: Sequence[str], pipeline: Pipeline, loaded: Loaded, session: Session
) -> None:
    run = {"all", "change", *(p.name for p in pipeline.passes), *pipeline.ends}
    known = {*run, *loaded.passes, *loaded.pipelines}
    for name in names:
        if name not in known:
            raise error(
                f"--print-after: no pass or pipeline '{name}'",
                remedy=did_you_mean(name, known)
                or ("give --print-after once for each pass" if "," in name else None)
                or "'stagec passes' lists the passes",
            )
        if name not in run:
            session.log(f"warning: --print-after {name}: the pipeline does not run it")
