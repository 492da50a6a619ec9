"""One writer of a folder at a time: a lock file beside the folder, which says who has it.

The file is locked by the system (flock), so that the lock ends with the processes that hold it,
however they end; what is written in it is for those who wait.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stagec.support.diagnostics import DiagnosticError, error

#: Seconds to wait for a run on the same folder that is about to end.
_PATIENCE = 5.0
_STEP = 0.05
_MOST = 4096
#: What file systems say that have no such locks, as some of clusters: writing goes on without.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold a folder, which may not be there yet, against other runs.

    Raises `DiagnosticError` that says who has it.
    """
    path = folder.with_name(f".{folder.name}.lock")
    handle = _taken(path, folder)
    try:
        with suppress(OSError):  # on a full disk a lock without words is a lock
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(_holder()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _taken(path: Path, folder: Path) -> int:
    deadline = time.monotonic() + _PATIENCE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _held(os.pread(handle, _MOST, 0), folder) from None
            os.close(handle)
            time.sleep(_STEP)
            continue
        except OSError as e:
            if e.errno in _NO_LOCKS:
                return handle
            os.close(handle)
            raise
        if _is_at(handle, path):
            return handle
        os.close(handle)  # the holder has ended meanwhile, and its file with it


def _is_at(handle: int, path: Path) -> bool:
    """Whether a file still has its name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["stagec", *sys.argv[1:]]),
    }


def _held(told: bytes, folder: Path) -> DiagnosticError:
    try:
        who: Any = json.loads(told)
        pid, host = int(who["pid"]), str(who["host"])
        by = f"process {pid} on {host} since {who['since']}: {who['command']}"
        end = f"kill {pid}" + ("" if host == socket.gethostname() else f" on {host}")
    except (ValueError, KeyError, TypeError):
        by, end = "another run", "its process"
    return error(
        f"'{folder}' is being written by {by}",
        remedy=f"wait for it, choose another -o, or end it ({end})",
    )
