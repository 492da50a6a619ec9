"""Standard streams that the caller closed, that are full, or that nobody reads."""

import os
import sys

_STDIN, _STDOUT, _STDERR = range(3)


def prepare_streams() -> None:
    """Replace closed streams (`>&-`), so that no file that is opened later gets their number. File
    names that are not valid text pass through stdout unchanged.

    stdin becomes empty and stderr is discarded; stdout becomes a pipe without a reader, so that a
    command with a result exits as if its reader were gone.
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
    return stream is None  # the value of a stream that Python could not open


def _reopen(handle: int, number: int) -> None:
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)


def flush_streams() -> None:
    """Flush the streams. Failures have been reported before: the rest is dropped, so that the
    interpreter does not try again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed pipe or a full disk
            _reopen(os.open(os.devnull, os.O_WRONLY), stream.fileno())
