"""The standard streams of a process as its caller left them: closed, full, or read by nobody."""

from __future__ import annotations

import os
import sys

_STDIN, _STDOUT, _STDERR = range(3)


def prepare_streams() -> None:
    """Put something in the place of streams that are closed (`>&-`), so that no file that is opened
    later takes their number. File names that are no text go through stdout as they are.

    stdin is empty and stderr is lost; stdout is a pipe that nobody reads, so that a command that
    has a result ends as it does when its reader is gone.
    """
    if _is_closed(sys.stdin):
        _reopen(os.open(os.devnull, os.O_RDONLY), _STDIN)
        sys.stdin = os.fdopen(_STDIN, "r", encoding="utf-8")
    if _is_closed(sys.stdout):
        reader, writer = os.pipe()
        _reopen(writer, _STDOUT)
        if reader != _STDOUT:
            os.close(reader)
        sys.stdout = os.fdopen(_STDOUT, "w", encoding="utf-8")
    if _is_closed(sys.stderr):
        _reopen(os.open(os.devnull, os.O_WRONLY), _STDERR)
        sys.stderr = os.fdopen(_STDERR, "w", encoding="utf-8")
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="surrogateescape")


def _is_closed(stream: object) -> bool:
    return stream is None  # what Python makes of a stream that it could not open


def _reopen(handle: int, number: int) -> None:
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)


def flush_streams() -> None:
    """Write out what is left. What cannot be written has been reported already: it is dropped, so
    that the interpreter does not try again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed pipe or a full disk
            _reopen(os.open(os.devnull, os.O_WRONLY), stream.fileno())
