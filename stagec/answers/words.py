"""Diagnostics of calls from Python."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

from stagec.jobs.session import Session
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError, error

_LOG = logging.getLogger("stagec")


@contextmanager
def asked(depth: int = 4) -> Generator[Session]:
    """A context whose diagnostics become Python warnings, attributed `depth` calls above, and in
    which sizes that do not divide and unreadable files raise a `DiagnosticError`. Such an error has
    notes in the form that commands print, with the line and the remedy. Remarks go to the logger
    `stagec` as information."""
    session = Session()
    try:
        try:
            yield session
        except NotAnIntegerError as problem:
            raise error(str(problem), remedy="choose sizes that divide each other") from None
        except OSError as problem:
            about = f"{problem.filename}: {problem.strerror}"
            raise error(about, remedy="check the path") from None
    except DiagnosticError as problem:
        problem.__notes__ = [session.rendered(diagnostic) for diagnostic in problem.diagnostics]
        raise
    finally:
        for diagnostic in dict.fromkeys(session.diagnostics):
            if diagnostic.severity == "warning":
                warnings.warn(diagnostic.message, stacklevel=depth)
            else:
                _LOG.info(diagnostic.message)
