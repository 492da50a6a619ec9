"""Locks of open files that end with the process: `flock` if the system has it, a locked byte on
Windows, else no lock."""

import errno
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any


def _module(name: str) -> Any:
    """A module of one system, None on others."""
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, msvcrt = _module("fcntl"), _module("msvcrt")

#: Errors of file systems without such locks, as on some clusters: no lock is taken.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
#: Errors of Windows for a byte that another process has locked.
_TAKEN = frozenset({errno.EACCES, errno.EDEADLK})
#: The byte that is locked on Windows: beyond the content, since others cannot read it.
_FAR = 1 << 30


def lock_now(handle: int) -> bool:
    """Try to lock an open file without waiting. Returns whether it is locked; without support for
    locks this is always true. Raises `OSError` for other errors."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt is not None:
            os.lseek(handle, _FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError as problem:
        if problem.errno in _NO_LOCKS:
            return True
        if isinstance(problem, BlockingIOError) or (fcntl is None and problem.errno in _TAKEN):
            return False
        raise
    return True


def remove_locked(handle: int, path: Path) -> None:
    """Remove a locked file and close it. Windows cannot remove an open file: there it is closed
    first, and stays if another process has opened it meanwhile."""
    try:
        if fcntl is not None or msvcrt is None:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)
    if fcntl is None and msvcrt is not None:
        with suppress(OSError):
            path.unlink()
