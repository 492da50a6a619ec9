"""What calls from Python have in common: flags as options, and what is reported."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click

from stagec.driver.output.common import kept_reports, sources
from stagec.driver.request.arguments import read
from stagec.driver.request.options import JobOptions, job_command
from stagec.support.diagnostics import (
    Diagnostic,
    DiagnosticError,
    NotAnIntegerError,
    error,
    render,
)

_LOG = logging.getLogger("stagec")


def job_of(model: str, strategy: str | Path | None, flags: Mapping[str, Any]) -> JobOptions:
    """The options of a job. Raises `DiagnosticError` for what the command line refuses."""
    return cast(
        JobOptions, read(job_command, (model, *([str(strategy)] if strategy else [])), flags)
    )


@contextmanager
def asked(depth: int = 4) -> Generator[None]:
    """Let what is reported meanwhile be warnings of Python, `depth` calls above, and what does not
    come out even, or cannot be read, a `DiagnosticError`. Such an error has notes as a command
    prints it, with the line and the remedy. Remarks, which commands print, go to the logger
    `stagec` as information."""
    told: list[Diagnostic] = []
    try:
        with kept_reports() as told, sources() as texts:
            try:
                yield
            except DiagnosticError as problem:
                for diagnostic in problem.diagnostics:
                    problem.add_note(render(diagnostic, texts))
                raise
    except click.UsageError as problem:
        raise error(problem.format_message(), remedy="give it as the command line has it") from None
    except NotAnIntegerError as problem:
        raise error(str(problem), remedy="choose sizes that divide") from None
    except OSError as problem:
        raise error(f"{problem.filename}: {problem.strerror}", remedy="check the path") from None
    finally:
        for diagnostic in dict.fromkeys(told):
            if diagnostic.severity == "warning":
                warnings.warn(diagnostic.message, stacklevel=depth)
            else:
                _LOG.info(diagnostic.message)
