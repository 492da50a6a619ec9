"""One writer of a folder at a time: a lock file beside the folder, which says who has it.

The file is locked by the system, so that the lock ends with the processes that hold it, however
they end; what is written in it is for those who wait.
"""

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
from stagec.support.locks import lock_now, remove_locked

#: Seconds to wait for a run on the same folder that is about to end.
_PATIENCE = 5.0
_STEP = 0.05
_MOST = 4096


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
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, json.dumps(_holder()).encode())
        yield
    finally:
        remove_locked(handle, path)


def _taken(path: Path, folder: Path) -> int:
    deadline = time.monotonic() + _PATIENCE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_locked = lock_now(handle)
            if not is_locked and time.monotonic() > deadline:
                os.lseek(handle, 0, os.SEEK_SET)
                raise _locked_by(os.read(handle, _MOST), folder)
        except BaseException:
            os.close(handle)
            raise
        if not is_locked:
            os.close(handle)
            time.sleep(_STEP)
            continue
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


def _locked_by(contents: bytes, folder: Path) -> DiagnosticError:
    try:
        who: Any = json.loads(contents)
        pid, host = int(who["pid"]), str(who["host"])
        by = f"process {pid} on {host} since {who['since']}: {who['command']}"
        end = f"kill {pid}" + ("" if host == socket.gethostname() else f" on {host}")
    except (ValueError, KeyError, TypeError):
        by, end = "another run", "its process"
    return error(
        f"'{folder}' is being written by {by}",
        remedy=f"wait for it, choose another -o, or end it ({end})",
    )
