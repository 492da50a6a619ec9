"""Running a command: its exit code, and the messages of all failures."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

import click

from stagec.jobs.session import Session
from stagec.support.diagnostics import Diagnostic, DiagnosticError, NotAnIntegerError, note

OK, WRONG_INPUT, WRONG_USAGE, BUG, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 70, 130, 141
DEBUG = "STAGEC_DEBUG"


def run_safely(run: Callable[[], object], session: Session) -> int:
    """Run a command and return its exit code. All failures are reported on stderr, without a
    traceback.

    `run` returns an exit code, or None for 0.
    """
    try:
        result = run()
        sys.stdout.flush()
        return result if isinstance(result, int) else OK
    except DiagnosticError as e:
        session.report(*e.diagnostics)
        return WRONG_INPUT
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        with suppress(OSError):
            e.show()
        return WRONG_USAGE if isinstance(e, click.UsageError) else WRONG_INPUT
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return CLOSED_PIPE
    except OSError as e:
        return _os_error(e, session)
    except NotAnIntegerError as e:
        session.report(_not_whole(e))
        return WRONG_INPUT
    except Exception as e:
        return _mistake(e, session)


def _not_whole(problem: NotAnIntegerError) -> Diagnostic:
    return Diagnostic(
        f"{problem.text} {problem.fault}, expected a whole number",
        remedy="choose sizes that divide each other: the batch, the sequence, --microbatches, "
        "--capacity-factor",
    )


_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "give a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EACCES: "check the permissions of the file and its folder",
    errno.EPERM: "check the permissions of the file and its folder",
    errno.EROFS: "write to another place",
    errno.ENOSPC: "free space on the disk, or write to another place",
    errno.EDQUOT: "free space on the disk, or write to another place",
    errno.EEXIST: "choose another name, or remove what is there",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def _os_error(problem: OSError, session: Session) -> int:
    if problem.errno == errno.EPIPE:
        return CLOSED_PIPE
    reason = problem.strerror or str(problem)
    where = f"{problem.filename}: " if problem.filename else "cannot write the output: "
    remedy = _REMEDIES.get(problem.errno or 0, "check the path and the system")
    notes = tuple(map(note, getattr(problem, "__notes__", ())))
    session.report(Diagnostic(where + reason, remedy=remedy, notes=notes))
    return WRONG_INPUT


def _mistake(problem: Exception, session: Session) -> int:
    """Report an exception of a plug-in or of the compiler."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        session.log(traceback.format_exc())
    from stagec.pipeline.blame import blamed

    error = blamed(problem)
    if error is None:
        return _bug(problem, session)
    session.report(error)
    return WRONG_INPUT


def _bug(problem: Exception, session: Session) -> int:
    session.log(f"stagec: internal error: {type(problem).__name__}: {problem}")
    session.log(f"This is a bug in stagec. {DEBUG}=1 shows the traceback.")
    hint = "'stagec opt --reproducer FILE' writes what is needed to run it again"
    for line in getattr(problem, "__notes__", (hint,)):
        session.log(f"  {line}")
    return BUG
