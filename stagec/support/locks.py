"""Locks of open files that end with the process: `flock` where there is one, else a byte that
Windows locks, else none."""

from __future__ import annotations

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

#: What file systems say that have no such locks, as some of clusters: writing goes on without.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
#: What Windows says of a byte that another process has locked.
_TAKEN = frozenset({errno.EACCES, errno.EDEADLK})
#: The byte that Windows locks: behind all that is written, for nobody else can read it.
_FAR = 1 << 30


def lock_now(handle: int) -> bool:
    """Lock an open file, at once or not at all; whether that was possible. Where there are no
    locks, every file counts as locked. Raises `OSError`."""
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
    """Remove a locked file and close it. Windows removes no file that is open: there it is closed
    first, and stays if another process has opened it meanwhile."""
    try:
        if fcntl is not None or msvcrt is None:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)
    if fcntl is None and msvcrt is not None:
        with suppress(OSError):
            path.unlink()
